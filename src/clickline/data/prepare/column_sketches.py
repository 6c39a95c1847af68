"""What a dataset's columns look like: sketches that add up, whatever order they were made in.

Tally     of one shard or split: rows, clicks, bad rows, and a SlotTally for each slot
Numbers   of one number column of the training data: what minmax, zscore, robust and quantiles need
"""

from __future__ import annotations

import base64
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from clickline.features import FieldStatistics, SlotField, encoder_kernels
from clickline.features.raw_columns import as_text, canonical_text, split
from clickline.records import IntegerColumn, LabelledRows, NumberColumn, RawColumn, RawRows, TextColumn

_BITS = 13  # 8,192 registers: a standard error of 1.15 % in the number of distinct ids
_SAMPLED_ROWS = 64  # of each block, for the most frequent values
_KEPT_VALUES = 50  # of each slot and shard
_SHOWN = 60  # characters of a value
_SAMPLED_NUMBERS = 1 << 16  # of each number column, for quantiles


@dataclass
class SlotTally:
    """One slot: distinct ids (HyperLogLog), rows without a value, frequent values in a sample of rows."""

    registers: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(1 << _BITS, dtype=np.uint8))
    values: int = 0
    missing: int = 0
    sampled: int = 0
    frequent: Counter[str] = field(default_factory=Counter)

    def observe(self, ids_N: NDArray[np.uint64], missing_id: int) -> None:
        self.values += ids_N.size
        self.missing += _observe(ids_N, np.uint64(missing_id), self.registers)

    def merge(self, other: SlotTally) -> None:
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
class Tally:
    """What was counted over rows; tallies of shards add up to that of a split."""

    slots: tuple[SlotTally, ...]
    rows: int = 0
    shows: int = 0
    clicks: int = 0
    bad: Counter[str] = field(default_factory=Counter)
    hours: tuple[int, int] | None = None  # first and last event hour that is known

    @classmethod
    def empty(cls, slots: int) -> Tally:
        return cls(tuple(SlotTally() for _ in range(slots)))

    def observe(self, rows: LabelledRows, missing_ids: Iterable[int]) -> None:
        self.rows += rows.rows
        self.shows += int(rows.show_B.sum(dtype=np.uint64))
        self.clicks += int(rows.click_B.sum(dtype=np.uint64))
        for tally, ids, missing_id in zip(self.slots, rows.encoded.slots, missing_ids, strict=True):
            tally.observe(ids.ids_N, missing_id)
        known_B = rows.event_hour_B[rows.event_hour_B >= 0]
        if known_B.size:
            self._widen(int(known_B.min()), int(known_B.max()))

    def sample(self, raw: RawRows, slots: Iterable[SlotField], missing: Iterable[str]) -> None:
        """Count the values of some rows, evenly spaced, as text: enough to name the frequent ones."""
        if not raw.rows:
            return
        nothing = {"", *(canonical_text(text).decode() for text in missing)}
        rows = np.unique(np.linspace(0, raw.rows - 1, min(raw.rows, _SAMPLED_ROWS)).astype(np.int64))
        for tally, slot in zip(self.slots, slots, strict=True):
            column = raw.columns.get(slot.column)
            if column is not None:
                shown = _texts(column, rows, slot.separator)
                tally.sampled += len(shown)
                tally.frequent.update(text for text in shown if text not in nothing)

    def trim(self) -> None:
        """Forget rare values, so that a shard's tally stays small; do it before it is stored or merged."""
        for slot in self.slots:
            slot.frequent = Counter(dict(slot.most_frequent(_KEPT_VALUES)))

    def merge(self, other: Tally) -> None:
        self.rows += other.rows
        self.shows += other.shows
        self.clicks += other.clicks
        self.bad.update(other.bad)
        if other.hours:
            self._widen(*other.hours)
        for mine, theirs in zip(self.slots, other.slots, strict=True):
            mine.merge(theirs)

    def _widen(self, first: int, last: int) -> None:
        self.hours = (min(first, self.hours[0]), max(last, self.hours[1])) if self.hours else (first, last)

    def to_json(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "shows": self.shows,
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
    def from_json(cls, document: Mapping[str, Any]) -> Tally:
        return cls(
            rows=document["rows"],
            shows=document["shows"],
            clicks=document["clicks"],
            bad=Counter(document["bad"]),
            hours=tuple(document["hours"]) if document["hours"] else None,
            slots=tuple(
                SlotTally(
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


def _texts(column: RawColumn, rows: NDArray[np.int64], separator: str | None) -> list[str]:
    """The values of some rows as short canonical text."""
    places = rows
    if column.offsets_B1 is not None:
        offsets = column.offsets_B1
        places = np.concatenate([np.arange(offsets[row], offsets[row + 1]) for row in rows])
    some: RawColumn
    if isinstance(column, TextColumn):
        some = TextColumn(column.data, column.starts_N[places], column.ends_N[places])
    elif isinstance(column, IntegerColumn):
        some = IntegerColumn(column.values_N[places], column.missing_N[places], column.signed)
    else:
        some = NumberColumn(column.values_N[places], precision=column.precision)
    text = as_text(some if separator is None else split(some, separator))
    spans = zip(text.starts_N.tolist(), text.ends_N.tolist(), strict=True)
    data = text.data.data
    return [str(data[start : min(end, start + _SHOWN)], "utf-8", "replace") for start, end in spans]


@njit(cache=True, nogil=True)
def _observe(ids_N: NDArray[np.uint64], missing_id: np.uint64, registers: NDArray[np.uint8]) -> int:
    """Update HyperLogLog registers. Ids are mixed already, so their bits serve as the hash."""
    missing = 0
    for n in range(ids_N.size):
        value = ids_N[n]
        if value == missing_id:
            missing += 1
        place = value >> np.uint64(64 - _BITS)
        rest = (value << np.uint64(_BITS)) | np.uint64(1 << (_BITS - 1))  # the mark bounds the run of zeros
        rank = encoder_kernels.leading_zeros(rest) + 1
        if rank > registers[place]:
            registers[place] = rank
    return missing


def estimate_distinct(registers: NDArray[np.uint8]) -> int:
    """How many distinct ids the registers saw, by Ertl's estimator (arXiv 1702.01284)."""
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
class Numbers:
    """A number column: count, range, mean, spread, and a sample of the values for quantiles.

    The sample is the values with the smallest hash of their place, so it is the same however the blocks
    were dealt out. It is exact up to 65,536 values; beyond, a quantile is off by some 0.2 % of the rows.
    """

    count: int = 0
    low: float = np.inf
    high: float = -np.inf
    mean: float = 0.0
    squares: float = 0.0  # sum of squared distances from the mean
    keys_K: NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, dtype=np.uint64))
    sample_K: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, dtype=np.float32))

    @classmethod
    def of(cls, raw_B: NDArray[np.float32], block: int) -> Numbers:
        """The numbers of one block; its number in the input tells the places of its values."""
        known_N = raw_B[~np.isnan(raw_B)]
        if not known_N.size:
            return cls()
        wide_N = known_N.astype(np.float64)
        mean = float(wide_N.mean())
        keys_N = np.empty(known_N.size, dtype=np.uint64)
        _place_keys(np.uint64(block), keys_N)
        squares = float(np.square(wide_N - mean).sum())
        return cls(known_N.size, float(known_N.min()), float(known_N.max()), mean, squares, keys_N, known_N)

    def merge(self, other: Numbers) -> None:
        if not other.count:
            return
        total = self.count + other.count
        apart = other.mean - self.mean
        self.mean += apart * other.count / total
        self.squares += other.squares + apart * apart * self.count * other.count / total
        self.count = total
        self.low = min(self.low, other.low)
        self.high = max(self.high, other.high)
        self.keys_K = np.concatenate([self.keys_K, other.keys_K])
        self.sample_K = np.concatenate([self.sample_K, other.sample_K])
        if self.keys_K.size > _SAMPLED_NUMBERS:
            kept = np.argpartition(self.keys_K, _SAMPLED_NUMBERS)[:_SAMPLED_NUMBERS]
            self.keys_K, self.sample_K = self.keys_K[kept], self.sample_K[kept]

    def statistics(self, buckets: int = 0) -> FieldStatistics:
        """The figures a field needs; with `buckets`, edges that part the values into up to as many."""
        if not self.count:
            return FieldStatistics(
                0, 0.0, 0.0, 0.0, 0.0, spread=1.0
            )  # values that come later are seen as they are
        edges = share_edges(self.sample_K, buckets) if buckets else ()
        deviation = float(np.sqrt(self.squares / self.count))
        middle = middle_of(self.sample_K)
        return FieldStatistics(self.count, self.low, self.high, self.mean, deviation, edges, *middle)


