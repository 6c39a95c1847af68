"""Builds raw columns from Python values, and prepares raw columns for encoding.

A value means the same whatever the other values of its batch and whatever type its source gave it. So every value
has one canonical text: `encoder_kernels.canonical` of a text, `category_text` of a number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clickline.errors import DataError
from clickline.features import encoder_kernels
from clickline.records import IntegerColumn, NumberColumn, RawColumn, TextColumn, category_text

Offsets = NDArray[np.int64]


@dataclass(frozen=True)
class InvalidValue:
    """A value that cannot be encoded. Its row is encoded as if the value were missing."""

    row: int
    field: str
    reason: str
    detail: str


@dataclass(frozen=True)
class ValidationErrors:
    """All rows of a field with the same kind of error. Messages are built only for the rows that are reported."""

    field: str
    reason: str
    rows_F: NDArray[np.int64]
    describe: Callable[[int], str]

    def __iter__(self) -> Iterator[InvalidValue]:
        for row in self.rows_F.tolist():
            yield InvalidValue(row, self.field, self.reason, self.describe(row))

    @classmethod
    def where(
        cls, bad_B: NDArray[np.bool_], field: str, reason: str, describe: Callable[[int], str]
    ) -> list[ValidationErrors]:
        """The errors of the rows where the mask is true; empty if there is none."""
        rows_F = np.flatnonzero(bad_B)
        return [cls(field, reason, rows_F, describe)] if rows_F.size else []


# ── building ───────────────────────────────────────────────────────────────────────────────────────


def raw_column(values: Sequence[Any], name: str) -> RawColumn:
    """The Python values of one column as a raw column."""
    flat: list[Any] = []
    offsets = [0]
    multi = False
    for value in values:
        if isinstance(value, list | tuple):
            multi = True
            flat.extend(value)
        else:
            flat.append(value)
        offsets.append(len(flat))
    offsets_B1 = np.array(offsets, dtype=np.int64) if multi else None
    kinds = {type(v) for v in flat if v is not None}
    unknown = kinds - {str, bytes, int, float, bool}
    if unknown:
        found = ", ".join(sorted(kind.__name__ for kind in unknown))
        raise DataError(f"{name} holds {found}; text, a number, null or a list of these is allowed")
    if kinds and kinds <= {int, bool}:
        low, high = min(v for v in flat if v is not None), max(v for v in flat if v is not None)
        if (low >= 0 and high < 2**64) or (low >= -(2**63) and high < 2**63):
            bits = np.array([0 if v is None else int(v) % 2**64 for v in flat], dtype=np.uint64)
            missing = np.array([v is None for v in flat], dtype=np.bool_)
            return IntegerColumn(bits, missing, bool(low < 0), offsets_B1)
    if kinds == {float}:
        return NumberColumn(np.array([np.nan if v is None else v for v in flat]), offsets_B1)
    return _text_column([_text(v) for v in flat], offsets_B1)


def empty_column(rows: int) -> TextColumn:
    """A column of missing values."""
    zeros = np.zeros(rows, dtype=np.int64)
    return TextColumn(np.zeros(1, dtype=np.uint8), zeros, zeros)


def _text(value: Any) -> bytes:
    if value is None:
        return b""
    if isinstance(value, bytes):
        return value
    return value.encode() if isinstance(value, str) else category_text(value)


def _text_column(texts: list[bytes], offsets_B1: Offsets | None) -> TextColumn:
    bounds = np.zeros(len(texts) + 1, dtype=np.int64)
    np.cumsum([len(text) for text in texts], out=bounds[1:])
    data = np.frombuffer(b"".join(texts) + b"\0", dtype=np.uint8)
    return TextColumn(data, bounds[:-1], bounds[1:], offsets_B1)


# ── reading ───────────────────────────────────────────────────────────────────────────────────────


def as_text(column: RawColumn) -> TextColumn:
    """Any column as the canonical text of its values."""
    if isinstance(column, TextColumn):
        starts_N, ends_N = np.empty_like(column.starts_N), np.empty_like(column.ends_N)
        encoder_kernels.canonicalize_spans(column.data, column.starts_N, column.ends_N, starts_N, ends_N)
        return TextColumn(column.data, starts_N, ends_N, column.offsets_B1)
    if isinstance(column, IntegerColumn):
        values = zip(_signed(column).tolist(), column.missing_N.tolist(), strict=True)
        texts = [b"" if missing else str(value).encode() for value, missing in values]
    else:
        texts = [category_text(value, column.precision) for value in column.values_N.tolist()]
    return _text_column(texts, column.offsets_B1)


def to_float32(
    column: RawColumn, field: str, rows: int, missing: tuple[str, ...] = ()
) -> tuple[NDArray[np.float32], list[ValidationErrors]]:
    """A column as float32, NaN if missing or not a number. Every path rounds text to double first.

    Numbers in `missing` are compared by value, as float32: -9.50 is -9.5, whatever the type of either."""
    column, errors = single_valued(column, field, "")
    doubles_M, singles_M = missing_numbers(missing)
    if isinstance(column, TextColumn):
        raw_B = np.empty(rows, dtype=np.float32)
        status_B = np.empty(rows, dtype=np.uint8)
        if not encoder_kernels.parse_numbers(
            column.data,
            column.starts_N,
            column.ends_N,
            *concatenate_texts(missing),
            singles_M,
            raw_B,
            status_B,
        ):
            return raw_B, errors
        values_B = raw_B.astype(np.float64)
        for row in np.flatnonzero(status_B == encoder_kernels.NUMBER_SLOW).tolist():
            values_B[row] = float(_bytes(column, row))
        text = column
        errors += ValidationErrors.where(
            status_B == encoder_kernels.NUMBER_BAD,
            field,
            "not a number",
            lambda row: (
                f"{field} is {format_value(text, row)}, a number expected{_remedy(_bytes(text, row))}"
            ),
        )
    elif isinstance(column, IntegerColumn):
        values_B = np.where(column.missing_N, np.nan, _signed(column).astype(np.float64))
    else:
        values_B = column.values_N
    with np.errstate(over="ignore"):  # overflows are reported below
        raw_B = values_B.astype(np.float32)
    encoder_kernels.mask_missing_numbers(raw_B, singles_M)
    infinite_B = np.isinf(raw_B)
    if infinite_B.any():
        raw_B[infinite_B] = np.nan
        detail = f"{field} is beyond the range of a 32-bit float"
        bad_B = infinite_B & ~np.isin(values_B, doubles_M)
        errors += ValidationErrors.where(bad_B, field, "not a number", lambda row: detail)
    return raw_B, errors


def _remedy(text: bytes) -> str:
    if re.fullmatch(rb"\s*\d{4}-\d\d-\d\d\b.*", text, re.DOTALL) is None:
        return ""
    return "; a date is text: make the field a slot, or write the date as a number in the log"


def equals_any(column: TextColumn, texts: Sequence[str]) -> NDArray[np.bool_]:
    """Which values equal one of `texts`, compared by canonical text."""
    equal_N = np.empty(column.starts_N.size, dtype=np.bool_)
    encoder_kernels.match_texts(
        column.data, column.starts_N, column.ends_N, *concatenate_texts(tuple(texts)), equal_N
    )
    return equal_N


def format_value(column: RawColumn, place: int) -> str:
    """One value, formatted for a message."""
    if isinstance(column, TextColumn):
        return repr(_bytes(column, place)[:60].decode("utf-8", "backslashreplace"))
    if isinstance(column, IntegerColumn):
        return "missing" if column.missing_N[place] else str(_signed(column)[place])
    return "missing" if np.isnan(column.values_N[place]) else str(column.values_N[place])


def _bytes(column: TextColumn, place: int) -> bytes:
    return column.data[column.starts_N[place] : column.ends_N[place]].tobytes()


def _signed(column: IntegerColumn) -> NDArray[Any]:
    return column.values_N.view(np.int64) if column.signed else column.values_N


# ── transforming ────────────────────────────────────────────────────────────────────────────────────


def drop_missing(column: RawColumn, missing: tuple[str, ...]) -> RawColumn:
    """The column without values whose text is in `missing`. For categories; `to_float32` compares by value."""
    if not missing:
        return column
    if isinstance(column, TextColumn):
        return replace(column, ends_N=np.where(equals_any(column, missing), column.starts_N, column.ends_N))
    texts = {canonical_text(text) for text in missing}
    if isinstance(column, IntegerColumn):
        bits_M = np.array([n % 2**64 for n in exact_integers(texts, column.signed)], dtype=np.uint64)
        return replace(column, missing_N=column.missing_N | np.isin(column.values_N, bits_M))
    missing_doubles = [number for number in map(exact_number, texts) if number is not None]
    missing_N = np.isin(column.values_N, missing_doubles)
    if column.precision < 53 and not all(number.is_integer() for number in missing_doubles):
        values = (category_text(value, column.precision) for value in column.values_N.tolist())
        missing_N = np.array([text in texts for text in values], dtype=np.bool_)
    return replace(column, values_N=np.where(missing_N, np.nan, column.values_N))


def canonical_text(text: str) -> bytes:
    """The canonical form of a text."""
    data = np.frombuffer(text.encode(), dtype=np.uint8)
    start, end = encoder_kernels.canonical(data, 0, data.size)
    return data[start:end].tobytes()


@lru_cache(maxsize=64)  # the same texts are needed once per field of a block
def concatenate_texts(texts: tuple[str, ...]) -> tuple[NDArray[np.uint8], Offsets]:
    """Texts for kernels: their canonical forms concatenated, and where each ends."""
    canonical_texts = [canonical_text(text) for text in texts]
    return np.frombuffer(b"".join(canonical_texts), dtype=np.uint8), np.cumsum(
        [0, *map(len, canonical_texts)], dtype=np.int64
    )


@lru_cache(maxsize=64)
def missing_numbers(texts: tuple[str, ...]) -> tuple[NDArray[np.float64], NDArray[np.float32]]:
    """The texts that are numbers, as doubles, and as those floats that fit into float32."""
    values = []
    for text in map(canonical_text, texts):
        with suppress(ValueError):  # not a number
            if b"_" not in text:  # only Python reads 1_000 as a number
                values.append(float(text))
    doubles_M = np.array([number for number in values if number == number], dtype=np.float64)
    with np.errstate(over="ignore"):
        singles_M = doubles_M.astype(np.float32)
    return doubles_M, singles_M[np.isfinite(singles_M)]


def exact_number(text: bytes) -> float | None:
    """The double whose canonical text this is; None if there is none."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if category_text(number) == text else None


