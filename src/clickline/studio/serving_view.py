"""The serving panel: the server's Prometheus metrics, scraped once a second while someone watches."""

from __future__ import annotations

import asyncio
import ssl
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from clickline.config import Config
from clickline.errors import ClicklineError
from clickline.pipeline.endpoint import endpoint_of
from clickline.serving.auth import read_token

_POINTS = 300
_TIMEOUT_SECONDS = 2.0
_GAP_SECONDS = 5.0  # after a longer pause between two scrapes, their difference is not a current rate
_MAX_BYTES = 8 * 2**20
_SUCCESS = ("OK", "200")

Series = tuple[str, ...]


@dataclass(frozen=True)
class Scrape:
    """One scrape of the metrics."""

    at: float
    counts: Mapping[Series, float]  # by name and labels
    buckets: Mapping[tuple[Series, float], float]  # cumulative requests by series and upper bound in seconds
    version: int | None


class ServingView:
    """The server of one home."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._endpoint = endpoint_of(config)
        self._history: deque[dict[str, Any]] = deque(maxlen=_POINTS)
        self._last: Scrape | None = None
        self._reason: str | None = None
        self._client: httpx.AsyncClient | None = None
        self._sampled_at = float("-inf")  # monotonic time of the last attempt
        self._turn = asyncio.Lock()

    async def sample(self, seconds: float = 0.0) -> dict[str, Any] | None:
        """Scrape the metrics, unless that was done in the last `seconds`. Returns the new point; None for the first
        scrape and if the server does not answer."""
        async with self._turn:
            if time.monotonic() - self._sampled_at < seconds:
                return None
            self._sampled_at = time.monotonic()
            return await self._sample()

    async def _sample(self) -> dict[str, Any] | None:
        try:
            scrape = _parsed(await self._page(), time.time())
        except (ClicklineError, httpx.HTTPError, OSError, ValueError) as error:
            self._last, self._reason = None, _error_text(error)
            return None
        before, self._last, self._reason = self._last, scrape, None
        if before is None or not 0 < scrape.at - before.at <= _GAP_SECONDS:
            return None
        point = _point(before, scrape)
        self._history.append(point)
        return point

    def document(self) -> dict[str, Any]:
        """The document of the serving panel."""
        last = self._last
        counts: Mapping[Series, float] = {} if last is None else last.counts
        by_code, by_protocol = _summed(counts, "requests", 2), _summed(counts, "requests", 1)
        lookups, misses = _summed(counts, "lookups", 1), _summed(counts, "lookup_misses", 1)
        requests = sum(by_code.values())
        return {
            "alive": last is not None,
            "reason": self._reason,
            "version": None if last is None else last.version,
            "url": self._endpoint.http,
            "history": list(self._history),
            "totals": {
                "requests": requests,
                "errors": requests - sum(by_code[code] for code in _SUCCESS),
                "rows": sum(_summed(counts, "rows", 1).values()),
            },
            "slots": [
                {
                    "slot": slot,
                    "lookups": count,
                    "misses": misses[slot],
                    "miss_rate": misses[slot] / count if count else None,
                }
                for slot, count in lookups.items()
            ],
            "by_code": by_code,
            "by_protocol": by_protocol,
        }

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    async def _page(self) -> str:
        if self._client is None:
            self._client = httpx.AsyncClient(
                timeout=_TIMEOUT_SECONDS, verify=trusted_certificates(self._config), trust_env=False
            )
        token = read_token(self._config.serve.token_file)
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        url = self._endpoint.metrics.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
        async with self._client.stream("GET", url, headers=headers) as answer:
            page = b""
            async for piece in answer.aiter_bytes():
                page += piece
                if len(page) > _MAX_BYTES:
                    raise ClicklineError(
                        "the program on this port is not a clickline server: its page is too large"
                    )
        text = page.decode(errors="replace")
        if answer.status_code != 200:
            raise ClicklineError(f"it answered {answer.status_code}: {text[:200].strip()}")
        return text


def trusted_certificates(config: Config) -> ssl.SSLContext | bool:
    """Trust for the server's own certificate or its CA; the host name is not checked."""
    tls = config.serve.tls
    if tls is None:
        return True
    context = ssl.create_default_context(cafile=tls.ca or tls.certificate)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def _parsed(page: str, at: float) -> Scrape:
    counts: dict[Series, float] = {}
    buckets: dict[tuple[Series, float], float] = {}
    version = None
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            name = sample.name.removeprefix("clickline_")
            if name == "request_seconds_bucket":
                series = (sample.labels["protocol"], sample.labels["version"])
                buckets[series, float(sample.labels["le"])] = sample.value
            elif name == "version":
                version = int(sample.value)
            elif name.endswith("_total"):
                order = [sample.labels[label] for label in _LABELS if label in sample.labels]
                counts[(name.removesuffix("_total"), *order)] = sample.value
    return Scrape(at, counts, buckets, version)


_LABELS = ("protocol", "slot", "code", "kind")


def _point(before: Scrape, now: Scrape) -> dict[str, Any]:
    seconds = now.at - before.at

    def grown(name: str) -> dict[Series, float]:
        return {
            series: _growth(before.counts.get(series, 0.0), value)
            for series, value in now.counts.items()
            if series[0] == name
        }

    requests = grown("requests")
    errors = sum(value for series, value in requests.items() if series[2] not in _SUCCESS)
    cumulative: dict[float, float] = {}
    for (series, end), value in now.buckets.items():
        cumulative[end] = cumulative.get(end, 0.0) + _growth(before.buckets.get((series, end), 0.0), value)
    return {
        "at": datetime.fromtimestamp(now.at, UTC).isoformat(timespec="milliseconds"),
        "qps": sum(requests.values()) / seconds,
        "rows_per_second": sum(grown("rows").values()) / seconds,
        "p50_ms": _quantile(cumulative, 0.5),
        "p99_ms": _quantile(cumulative, 0.99),
        "errors_per_second": errors / seconds,
    }


def _growth(before: float, now: float) -> float:
    return now - before if now >= before else now  # the server was restarted and counts from zero


def _quantile(cumulative: Mapping[float, float], quantile: float) -> float | None:
    """A latency quantile in milliseconds, interpolated linearly within a bucket as Prometheus does."""
    ends = sorted(cumulative)
    total = cumulative[ends[-1]] if ends else 0.0
    if not total:
        return None
    rank = quantile * total
    n = bisect_left([cumulative[end] for end in ends], rank)
    if ends[n] == float("inf"):  # above the largest bucket
        return 1000 * ends[n - 1] if n else None
    start, below = (ends[n - 1], cumulative[ends[n - 1]]) if n else (0.0, 0.0)
    inside = cumulative[ends[n]] - below
    return 1000 * (start + (ends[n] - start) * ((rank - below) / inside if inside else 1.0))


def _summed(counts: Mapping[Series, float], name: str, label: int) -> Counter[str]:
    totals: Counter[str] = Counter()
    for series, value in counts.items():
        if series[0] == name:
            totals[series[label]] += int(value)
    return totals


def _error_text(error: Exception) -> str:
    if isinstance(error, httpx.TimeoutException):
        return f"no answer within {_TIMEOUT_SECONDS:g} s"
    return f"no answer: {error}" if isinstance(error, httpx.HTTPError) else str(error)
