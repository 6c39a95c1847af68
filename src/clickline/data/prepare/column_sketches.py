"""Statistics of a dataset's columns, as sketches that can be merged in any order.

RowStatistics   of one shard or split: rows, clicks, bad rows, and a SlotStatistics for each slot
NumberSketch    of one number column of the training data: what minmax, zscore, robust and quantiles need
"""

from __future__ import annotations

import base64
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clickline.features import FieldStatistics, SlotField, encoder_kernels
from clickline.features.raw_columns import as_text, canonical_text, select_values, split_values
from clickline.kernel_intrinsics import leading_zeros
from clickline.numba_cache import njit
from clickline.records import LabelledRows, RawColumn, RawRows

_BITS = 13  # 8,192 registers: a standard error of 1.15 % in the number of distinct ids
_SAMPLED_ROWS = 64  # of each block, for the most frequent values
_STORED_VALUES = 50  # of each slot and shard
_PREVIEW_CHARACTERS = 60  # characters of a value
_SAMPLED_NUMBERS = 1 << 16  # of each number column, for quantiles


@dataclass
class SlotStatistics:
    """One slot: distinct ids (HyperLogLog), rows without a value, frequent values in a sample of rows."""

    registers: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(1 << _BITS, dtype=np.uint8))
    values: int = 0
    missing: int = 0
    sampled: int = 0
    frequent: Counter[str] = field(default_factory=Counter)

    def observe(self, ids_N: NDArray[np.uint64], missing_id: int) -> None:
        self.values += ids_N.size
        self.missing += _update_registers(ids_N, np.uint64(missing_id), self.registers)

    def merge(self, other: SlotStatistics) -> None:
        np.maximum(self.registers, other.registers, out=self.registers)
        self.values += other.values
        self.missing += other.missing
        self.sampled += other.sampled
        self.frequent.update(other.frequent)

    def most_frequent(self, count: int) -> list[tuple[str, int]]:
        return sorted(self.frequent.items(), key=lambda item: (-item[1], item[0]))[:count]

    def report(self, name: str, rows: int) -> dict[str, Any]:
        top = self.most_frequent(10)
        return {
            "name": name,
            "distinct": estimate_distinct(self.registers),
            "missing_rate": self.missing / rows if rows else 0.0,
            "values_per_row": self.values / rows if rows else 0.0,
            "top": [{"value": value, "share": round(count / self.sampled, 6)} for value, count in top],
        }