def middle_of(sample_K: NDArray[np.float32]) -> tuple[float, float]:
    """The median, and how far from each other values usually are, whatever the extreme ones are.

    That is from quartile to quartile. A number that mostly is the same has none: then it is the median distance of the
    others from it. A constant's is its own size, and at least 1: never 0, which would hide later values that differ.
    """
    rising_K = np.sort(sample_K).astype(np.float64)
    quartile, median, last = (float(rising_K[rising_K.size * q // 4]) for q in (1, 2, 3))
    away_K = np.sort(np.abs(rising_K[rising_K != median] - median))
    if last > quartile:
        return median, last - quartile
    if not away_K.size:
        return median, max(1.0, abs(median))
    return median, float(away_K[away_K.size // 2])


def share_edges(sample_K: NDArray[np.float32], buckets: int) -> tuple[float, ...]:
    """Where each bucket but the first begins, so that all hold about the same number of values.

    A value that alone fills more than a share has a bucket to itself, and the others share what is left: of a
    number that nearly always is 0, equal shares of all rows would be one bucket.
    """
    values_V, counts_V = np.unique(sample_K, return_counts=True)
    alone_V = np.zeros(values_V.size, dtype=bool)
    rows, free = int(sample_K.size), buckets  # for the values that share
    while np.any(more_V := ~alone_V & (counts_V * free >= rows)):
        alone_V |= more_V
        rows, free = rows - int(counts_V[more_V].sum()), free - int(more_V.sum())
    edges: list[float] = []
    reserved, held, before_alone = int(alone_V.sum()), 0, True
    for value, count, alone in zip(values_V.tolist(), counts_V.tolist(), alone_V.tolist(), strict=True):
        room = buckets - reserved - (len(edges) + 1)  # buckets that may yet begin, but for those reserved
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
def _place_keys(block: np.uint64, keys_N: NDArray[np.uint64]) -> None:
    for n in range(keys_N.size):
        keys_N[n] = encoder_kernels.fmix64((block << np.uint64(32)) + np.uint64(n))