def exact_integers(texts: Iterable[bytes], signed: bool) -> list[int]:
    """The 64-bit integers whose canonical text is one of these."""
    low, high = (-(2**63), 2**63) if signed else (0, 2**64)
    decimal = [text for text in texts if re.fullmatch(rb"0|-?[1-9]\d{0,19}", text)]
    return [number for number in map(int, decimal) if low <= number < high]


def select_values(
    column: RawColumn, places: slice | NDArray[np.int64], offsets_B1: Offsets | None = None
) -> RawColumn:
    """Some values of a column; `offsets_B1` says to which row each belongs, unless every row has one."""
    if isinstance(column, TextColumn):
        return TextColumn(column.data, column.starts_N[places], column.ends_N[places], offsets_B1)
    if isinstance(column, IntegerColumn):
        return IntegerColumn(column.values_N[places], column.missing_N[places], column.signed, offsets_B1)
    return NumberColumn(column.values_N[places], offsets_B1, column.precision)


def split_values(column: RawColumn, separator: str) -> RawColumn:
    """Texts split at a separator into several values per row; empty pieces are dropped."""
    if not isinstance(column, TextColumn):
        return column
    spans = column.data, column.starts_N, column.ends_N, ord(separator)
    offsets_N1 = np.empty(column.starts_N.size + 1, dtype=np.int64)
    starts_P, ends_P = np.empty((2, 0), dtype=np.int64)
    pieces = encoder_kernels.split_spans(*spans, starts_P, ends_P, offsets_N1)
    starts_P, ends_P = np.empty((2, pieces), dtype=np.int64)
    encoder_kernels.split_spans(*spans, starts_P, ends_P, offsets_N1)
    if column.offsets_B1 is not None:
        offsets_N1 = offsets_N1[column.offsets_B1]
    return TextColumn(column.data, starts_P, ends_P, offsets_N1)


