"""Types shared between packages: a block of input, the raw rows read from it, the encoded rows.

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

    uri: str  # as the user writes it: a plain local path, or protocol://…
    size: int  # bytes as stored, possibly compressed
    version: str  # changes with the content: an ETag, else the modification time
    hour: int | None = None  # hours since 1970-01-01T00 UTC, from a {date}/{hour} pattern
    span: int = 1  # hours that it covers: 24 if the pattern has no {hour}


@dataclass(frozen=True)
class BadRow:
    """A row that could not be used: its position, the reason, and the beginning of its text."""

    file: str
    line: int  # 1-based line of a text file, or 1-based record number
    reason: str  # a short fixed phrase, counted in the report: "wrong column count"
    detail: str  # what was found and what is allowed: "39 columns, 40 expected"
    text: str = ""  # the beginning of the row as text
    count: int = 1  # rows it stands for: after the first thousand of a block, rows are only counted


@dataclass(frozen=True)
class Block:
    """A piece of an input file that ends at the end of a row; the unit of parallel reading."""

    file: str
    first_line: int  # number of its first line or record, 1-based
    payload: Any  # what the reader's `parse` takes: bytes, a record batch, …
    size: int  # bytes of input it stands for; determines the size of shards
    bad: tuple[BadRow, ...] = ()  # errors found before parsing: a truncated gzip, a bad crc
    time_unit: TimeUnit | None = None  # of the file's unix times; None: detected from this block's rows


@dataclass(frozen=True)
class TextColumn:
    """Values as spans of one byte buffer. An empty span is a missing value."""

    data: NDArray[np.uint8]
    starts_N: NDArray[np.int64]
    ends_N: NDArray[np.int64]
    offsets_B1: NDArray[np.int64] | None = None  # several values per row: row b is offsets[b]:offsets[b+1]


@dataclass(frozen=True)
class IntegerColumn:
    """Values that are 64-bit integers in the source (feature ids, Arrow integers), as unsigned bits."""

    values_N: NDArray[np.uint64]
    missing_N: NDArray[np.bool_]
    signed: bool  # how to print the bits as decimal text
    offsets_B1: NDArray[np.int64] | None = None
    timestamps: bool = False  # from a timestamp type: unix seconds, whatever unit numbers have


@dataclass(frozen=True)
class NumberColumn:
    """Values that are floating-point numbers in the source. Missing is NaN."""

    values_N: NDArray[np.float64]
    offsets_B1: NDArray[np.int64] | None = None
    precision: int = (
        53  # bits of the significand in the source: 24 for 32-bit floats; decides how they are printed
    )


RawColumn = TextColumn | IntegerColumn | NumberColumn


def category_text(value: int | float | bool, precision: int = 53) -> bytes:
    """The text of a number that is used as a category: 7, 7.0 and "7" are the same.

    A fraction becomes the shortest decimal text that parses to the same float of its `precision`: 0.1 is "0.1",
    whether it came as 64, 32 or 16 bits."""
    if value != value:
        return b""
    if isinstance(value, float) and not value.is_integer():
        return _shortest_decimal(value, precision).encode()
    return str(int(value)).encode()


def _shortest_decimal(value: float, precision: int) -> str:
    if isinf(value):
        return repr(value)
    narrow: np.floating[Any] | None = None
    if precision == 24:
        narrow = np.float32(value)
    elif precision == 11 and abs(value) < 65504:  # the largest float16
        narrow = np.float16(value)
    if narrow is not None:  # other values are rounded to the narrow type
        # NumPy finds the digits, Python prints them: the use of exponents must not depend on NumPy's version.
        return str(int(narrow)) if narrow == np.trunc(narrow) else repr(float(str(narrow)))
    if precision == 8:
        for digits in range(1, 5):
            text = f"{value:.{digits}g}"
            if _round_to_bfloat16(float(text)) == value:
                return repr(float(text))
    return repr(value)


def _round_to_bfloat16(value: float) -> float:
    """The nearest number with 8 significant bits."""
    fraction, exponent = frexp(value)
    return ldexp(round(ldexp(fraction, 8)), exponent - 8)


@dataclass(frozen=True)
class RawRows:
    """Rows as a reader parsed them: the columns by their name in the source, and the bad rows."""

    rows: int
    columns: Mapping[str, RawColumn]
    lines_B: NDArray[np.int64]  # line or record number of each row, for error messages
    bad: list[BadRow] = field(default_factory=list)


ABSENT, TEXT, FLOAT64, INTEGER, FEATURE_ID, FLOAT32, FLOAT16, BFLOAT16 = range(8)
"""How a request holds a column. FEATURE_ID: 64-bit hashes of the values, in `integers_CB` or `multi`; 0 is missing.
FLOAT64, FLOAT32, FLOAT16, BFLOAT16: floats in `numbers_CB`, by their type in the request."""

PRECISION = {FLOAT64: 53, FLOAT32: 24, FLOAT16: 11, BFLOAT16: 8}
"""Bits of the significand of each float type."""


@dataclass(frozen=True)
class RequestRows:
    """Rows of a request, parsed but not encoded. Columns are numbered as in `FeatureSpec.columns`.

    A column with several values per row is in `multi`, and its kind is ABSENT."""

    rows: int
    data: NDArray[np.uint8]  # the buffer of the text spans
    kind_C: NDArray[np.uint8]
    starts_CB: NDArray[np.int64]
    ends_CB: NDArray[np.int64]
    numbers_CB: NDArray[np.float64]  # NaN is missing
    integers_CB: NDArray[np.int64]
    multi: Mapping[str, RawColumn] = field(default_factory=dict)


@dataclass(frozen=True)
class SlotIds:
    """The ids of one slot: one per row, or several with offsets (row b is offsets[b]:offsets[b+1])."""

    ids_N: NDArray[np.uint64]
    offsets_B1: NDArray[np.int64] | None = None

    def take(self, index_K: NDArray[np.int64]) -> SlotIds:
        if self.offsets_B1 is None:
            return SlotIds(self.ids_N[index_K])
        counts_K = np.diff(self.offsets_B1)[index_K]
        offsets_K1 = np.zeros(index_K.size + 1, dtype=np.int64)
        np.cumsum(counts_K, out=offsets_K1[1:])
        shift_K = self.offsets_B1[index_K] - offsets_K1[:-1]
        return SlotIds(self.ids_N[np.arange(offsets_K1[-1]) + np.repeat(shift_K, counts_K)], offsets_K1)

    def slice(self, start: int, stop: int) -> SlotIds:
        if self.offsets_B1 is None:
            return SlotIds(self.ids_N[start:stop])
        offsets = self.offsets_B1[start : stop + 1]
        return SlotIds(self.ids_N[offsets[0] : offsets[-1]], offsets - offsets[0])


@dataclass(frozen=True)
class EncodedRows:
    """Rows in the form that the model takes: floats and ids."""

    rows: int
    dense_DB: NDArray[np.float32]  # one contiguous row per field
    slots: tuple[SlotIds, ...]

    def take(self, index_K: NDArray[np.int64]) -> EncodedRows:
        """The rows at these indices, in this order."""
        slots = tuple(ids.take(index_K) for ids in self.slots)
        return EncodedRows(index_K.size, self.dense_DB[:, index_K], slots)

    def slice(self, start: int, stop: int) -> EncodedRows:
        """The rows from `start` up to `stop`, as views."""
        dense_DB = self.dense_DB[:, start:stop]
        rows = min(stop, self.rows) - min(start, self.rows)
        return EncodedRows(rows, dense_DB, tuple(ids.slice(start, stop) for ids in self.slots))


@dataclass(frozen=True)
class LabelledRows:
    """Encoded rows with their targets: what a dataset stores and a trainer reads."""

    label_B: NDArray[np.float32]  # clicked share of the row's impressions: 0 or 1 for a single impression
    weight_B: NDArray[np.float32]  # weight in the loss: impressions times the user's own weight
    impression_B: NDArray[np.uint32]
    click_B: NDArray[np.uint32]
    event_hour_B: NDArray[np.int32]  # hours since 1970-01-01T00 UTC, -1 if unknown
    encoded: EncodedRows

    @property
    def rows(self) -> int:
        return self.encoded.rows

    def select(self, keep_B: NDArray[np.bool_]) -> LabelledRows:
        """The rows where the mask is true."""
        return self.take(np.flatnonzero(keep_B))

    def take(self, index_K: NDArray[np.int64]) -> LabelledRows:
        """The rows at these indices, in this order."""
        return LabelledRows(*self._targets(index_K), self.encoded.take(index_K))

    def slice(self, start: int, stop: int) -> LabelledRows:
        """The rows from `start` up to `stop`, as views."""
        return LabelledRows(*self._targets(slice(start, stop)), self.encoded.slice(start, stop))

    def _targets(self, rows: Any) -> tuple[Any, Any, Any, Any, Any]:
        label_B, weight_B, event_hour_B = self.label_B[rows], self.weight_B[rows], self.event_hour_B[rows]
        return label_B, weight_B, self.impression_B[rows], self.click_B[rows], event_hour_B


Precision = Literal["fp32", "fp16", "int8"]
"""How weights are stored in a version."""


@dataclass(frozen=True)
class PartShape:
    """The shape of a part of a version's table: the rows of all slots of one dim."""

    dim: int
    wide: bool
