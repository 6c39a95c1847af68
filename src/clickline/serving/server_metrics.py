"""Request metrics: counted in each worker, and summed over all workers for Prometheus.

A worker counts in plain dictionaries, which takes about two microseconds a request, and sends them to the supervisor
when /metrics is read. Latencies are kept for the last versions only: with a new version every hour, series that are
never dropped would grow without bound.
"""

from __future__ import annotations

import json
import threading
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from clickline.serving.open_versions import ScorerLike

BUCKETS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Upper bounds in seconds."""

KEPT_VERSIONS = 5

_COUNTERS = {
    "requests": ("Requests that were answered or refused.", ("protocol", "code")),
    "refused": ("Requests that were refused, by reason.", ("protocol", "kind")),
    "rows": ("Rows that were scored.", ("protocol",)),
    "lookups": ("Ids looked up in the sparse table.", ("slot",)),
    "remote": (
        "Events at lookup servers: keys, hedges, failovers, ids that got default rows, …",
        ("what",),
    ),
    "lookup_misses": ("Ids not in the sparse table, which got their slot's default row.", ("slot",)),
}


class RequestMetrics:
    """Request metrics of one process, or the sum of several."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, ...]] = Counter()  # by name and labels
        # By protocol and version: the count of each bucket, and the sum.
        self.seconds: dict[tuple[str, int], list[float]] = {}
        self._lock = threading.Lock()

    def answered(self, protocol: str, code: str, version: int, rows: int, seconds: float) -> None:
        counts = self.counts
        with self._lock:
            counts["requests", protocol, code] += 1
            counts["rows", protocol] += rows
            buckets = self.seconds.get((protocol, version))
            if buckets is None:
                buckets = self._new(protocol, version)
            buckets[bisect_left(BUCKETS, seconds)] += 1
            buckets[-1] += seconds

    def info_answered(self, protocol: str, code: str) -> None:
        """Count a request about the server itself."""
        with self._lock:
            self.counts["requests", protocol, code] += 1

    def refused(self, protocol: str, code: str, kind: str) -> None:
        with self._lock:
            self.counts["requests", protocol, code] += 1
            self.counts["refused", protocol, kind] += 1

    def lookups(self, scorer: ScorerLike) -> None:
        """Move a scorer's lookup counts into the metrics."""
        lookups_S, misses_S = scorer.lookups_S.copy(), scorer.misses_S.copy()
        scorer.lookups_S -= lookups_S
        scorer.misses_S -= misses_S
        with self._lock:
            for slot, lookups, misses in zip(scorer.features.slots, lookups_S, misses_S, strict=True):
                self.counts["lookups", slot.name] += int(lookups)
                self.counts["lookup_misses", slot.name] += int(misses)

    def remote(self, counts: Mapping[str, int]) -> None:
        """Set the counts of lookup servers since the start of the process."""
        with self._lock:
            for name, count in counts.items():
                self.counts["remote", name] = count

    def add(self, other: RequestMetrics) -> None:
        self.counts.update(other.counts)
        for (protocol, version), buckets in other.seconds.items():
            total = self.seconds.get((protocol, version)) or self._new(protocol, version)
            total[:] = [a + b for a, b in zip(total, buckets, strict=True)]

    def to_json(self) -> str:
        with self._lock:
            return json.dumps(
                {
                    "counts": [[*key, value] for key, value in self.counts.items()],
                    "seconds": [[*key, buckets] for key, buckets in self.seconds.items()],
                }
            )

    @classmethod
    def from_json(cls, text: str) -> RequestMetrics:
        document = json.loads(text)
        metrics = cls()
        metrics.counts.update({tuple(key): value for *key, value in document["counts"]})
        metrics.seconds = {(protocol, version): buckets for protocol, version, buckets in document["seconds"]}
        return metrics

    def _new(self, protocol: str, version: int) -> list[float]:
        versions = sorted({known for _, known in self.seconds} | {version})
        for key in [key for key in self.seconds if key[1] not in versions[-KEPT_VERSIONS:]]:
            del self.seconds[key]
        # A version before the last ones, after a rollback, is kept while it is served.
        return self.seconds.setdefault((protocol, version), [0.0] * (len(BUCKETS) + 2))


def exposition(
    metrics: RequestMetrics, gauges: Mapping[str, tuple[str, float]], totals: Mapping[str, tuple[str, float]]
) -> bytes:
    """Render /metrics. `gauges` and `totals` are the supervisor's own metrics: name to (help, value)."""
    registry = CollectorRegistry()
    registry.register(_FixedFamilies([*_families(metrics), *_supervisor_families(gauges, totals)]))
    return generate_latest(registry)


class _FixedFamilies(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _families(metrics: RequestMetrics) -> Iterator[Metric]:
    by_name: defaultdict[str, list[tuple[tuple[str, ...], int]]] = defaultdict(list)
    for (name, *labels), value in sorted(metrics.counts.items()):
        by_name[name].append((tuple(labels), value))
    for name, (help_text, label_names) in _COUNTERS.items():
        family = CounterMetricFamily(f"clickline_{name}", help_text, labels=label_names)
        for values, count in by_name[name]:
            family.add_metric(values, count)
        yield family
    histogram = HistogramMetricFamily(
        "clickline_request_seconds",
        "Time from a request's arrival to its answer.",
        labels=("protocol", "version"),
    )
    for (protocol, version), (*counts, total) in sorted(metrics.seconds.items()):
        cumulative, rows = 0.0, []
        for end, bucket in zip((*map(str, BUCKETS), "+Inf"), counts, strict=True):
            cumulative += bucket
            rows.append((end, cumulative))
        histogram.add_metric((protocol, str(version)), rows, total)
    yield histogram


def _supervisor_families(gauges: Mapping[str, Any], totals: Mapping[str, Any]) -> Iterator[Metric]:
    for name, (help_text, value) in gauges.items():
        yield GaugeMetricFamily(f"clickline_{name}", help_text, value=value)
    for name, (help_text, value) in totals.items():
        yield CounterMetricFamily(f"clickline_{name}", help_text, value=value)
