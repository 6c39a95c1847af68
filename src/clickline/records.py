"""Values that cross folders: a block of input, the raw rows read from it, the encoded rows.

    file ──reader.blocks──▶ Block ──reader.parse──▶ RawRows ──Encoder.encode──▶ EncodedRows ──▶ dataset

Shapes in names: B rows, N values, D dense fields, S slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import frexp, isinf, ldexp
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

TimeUnit = Literal["s", "ms", "us", "ns"]
CRITEO_FIELDS = ("label", *(f"I{n}" for n in range(1, 14)), *(f"C{n}" for n in range(1, 27)))


@dataclass(frozen=True)
class SourceFile:
    """One file of the input, as its store describes it."""

    uri: str  # as users write it: a plain local path, or protocol://…
    size: int  # bytes as stored (compressed, if it is)
    version: str  # changes when the content does: an ETag, else the time of modification
    hour: int | None = None  # hours since 1970-01-01T00 UTC, from a {date}/{hour} pattern
    span: int = 1  # hours that it holds: 24 where the pattern has no {hour}


@dataclass(frozen=True)
class BadRow:
    """A row that could not be used: where it stood, why, and its beginning as text."""

    file: str
    line: int  # 1-based line of a text file, 1-based record number of the others
    reason: str  # a short fixed phrase, counted in the report: "wrong column count"
    detail: str  # what was found and what is allowed: "39 columns, 40 expected"
    text: str = ""  # the row as far as it can be shown, cut to a sane length
    count: int = 1  # rows it stands for: past the first thousand of a block they are only counted


@dataclass(frozen=True)
class Block:
    """A piece of one input file that ends at a row's end; the unit that is read in parallel."""

    file: str
    first_line: int  # number of its first line or record, 1-based
    payload: Any  # what the reader that cut it wants to get back in `parse`: bytes, a record batch, …
    size: int  # bytes of input it stands for; shards are cut by it
    faults: tuple[BadRow, ...] = ()  # what went wrong while cutting: a truncated gzip, a bad crc
    time_unit: TimeUnit | None = None  # of the file's unix times; None: the rows of this block tell it


@dataclass(frozen=True)
class TextColumn:
    """Values as spans of one byte buffer. An empty span is a missing value."""

    data: NDArray[np.uint8]
    starts_N: NDArray[np.int64]
    ends_N: NDArray[np.int64]
    offsets_B1: NDArray[np.int64] | None = None  # several values a row: row b is offsets[b]:offsets[b+1]


@dataclass(frozen=True)
class IntegerColumn:
    """Values that are 64-bit integers already (feasigns, Arrow integers), as unsigned bits."""

    values_N: NDArray[np.uint64]
    missing_N: NDArray[np.bool_]
    signed: bool  # how to print the bits as decimal text
    offsets_B1: NDArray[np.int64] | None = None
    timestamps: bool = False  # of a type that is a time: unix seconds, whatever is said of numbers


@dataclass(frozen=True)
class NumberColumn:
    """Values that are floating-point numbers already. Missing is NaN."""

    values_N: NDArray[np.float64]
    offsets_B1: NDArray[np.int64] | None = None
    precision: int = 53  # bits of the significand they came with: 24 of 32-bit floats; it decides their text


RawColumn = TextColumn | IntegerColumn | NumberColumn


def category_text(value: int | float | bool, precision: int = 53) -> bytes:
    """The text a number stands for when it names a category: 7, 7.0 and "7" are one.

    A fraction is the shortest decimal text that is read back as the same float of its `precision`: 0.1 is "0.1",
    whether it came in 64 bits, in 32 or in 16."""
    if value != value:
        return b""
    if isinstance(value, float) and not value.is_integer():
        return _shortest(value, precision).encode()
    return str(int(value)).encode()


def _shortest(value: float, precision: int) -> str:
    if isinf(value):
        return repr(value)
    narrow: np.floating[Any] | None = None
    if precision == 24:
        narrow = np.float32(value)
    elif precision == 11 and abs(value) < 65504:  # the largest of its kind
        narrow = np.float16(value)
    if narrow is not None:  # what is no such float is rounded to one
        # NumPy finds the digits, Python writes them: where an exponent begins may not depend on NumPy's printing.
        return str(int(narrow)) if narrow == np.trunc(narrow) else repr(float(str(narrow)))
    if precision == 8:
        for digits in range(1, 5):
            text = f"{value:.{digits}g}"
            if _bfloat(float(text)) == value:
                return repr(float(text))
    return repr(value)


def _bfloat(value: float) -> float:
    """The nearest number with 8 significant bits."""
    fraction, exponent = frexp(value)
    return ldexp(round(ldexp(fraction, 8)), exponent - 8)


@dataclass(frozen=True)
class RawRows:
    """Rows as a reader found them: the columns by their name in the source, and what was bad."""

    rows: int
    columns: Mapping[str, RawColumn]
    lines_B: NDArray[np.int64]  # line or record number of each row, for later complaints
    bad: list[BadRow] = field(default_factory=list)


ABSENT, TEXT, NUMBER, INTEGER, FEASIGN, SINGLE, HALF, BFLOAT = range(8)
"""How a request holds a column. FEASIGN: 64-bit hashes of the values, in `integers_CB` or `several`; 0 is missing.
NUMBER and those after FEASIGN: floats in `numbers_CB`, which came in 64, 32 or 16 bits."""