@dataclass
class RowStatistics:
    """Counts over rows; the statistics of shards are merged into those of a split."""

    slots: tuple[SlotStatistics, ...]
    rows: int = 0
    impressions: int = 0
    clicks: int = 0
    bad: Counter[str] = field(default_factory=Counter)
    hours: tuple[int, int] | None = None  # first and last known event hour

    @classmethod
    def empty(cls, slots: int) -> RowStatistics:
        return cls(tuple(SlotStatistics() for _ in range(slots)))

    def observe(self, rows: LabelledRows, missing_ids: Iterable[int]) -> None:
        self.rows += rows.rows
        self.impressions += int(rows.impression_B.sum(dtype=np.uint64))
        self.clicks += int(rows.click_B.sum(dtype=np.uint64))
        for slot, ids, missing_id in zip(self.slots, rows.encoded.slots, missing_ids, strict=True):
            slot.observe(ids.ids_N, missing_id)
        known_B = rows.event_hour_B[rows.event_hour_B >= 0]
        if known_B.size:
            self._extend_hours(int(known_B.min()), int(known_B.max()))

    def sample(self, raw: RawRows, slots: Iterable[SlotField], missing: Iterable[str]) -> None:
        """Count the values of some evenly spaced rows, as text: enough to name the frequent ones."""
        if not raw.rows:
            return
        nothing = {"", *(canonical_text(text).decode() for text in missing)}
        rows = np.unique(np.linspace(0, raw.rows - 1, min(raw.rows, _SAMPLED_ROWS)).astype(np.int64))
        for statistics, slot in zip(self.slots, slots, strict=True):
            column = raw.columns.get(slot.column)
            if column is not None:
                texts = _sampled_texts(column, rows, slot.separator)
                statistics.sampled += len(texts)
                statistics.frequent.update(text for text in texts if text not in nothing)

    def trim(self) -> None:
        """Drop rare values, so that a shard's statistics stay small. Call it before they are stored or merged."""
        for slot in self.slots:
            slot.frequent = Counter(dict(slot.most_frequent(_STORED_VALUES)))

    def merge(self, other: RowStatistics) -> None:
        self.rows += other.rows
        self.impressions += other.impressions
        self.clicks += other.clicks
        self.bad.update(other.bad)
        if other.hours:
            self._extend_hours(*other.hours)
        for mine, theirs in zip(self.slots, other.slots, strict=True):
            mine.merge(theirs)

    def _extend_hours(self, first: int, last: int) -> None:
        self.hours = (min(first, self.hours[0]), max(last, self.hours[1])) if self.hours else (first, last)

    def to_json(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "impressions": self.impressions,
            "clicks": self.clicks,
            "bad": dict(sorted(self.bad.items())),
            "hours": self.hours,
            "slots": [
                {
                    "registers": base64.b64encode(zlib.compress(slot.registers.tobytes(), 1)).decode(),
                    "values": slot.values,
                    "missing": slot.missing,
                    "sampled": slot.sampled,
                    "frequent": sorted(slot.frequent.items()),
                }
                for slot in self.slots
            ],
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> RowStatistics:
        return cls(
            rows=document["rows"],
            impressions=document["impressions"],
            clicks=document["clicks"],
            bad=Counter(document["bad"]),
            hours=tuple(document["hours"]) if document["hours"] else None,
            slots=tuple(
                SlotStatistics(
                    np.frombuffer(
                        zlib.decompress(base64.b64decode(slot["registers"])), dtype=np.uint8
                    ).copy(),
                    slot["values"],
                    slot["missing"],
                    slot["sampled"],
                    Counter(dict(slot["frequent"])),
                )
                for slot in document["slots"]
            ),
        )


def _sampled_texts(column: RawColumn, rows: NDArray[np.int64], separator: str | None) -> list[str]:
    """The values of some rows as canonical text, cut to a short length."""
    indices = rows
    if column.offsets_B1 is not None:
        offsets = column.offsets_B1
        indices = np.concatenate([np.arange(offsets[row], offsets[row + 1]) for row in rows])
    sampled = select_values(column, indices)
    text = as_text(sampled if separator is None else split_values(sampled, separator))
    spans = zip(text.starts_N.tolist(), text.ends_N.tolist(), strict=True)
    data = text.data.data
    return [
        str(data[start : min(end, start + _PREVIEW_CHARACTERS)], "utf-8", "replace") for start, end in spans
    ]


@njit(cache=True, nogil=True)
def _update_registers(ids_N: NDArray[np.uint64], missing_id: np.uint64, registers: NDArray[np.uint8]) -> int:
    """Update HyperLogLog registers. Ids are already mixed, so their bits serve as the hash."""
    missing = 0
    for n in range(ids_N.size):
        value = ids_N[n]
        if value == missing_id:
            missing += 1
        register = value >> np.uint64(64 - _BITS)
        rest = (value << np.uint64(_BITS)) | np.uint64(
            1 << (_BITS - 1)
        )  # the added 1 bounds the run of zeros
        rank = leading_zeros(rest) + 1
        if rank > registers[register]:
            registers[register] = rank
    return missing


def estimate_distinct(registers: NDArray[np.uint8]) -> int:
    """The number of distinct ids in the registers, by Ertl's estimator (arXiv 1702.01284)."""
    size = registers.size
    deepest = 64 - _BITS + 1
    counts = np.bincount(registers, minlength=deepest + 1).astype(float)
    if counts[0] == size:
        return 0
    total = size * _tau(1.0 - counts[deepest] / size)
    for rank in range(deepest - 1, 0, -1):
        total = 0.5 * (total + counts[rank])
    total += size * _sigma(counts[0] / size)
    return round(float(size * size / (2.0 * np.log(2.0)) / total))


def _sigma(x: float) -> float:
    y, total, before = 1.0, x, -1.0
    while total != before:
        x *= x
        before = total
        total += x * y
        y += y
    return total


def _tau(x: float) -> float:
    if x in (0.0, 1.0):
        return 0.0
    y, total, before = 1.0, 1.0 - x, -1.0
    while total != before:
        x = float(np.sqrt(x))
        before = total
        y *= 0.5
        total -= (1.0 - x) ** 2 * y
    return total / 3.0


@dataclass
class NumberSketch:
    """A number column: count, range, mean, spread, and a sample of its values for quantiles.

    The sample consists of the values with the smallest hash of their position, so it does not depend on how blocks
    were distributed. It is exact up to 65,536 values; beyond that, a quantile is off by about 0.2 % of the rows.
    """

    count: int = 0
    low: float = np.inf
    high: float = -np.inf
    mean: float = 0.0
    squares: float = 0.0  # sum of squared distances from the mean
    keys_K: NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, dtype=np.uint64))
    sample_K: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, dtype=np.float32))

    @classmethod
    def of_block(cls, raw_B: NDArray[np.float32], block: int) -> NumberSketch:
        """The sketch of one block; the block's number in the input gives the positions of its values."""
        known_N = raw_B[~np.isnan(raw_B)]
        if not known_N.size:
            return cls()
        wide_N = known_N.astype(np.float64)
        mean = float(wide_N.mean())
        keys_N = np.empty(known_N.size, dtype=np.uint64)
        _sampling_keys(np.uint64(block), keys_N)
        squares = float(np.square(wide_N - mean).sum())
        return cls(known_N.size, float(known_N.min()), float(known_N.max()), mean, squares, keys_N, known_N)

    def merge(self, other: NumberSketch) -> None:
        if not other.count:
            return
        total = self.count + other.count
        delta = other.mean - self.mean
        self.mean += delta * other.count / total
        self.squares += other.squares + delta * delta * self.count * other.count / total
        self.count = total
        self.low = min(self.low, other.low)
        self.high = max(self.high, other.high)
        self.keys_K = np.concatenate([self.keys_K, other.keys_K])
        self.sample_K = np.concatenate([self.sample_K, other.sample_K])
        if self.keys_K.size > _SAMPLED_NUMBERS:
            kept = np.argpartition(self.keys_K, _SAMPLED_NUMBERS)[:_SAMPLED_NUMBERS]
            self.keys_K, self.sample_K = self.keys_K[kept], self.sample_K[kept]

    def statistics(self, buckets: int = 0) -> FieldStatistics:
        """The statistics a field needs; with `buckets`, edges that divide the values into at most that many."""
        if not self.count:
            return FieldStatistics(0, 0.0, 0.0, 0.0, 0.0, spread=1.0)  # later values are used unscaled
        edges = quantile_edges(self.sample_K, buckets) if buckets else ()
        deviation = float(np.sqrt(self.squares / self.count))
        middle = median_and_spread(self.sample_K)
        return FieldStatistics(self.count, self.low, self.high, self.mean, deviation, edges, *middle)


