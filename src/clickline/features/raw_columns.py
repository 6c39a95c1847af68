"""Raw columns: Python values made into them, and what is done to one before it is encoded.

Text is the meeting point of all kinds: a value means the same whatever company it keeps in its batch
and whatever type its source gave it. So every value has one canonical text: of a text `kernels.canonical`,
of a number `category_text`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
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
class Fault:
    """A value that cannot be used. Its row is encoded as if the value were missing."""

    row: int
    field: str
    reason: str
    detail: str


@dataclass(frozen=True)
class Faults:
    """All rows of a field with the same kind of fault. The words are made only for the rows one looks at."""

    field: str
    reason: str
    rows_F: NDArray[np.int64]
    describe: Callable[[int], str]

    def __iter__(self) -> Iterator[Fault]:
        for row in self.rows_F.tolist():
            yield Fault(row, self.field, self.reason, self.describe(row))

    @classmethod
    def where(
        cls, bad_B: NDArray[np.bool_], field: str, reason: str, describe: Callable[[int], str]
    ) -> list[Faults]:
        """The faults of the marked rows; none when no row is marked."""
        rows_F = np.flatnonzero(bad_B)
        return [cls(field, reason, rows_F, describe)] if rows_F.size else []


# ── made ───────────────────────────────────────────────────────────────────────────────────────


def raw_column(values: Sequence[Any], name: str) -> RawColumn:
    """Python values of one column as a raw column."""
    flat: list[Any] = []
    offsets = [0]
    several = False
    for value in values:
        if isinstance(value, list | tuple):
            several = True
            flat.extend(value)
        else:
            flat.append(value)
        offsets.append(len(flat))
    offsets_B1 = np.array(offsets, dtype=np.int64) if several else None
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


def nothing(rows: int) -> TextColumn:
    """A column without any value."""
    nowhere = np.zeros(rows, dtype=np.int64)
    return TextColumn(np.zeros(1, dtype=np.uint8), nowhere, nowhere)


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


# ── read ───────────────────────────────────────────────────────────────────────────────────────


def as_text(column: RawColumn) -> TextColumn:
    """Any column as the canonical text of its values."""
    if isinstance(column, TextColumn):
        starts_N, ends_N = np.empty_like(column.starts_N), np.empty_like(column.ends_N)
        encoder_kernels.canonical_spans(column.data, column.starts_N, column.ends_N, starts_N, ends_N)
        return TextColumn(column.data, starts_N, ends_N, column.offsets_B1)
    if isinstance(column, IntegerColumn):
        shown = zip(_signed(column).tolist(), column.missing_N.tolist(), strict=True)
        texts = [b"" if missing else str(value).encode() for value, missing in shown]
    else:
        texts = [category_text(value, column.precision) for value in column.values_N.tolist()]
    return _text_column(texts, column.offsets_B1)


def numbers(
    column: RawColumn, field: str, rows: int, missing: tuple[str, ...] = ()
) -> tuple[NDArray[np.float32], list[Faults]]:
    """A column as float32, NaN where missing or not a number. Every path rounds text to double first.

    A number of `missing` is compared by value, as float32: -9.50 is -9.5, in whatever type either comes."""
    column, faults = single(column, field, "")
    doubles_M, singles_M = missing_numbers(missing)
    if isinstance(column, TextColumn):
        raw_B = np.empty(rows, dtype=np.float32)
        status_B = np.empty(rows, dtype=np.uint8)
        if not encoder_kernels.parse_numbers(
            column.data, column.starts_N, column.ends_N, *joined(missing), singles_M, raw_B, status_B
        ):
            return raw_B, faults
        values_B = raw_B.astype(np.float64)
        for row in np.flatnonzero(status_B == encoder_kernels.NUMBER_SLOW).tolist():
            values_B[row] = float(_bytes(column, row))
        text = column
        faults += Faults.where(
            status_B == encoder_kernels.NUMBER_BAD,
            field,
            "not a number",
            lambda row: f"{field} is {shown_value(text, row)}, a number expected{_remedy(_bytes(text, row))}",
        )
    elif isinstance(column, IntegerColumn):
        values_B = np.where(column.missing_N, np.nan, _signed(column).astype(np.float64))
    else:
        values_B = column.values_N
    with np.errstate(over="ignore"):  # what overflows is found and named below
        raw_B = values_B.astype(np.float32)
    encoder_kernels.drop_numbers(raw_B, singles_M)
    infinite_B = np.isinf(raw_B)
    if infinite_B.any():
        raw_B[infinite_B] = np.nan
        beyond = f"{field} is beyond the range of a 32-bit float"
        bad_B = infinite_B & ~np.isin(values_B, doubles_M)
        faults += Faults.where(bad_B, field, "not a number", lambda row: beyond)
    return raw_B, faults


def _remedy(text: bytes) -> str:
    if re.fullmatch(rb"\s*\d{4}-\d\d-\d\d\b.*", text, re.DOTALL) is None:
        return ""
    return "; a date is text: make the field a slot, or write the date as a number in the log"


def equals_any(column: TextColumn, texts: Sequence[str]) -> NDArray[np.bool_]:
    """Which values are one of `texts`, however they or these are spelt."""
    found_N = np.empty(column.starts_N.size, dtype=np.bool_)
    encoder_kernels.find_texts(column.data, column.starts_N, column.ends_N, *joined(tuple(texts)), found_N)
    return found_N


def shown_value(column: RawColumn, place: int) -> str:
    """One value the way a message shows it."""
    if isinstance(column, TextColumn):
        return repr(_bytes(column, place)[:60].decode("utf-8", "backslashreplace"))
    if isinstance(column, IntegerColumn):
        return "missing" if column.missing_N[place] else str(_signed(column)[place])
    return "missing" if np.isnan(column.values_N[place]) else str(column.values_N[place])


def _bytes(column: TextColumn, place: int) -> bytes:
    return column.data[column.starts_N[place] : column.ends_N[place]].tobytes()


def _signed(column: IntegerColumn) -> NDArray[Any]:
    return column.values_N.view(np.int64) if column.signed else column.values_N


# ── changed ────────────────────────────────────────────────────────────────────────────────────


def without(column: RawColumn, missing: tuple[str, ...]) -> RawColumn:
    """The column without the values whose text stands for "no value". For categories; `numbers` compares by value."""
    if not missing:
        return column
    if isinstance(column, TextColumn):
        return replace(column, ends_N=np.where(equals_any(column, missing), column.starts_N, column.ends_N))
    texts = {canonical_text(text) for text in missing}
    if isinstance(column, IntegerColumn):
        decimals = [text.decode() for text in texts]
        gone = np.array([int(t) % 2**64 for t in decimals if _is_decimal(t, column.signed)], dtype=np.uint64)
        return replace(column, missing_N=column.missing_N | np.isin(column.values_N, gone))
    known = [number for number in map(number_of, texts) if number is not None]
    gone_N = np.isin(column.values_N, known)
    if column.precision < 53 and not all(number.is_integer() for number in known):
        shown = (category_text(value, column.precision) for value in column.values_N.tolist())
        gone_N = np.array([text in texts for text in shown], dtype=np.bool_)
    return replace(column, values_N=np.where(gone_N, np.nan, column.values_N))


def canonical_text(text: str) -> bytes:
    """The canonical text of one text."""
    data = np.frombuffer(text.encode(), dtype=np.uint8)
    start, end = encoder_kernels.canonical(data, 0, data.size)
    return data[start:end].tobytes()


@lru_cache(maxsize=64)  # a block asks for the same texts once a field
def joined(texts: tuple[str, ...]) -> tuple[NDArray[np.uint8], Offsets]:
    """Texts for kernels: their canonical forms one behind the other, and where each ends."""
    forms = [canonical_text(text) for text in texts]
    return np.frombuffer(b"".join(forms), dtype=np.uint8), np.cumsum([0, *map(len, forms)], dtype=np.int64)


@lru_cache(maxsize=64)
def missing_numbers(texts: tuple[str, ...]) -> tuple[NDArray[np.float64], NDArray[np.float32]]:
    """The numbers among texts, and those of them that a 32-bit float can hold."""
    found = []
    for text in map(canonical_text, texts):
        with suppress(ValueError):  # not a number
            if b"_" not in text:  # 1_000 is one to Python alone
                found.append(float(text))
    doubles_M = np.array([number for number in found if number == number], dtype=np.float64)
    with np.errstate(over="ignore"):
        singles_M = doubles_M.astype(np.float32)
    return doubles_M, singles_M[np.isfinite(singles_M)]


def number_of(text: bytes) -> float | None:
    """The double whose text this is."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if category_text(number) == text else None