PRECISION = {NUMBER: 53, SINGLE: 24, HALF: 11, BFLOAT: 8}
"""Bits of the significand of each kind of float."""


@dataclass(frozen=True)
class RequestRows:
    """Rows of a request, as its bytes hold them. Columns are numbered as in `FeatureSpec.columns`.

    A column with several values a row stands in `several` instead, and is ABSENT here."""

    rows: int
    data: NDArray[np.uint8]  # what the spans of text point into
    kind_C: NDArray[np.uint8]
    starts_CB: NDArray[np.int64]
    ends_CB: NDArray[np.int64]
    numbers_CB: NDArray[np.float64]  # NaN is missing
    integers_CB: NDArray[np.int64]
    several: Mapping[str, RawColumn] = field(default_factory=dict)


@dataclass(frozen=True)
class SlotIds:
    """One slot's ids: one a row, or several with offsets (row b is offsets[b]:offsets[b+1])."""

    ids_N: NDArray[np.uint64]
    offsets_B1: NDArray[np.int64] | None = None

    def select(self, keep_B: NDArray[np.bool_]) -> SlotIds:
        if self.offsets_B1 is None:
            return SlotIds(self.ids_N[keep_B])
        counts_B = np.diff(self.offsets_B1)
        offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts_B[keep_B])])
        return SlotIds(self.ids_N[np.repeat(keep_B, counts_B)], offsets)

    def take(self, order_K: NDArray[np.int64]) -> SlotIds:
        if self.offsets_B1 is None:
            return SlotIds(self.ids_N[order_K])
        counts_K = np.diff(self.offsets_B1)[order_K]
        offsets_K1 = np.zeros(order_K.size + 1, dtype=np.int64)
        np.cumsum(counts_K, out=offsets_K1[1:])
        shift_K = self.offsets_B1[order_K] - offsets_K1[:-1]
        return SlotIds(self.ids_N[np.arange(offsets_K1[-1]) + np.repeat(shift_K, counts_K)], offsets_K1)

    def part(self, start: int, stop: int) -> SlotIds:
        if self.offsets_B1 is None:
            return SlotIds(self.ids_N[start:stop])
        offsets = self.offsets_B1[start : stop + 1]
        return SlotIds(self.ids_N[offsets[0] : offsets[-1]], offsets - offsets[0])


@dataclass(frozen=True)
class EncodedRows:
    """Rows as the model sees them."""

    rows: int
    dense_DB: NDArray[np.float32]  # one contiguous line a field
    slots: tuple[SlotIds, ...]

    def select(self, keep_B: NDArray[np.bool_]) -> EncodedRows:
        """The rows that are marked."""
        slots = tuple(ids.select(keep_B) for ids in self.slots)
        return EncodedRows(int(keep_B.sum()), self.dense_DB[:, keep_B], slots)

    def take(self, order_K: NDArray[np.int64]) -> EncodedRows:
        """The rows at these places, in this order."""
        slots = tuple(ids.take(order_K) for ids in self.slots)
        return EncodedRows(order_K.size, self.dense_DB[:, order_K], slots)

    def part(self, start: int, stop: int) -> EncodedRows:
        """The rows from `start` to before `stop`, as views of these."""
        dense_DB = self.dense_DB[:, start:stop]
        rows = min(stop, self.rows) - min(start, self.rows)
        return EncodedRows(rows, dense_DB, tuple(ids.part(start, stop) for ids in self.slots))


@dataclass(frozen=True)
class LabelledRows:
    """Encoded rows with what happened to them: what a dataset stores and a trainer reads."""

    label_B: NDArray[np.float32]  # share of the row's shows that were clicked: 0 or 1 for a plain row
    weight_B: NDArray[np.float32]  # weight in the loss: shows times the user's own weight
    show_B: NDArray[np.uint32]
    click_B: NDArray[np.uint32]
    event_hour_B: NDArray[np.int32]  # hours since 1970-01-01T00 UTC, -1 where the time is not known
    encoded: EncodedRows

    @property
    def rows(self) -> int:
        return self.encoded.rows

    def select(self, keep_B: NDArray[np.bool_]) -> LabelledRows:
        """The rows that are marked."""
        return LabelledRows(
            self.label_B[keep_B],
            self.weight_B[keep_B],
            self.show_B[keep_B],
            self.click_B[keep_B],
            self.event_hour_B[keep_B],
            self.encoded.select(keep_B),
        )

    def take(self, order_K: NDArray[np.int64]) -> LabelledRows:
        """The rows at these places, in this order."""
        return LabelledRows(
            self.label_B[order_K],
            self.weight_B[order_K],
            self.show_B[order_K],
            self.click_B[order_K],
            self.event_hour_B[order_K],
            self.encoded.take(order_K),
        )

    def part(self, start: int, stop: int) -> LabelledRows:
        """The rows from `start` to before `stop`, as views of these."""
        return LabelledRows(
            self.label_B[start:stop],
            self.weight_B[start:stop],
            self.show_B[start:stop],
            self.click_B[start:stop],
            self.event_hour_B[start:stop],
            self.encoded.part(start, stop),
        )