def median_and_spread(sample_K: NDArray[np.float32]) -> tuple[float, float]:
    """The median and a robust spread of the values.

    The spread is the interquartile range. If that is 0, because one value dominates, it is the median distance of the
    other values from it. For a constant it is its absolute value, at least 1: a spread of 0 would hide later changes.
    """
    rising_K = np.sort(sample_K).astype(np.float64)
    quartile, median, last = (float(rising_K[rising_K.size * q // 4]) for q in (1, 2, 3))
    distance_K = np.sort(np.abs(rising_K[rising_K != median] - median))
    if last > quartile:
        return median, last - quartile
    if not distance_K.size:
        return median, max(1.0, abs(median))
    return median, float(distance_K[distance_K.size // 2])


def quantile_edges(sample_K: NDArray[np.float32], buckets: int) -> tuple[float, ...]:
    """The lower edges of all buckets but the first, chosen so that buckets hold about the same number of values.

    A value that alone fills more than a bucket gets a bucket of its own, and the other values share the rest:
    otherwise a number that is nearly always 0 would end up in a single bucket.
    """
    values_V, counts_V = np.unique(sample_K, return_counts=True)
    alone_V = np.zeros(values_V.size, dtype=bool)
    rows, free = int(sample_K.size), buckets  # for the values that share buckets
    while np.any(more_V := ~alone_V & (counts_V * free >= rows)):
        alone_V |= more_V
        rows, free = rows - int(counts_V[more_V].sum()), free - int(more_V.sum())
    edges: list[float] = []
    reserved, held, before_alone = int(alone_V.sum()), 0, True
    for value, count, alone in zip(values_V.tolist(), counts_V.tolist(), alone_V.tolist(), strict=True):
        room = (
            buckets - reserved - (len(edges) + 1)
        )  # buckets that may still begin, without the reserved ones
        full = room > 0 and (before_alone or 2 * held + count > 2 * rows / (room + 1))
        if value > values_V[0] and (alone or full):
            edges.append(value)
            rows, held = rows - held, 0
        if alone:
            reserved -= 1
        else:
            held += count
        before_alone = alone
    return tuple(edges)


@njit(cache=True, nogil=True)
def _sampling_keys(block: np.uint64, keys_N: NDArray[np.uint64]) -> None:
    for n in range(keys_N.size):
        keys_N[n] = encoder_kernels.fmix64((block << np.uint64(32)) + np.uint64(n))