def _is_decimal(text: str, signed: bool) -> bool:
    """Whether some value of an integer column is printed as `text`."""
    digits = text.removeprefix("-") if signed else text
    if not (digits.isascii() and digits.isdigit()) or str(int(text)) != text:
        return False
    return -(2**63) <= int(text) < 2**63 if signed else int(text) < 2**64


def split(column: RawColumn, separator: str) -> RawColumn:
    """Texts parted at a separator: several values a row; empty pieces are dropped."""
    if not isinstance(column, TextColumn):
        return column
    mark = ord(separator)
    pieces = encoder_kernels.count_pieces(column.data, column.starts_N, column.ends_N, mark)
    starts_P = np.empty(pieces, dtype=np.int64)
    ends_P = np.empty(pieces, dtype=np.int64)
    offsets_N1 = np.empty(column.starts_N.size + 1, dtype=np.int64)
    encoder_kernels.split_spans(
        column.data, column.starts_N, column.ends_N, mark, starts_P, ends_P, offsets_N1
    )
    if column.offsets_B1 is not None:
        offsets_N1 = offsets_N1[column.offsets_B1]
    return TextColumn(column.data, starts_P, ends_P, offsets_N1)


def single(column: RawColumn, field: str, remedy: str) -> tuple[RawColumn, list[Faults]]:
    """One value a row from a column that may hold several: missing where there is none or more than one."""
    offsets_B1 = column.offsets_B1
    if offsets_B1 is None:
        return column, []
    counts_B = np.diff(offsets_B1)
    faults = Faults.where(
        counts_B > 1,
        field,
        "several values",
        lambda row: f"{field} has {counts_B[row]} values, one allowed{remedy}",
    )
    there_B = counts_B == 1
    first_T = offsets_B1[:-1][there_B]
    rows = counts_B.size
    if isinstance(column, TextColumn):
        starts_B = np.zeros(rows, dtype=np.int64)
        ends_B = np.zeros(rows, dtype=np.int64)
        starts_B[there_B] = column.starts_N[first_T]
        ends_B[there_B] = column.ends_N[first_T]
        return TextColumn(column.data, starts_B, ends_B), faults
    if isinstance(column, IntegerColumn):
        integers_B = np.zeros(rows, dtype=np.uint64)
        missing_B = ~there_B
        integers_B[there_B] = column.values_N[first_T]
        missing_B[there_B] = column.missing_N[first_T]
        return IntegerColumn(integers_B, missing_B, column.signed, timestamps=column.timestamps), faults
    numbers_B = np.full(rows, np.nan)
    numbers_B[there_B] = column.values_N[first_T]
    return NumberColumn(numbers_B, precision=column.precision), faults
