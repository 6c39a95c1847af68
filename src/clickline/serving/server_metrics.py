"""What is counted: in each worker, and summed over all of them as Prometheus reads it.

A worker counts in plain dictionaries, about two microseconds a request, and tells them to the supervisor when
/metrics is read. Latencies are kept for the last versions only: with a new version every hour, series that live for
ever would grow without bound.
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
"""Upper ends in seconds."""

KEPT_VERSIONS = 5

_COUNTERS = {
    "requests": ("Requests that were answered or refused.", ("protocol", "code")),
    "refused": ("Requests that were refused, by reason.", ("protocol", "kind")),
    "rows": ("Rows that were scored.", ("protocol",)),
    "lookups": ("Ids looked up in the sparse table.", ("slot",)),
    "remote": (
        "What happened at lookup servers: keys, hedges, failovers, ids left with default rows, …",
        ("what",),
    ),
    "lookup_misses": ("Ids that are not in the sparse table and got their slot's default row.", ("slot",)),
}


class Tally:
    """Counts of one process, or of several added up."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, ...]] = Counter()  # by name and labels
        # By protocol and version: how many in each bucket, and the sum.
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

    def told(self, protocol: str, code: str) -> None:
        """A request about the server itself."""
        with self._lock:
            self.counts["requests", protocol, code] += 1

    def refused(self, protocol: str, code: str, kind: str) -> None:
        with self._lock:
            self.counts["requests", protocol, code] += 1
            self.counts["refused", protocol, kind] += 1

    def lookups(self, scorer: ScorerLike) -> None:
        """Take over what a scorer has counted."""
        lookups_S, misses_S = scorer.lookups_S.copy(), scorer.misses_S.copy()
        scorer.lookups_S -= lookups_S
        scorer.misses_S -= misses_S
        with self._lock:
            for slot, lookups, misses in zip(scorer.features.slots, lookups_S, misses_S, strict=True):
                self.counts["lookups", slot.name] += int(lookups)
                self.counts["lookup_misses", slot.name] += int(misses)

    def remote(self, counts: Mapping[str, int]) -> None:
        """What was counted of lookup servers since the process began."""
        with self._lock:
            for name, count in counts.items():
                self.counts["remote", name] = count

    def add(self, other: Tally) -> None:
        self.counts.update(other.counts)
        for (protocol, version), buckets in other.seconds.items():
            mine = self.seconds.get((protocol, version)) or self._new(protocol, version)
            mine[:] = [a + b for a, b in zip(mine, buckets, strict=True)]

    def to_json(self) -> str:
        with self._lock:
            return json.dumps(
                {
                    "counts": [[*key, value] for key, value in self.counts.items()],
                    "seconds": [[*key, buckets] for key, buckets in self.seconds.items()],
                }
            )

    @classmethod
    def from_json(cls, text: str) -> Tally:
        document = json.loads(text)
        tally = cls()
        tally.counts.update({tuple(key): value for *key, value in document["counts"]})
        tally.seconds = {(protocol, version): buckets for protocol, version, buckets in document["seconds"]}
        return tally

    def _new(self, protocol: str, version: int) -> list[float]:
        versions = sorted({known for _, known in self.seconds} | {version})
        for key in [key for key in self.seconds if key[1] not in versions[-KEPT_VERSIONS:]]:
            del self.seconds[key]
        # A rollback goes to an old version: it is counted too, as long as it is asked for.
        return self.seconds.setdefault((protocol, version), [0.0] * (len(BUCKETS) + 2))


def exposition(
    tally: Tally, gauges: Mapping[str, tuple[str, float]], totals: Mapping[str, tuple[str, float]]
) -> bytes:
    """The page that Prometheus reads. `gauges` and `totals`: what the supervisor knows, as (help, value) by name."""
    registry = CollectorRegistry()
    registry.register(_Page([*_families(tally), *_own(gauges, totals)]))
    return generate_latest(registry)


class _Page(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _families(tally: Tally) -> Iterator[Metric]:
    by_name: defaultdict[str, list[tuple[tuple[str, ...], int]]] = defaultdict(list)
    for (name, *labels), value in sorted(tally.counts.items()):
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
    for (protocol, version), (*counts, total) in sorted(tally.seconds.items()):
        so_far, rows = 0.0, []
        for end, bucket in zip((*map(str, BUCKETS), "+Inf"), counts, strict=True):
            so_far += bucket
            rows.append((end, so_far))
        histogram.add_metric((protocol, str(version)), rows, total)
    yield histogram


def _own(gauges: Mapping[str, Any], totals: Mapping[str, Any]) -> Iterator[Metric]:
    for name, (help_text, value) in gauges.items():
        yield GaugeMetricFamily(f"clickline_{name}", help_text, value=value)
    for name, (help_text, value) in totals.items():
        yield CounterMetricFamily(f"clickline_{name}", help_text, value=value)