def single_valued(column: RawColumn, field: str, remedy: str) -> tuple[RawColumn, list[ValidationErrors]]:
    """One value per row of a column that may hold several: missing if there is none or more than one."""
    offsets_B1 = column.offsets_B1
    if offsets_B1 is None:
        return column, []
    counts_B = np.diff(offsets_B1)
    errors = ValidationErrors.where(
        counts_B > 1,
        field,
        "several values",
        lambda row: f"{field} has {counts_B[row]} values, only one is allowed{remedy}",
    )
    single_B = counts_B == 1
    first_T = offsets_B1[:-1][single_B]

    def spread(values_N: NDArray[Any], missing: float) -> NDArray[Any]:
        values_B = np.full(counts_B.size, missing, dtype=values_N.dtype)
        values_B[single_B] = values_N[first_T]
        return values_B

    if isinstance(column, TextColumn):
        return TextColumn(column.data, spread(column.starts_N, 0), spread(column.ends_N, 0)), errors
    if isinstance(column, IntegerColumn):
        values_B, missing_B = spread(column.values_N, 0), spread(column.missing_N, True)
        return replace(column, values_N=values_B, missing_N=missing_B, offsets_B1=None), errors
    return replace(column, values_N=spread(column.values_N, np.nan), offsets_B1=None), errors
