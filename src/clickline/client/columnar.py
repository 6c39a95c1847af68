"""Converts the rows of callers to the columns that protocols send.

A column is numbers or texts, `width` values per row. Rows with fewer values than others are padded with missing
values: NaN or empty texts, which the server drops.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import itemgetter
from types import NoneType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clickline.errors import DataError, RequestRefused
from clickline.records import (
    FLOAT32,
    FLOAT64,
    PRECISION,
    IntegerColumn,
    NumberColumn,
    RawColumn,
    TextColumn,
    category_text,
)

Rows = Sequence[Mapping[str, Any]] | Mapping[str, Any]
"""Rows as {field: value}, or columns as {field: values}, each a list, a NumPy or Arrow array, or a reader's column.
A value is text, bytes, a number, None for missing, or a list of these."""

_MAX_EXACT = 2.0**53  # integers below are exact as doubles


@dataclass(frozen=True)
class SpanColumn:
    """Texts as spans of one byte buffer; an empty one is a missing value."""

    data: NDArray[np.uint8]
    starts_N: NDArray[np.int64]
    ends_N: NDArray[np.int64]
    width: int = 1

    @property
    def size(self) -> int:
        return self.starts_N.size


@dataclass(frozen=True)
class NumericColumn:
    """Numbers: float32, float64, int64 or uint64. NaN is missing; among integers, those marked in `missing_N` are."""

    values_N: NDArray[Any]
    width: int = 1
    missing_N: NDArray[np.bool_] | None = None

    @property
    def size(self) -> int:
        return self.values_N.size


@dataclass(frozen=True)
class StringColumn:
    """Texts as Python strings; an empty one is a missing value."""

    values: Sequence[str]
    width: int = 1

    @property
    def size(self) -> int:
        return len(self.values)


Column = SpanColumn | StringColumn | NumericColumn


@dataclass(frozen=True)
class RequestTable:
    """The rows of a request as columns."""

    rows: int
    columns: Mapping[str, Column]

    def with_inline_missing(self) -> RequestTable:
        """The same for protocols without missing integers: columns that have some become doubles, or texts."""
        return replace(self, columns={name: _inline_missing(column) for name, column in self.columns.items()})


def as_table(rows: Rows) -> RequestTable:
    """Convert rows in any form of `Rows`; an error for values that cannot be sent names their field."""
    if isinstance(rows, Mapping):
        given: Iterable[tuple[str, Any]] = rows.items()
    elif isinstance(rows, Sequence) and all(isinstance(row, Mapping) for row in rows):
        given = _transpose(rows)
    else:
        raise _invalid(f"The rows are {type(rows).__name__}; allowed: a list of dicts, or a dict of columns.")
    columns = {name: _column(name, values) for name, values in given}
    counts = {name: column.size // column.width for name, column in columns.items()}
    first, count = next(iter(counts.items()), ("", 0))
    for name, other in counts.items():
        if other != count:
            raise _invalid(
                f"{name} has {other} rows and {first} has {count}; all fields must have the same number of rows."
            )
    if not count:
        raise _invalid("There are no rows to send. Give at least one row with at least one field.")
    return RequestTable(count, columns)


def _transpose(rows: Sequence[Mapping[str, Any]]) -> Iterable[tuple[str, Sequence[Any]]]:
    names = list(rows[0]) if rows else []
    if len(names) > 1 and all(len(row) == len(names) for row in rows):
        with suppress(KeyError):  # the usual case, all rows have the same fields: no work per value
            return zip(names, list(zip(*map(itemgetter(*names), rows), strict=True)), strict=True)
    all_names = dict.fromkeys(name for row in rows for name in row)
    return ((name, [row.get(name) for row in rows]) for name in all_names)


def _column(name: str, values: Any) -> Column:
    if isinstance(values, list | tuple):
        return _from_values(name, values)
    if isinstance(values, TextColumn | IntegerColumn | NumberColumn):
        return _from_raw(name, values)
    if type(values).__module__.partition(".")[0] == "pyarrow":
        # Imported here because it loads Numba, which callers without Arrow arrays need not wait for.
        from clickline.data.readers.arrow_columns import to_raw

        try:
            return _from_raw(name, to_raw(name, values))
        except DataError as error:
            raise _invalid(f"{error}.") from error
    if hasattr(values, "__array__"):
        return _from_array(name, np.asarray(values))
    raise _invalid(
        f"{name} is {type(values).__name__}; allowed: a list, a NumPy array or an Arrow array, "
        "with one value per row."
    )


# ── Python values ──────────────────────────────────────────────────────────────────────────────

_NUMBERS = {int, float, bool, NoneType}
_TEXTS = {str, bytes}


def _from_values(name: str, values: Sequence[Any]) -> Column:
    with suppress(TypeError):
        "".join(values)  # the fastest way to check that all of them are text
        return StringColumn(values)
    kinds = set(map(type, values))
    if not kinds <= _NUMBERS | _TEXTS:
        if any(issubclass(kind, np.generic) for kind in kinds):
            return _from_values(name, [_to_python(v) if isinstance(v, np.generic) else v for v in values])
        if any(issubclass(kind, list | tuple | np.ndarray) for kind in kinds):
            return _from_lists(name, values)
        unsupported = next(kind for kind in kinds if kind not in _NUMBERS | _TEXTS)
        raise _invalid(
            f"{name} contains {unsupported.__name__}; allowed: text, bytes, a number, None, or a list of these."
        )
    if kinds <= {int, bool, NoneType} and (int in kinds or NoneType not in kinds):
        integers_N = _integers(name, [value or 0 for value in values])
        if integers_N is not None:
            some_missing = NoneType in kinds
            missing_N = (
                np.array([value is None for value in values], dtype=np.bool_) if some_missing else None
            )
            return NumericColumn(integers_N, 1, missing_N)
    elif kinds <= _NUMBERS:
        integers = [value for value in values if type(value) is int]
        if not integers or max(map(abs, integers)) < _MAX_EXACT:
            return _finite(name, np.array(values, dtype=np.float64))
    return _join_texts([_encode(name, value) for value in values])


def _to_python(value: np.generic | NDArray[Any]) -> Any:
    """A NumPy value or array as Python values."""
    value = np.asarray(value)
    return (as_doubles(value) if value.dtype.kind == "f" else value).tolist()


def _from_lists(name: str, values: Sequence[Any]) -> Column:
    rows = [
        _to_python(value)
        if isinstance(value, np.ndarray)
        else value
        if isinstance(value, list | tuple)
        else [value]
        for value in values
    ]
    flat = [value for row in rows for value in row]
    if any(isinstance(value, list | tuple) for value in flat):
        raise _invalid(f"{name} contains nested lists; allowed: one value or one list per row.")
    return _pad(_from_values(name, flat), np.array([len(row) for row in rows], dtype=np.int64))


def _integers(name: str, values: Sequence[int]) -> NDArray[Any] | None:
    """Integers as an array; None if some are negative and others do not fit in int64."""
    for kind in (np.int64, np.uint64):
        with suppress(OverflowError):
            return np.array(values, dtype=kind)
    if min(values) >= -(2**63) and max(values) < 2**64:
        return None
    raise _invalid(f"{name} contains integers of more than 64 bits; send them as text.")


def _finite(name: str, values_N: NDArray[Any]) -> NumericColumn:
    if np.isinf(values_N).any():
        raise _invalid(f"{name} contains infinity; allowed: a finite number, or NaN for missing.")
    return NumericColumn(values_N)


def as_spans(column: SpanColumn | StringColumn) -> SpanColumn:
    """The column as spans of a byte buffer."""
    if isinstance(column, SpanColumn):
        return column
    return replace(_join_texts([text.encode() for text in column.values]), width=column.width)


def _join_texts(texts: Sequence[bytes]) -> SpanColumn:
    ends_N = np.cumsum([len(text) for text in texts], dtype=np.int64)
    starts_N = np.zeros_like(ends_N)
    starts_N[1:] = ends_N[:-1]
    return SpanColumn(np.frombuffer(b"".join(texts), dtype=np.uint8), starts_N, ends_N)


def _encode(name: str, value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes):
        return value
    if isinstance(value, float) and abs(value) == np.inf:
        raise _invalid(f"{name} contains infinity; allowed: a finite number, or NaN for missing.")
    return b"" if value is None else category_text(value)


# ── arrays ─────────────────────────────────────────────────────────────────────────────────────


def _from_array(name: str, values: NDArray[Any]) -> Column:
    if values.ndim not in (1, 2):
        raise _invalid(f"{name} has {values.ndim} dimensions; allowed: [rows] or [rows, values].")
    kind, width = values.dtype.kind, values.shape[1] if values.ndim == 2 else 1
    flat = values.reshape(-1)
    if kind == "f":
        numbers = _finite(name, flat if flat.dtype == np.float32 else as_doubles(flat))
        return replace(numbers, width=width)
    if kind in "iub":
        return NumericColumn(
            flat.astype(np.uint64 if flat.dtype == np.uint64 else np.int64, copy=False), width
        )
    if kind in "SUO":
        return (
            replace(_from_values(name, flat.tolist()), width=width)
            if width != 1
            else _from_values(name, flat.tolist())
        )
    raise _invalid(f"{name} is an array of {values.dtype}; allowed: texts or numbers.")


def _from_raw(name: str, column: RawColumn) -> Column:
    """Convert a reader's column."""
    flat: Column
    if isinstance(column, TextColumn):
        flat = SpanColumn(column.data, column.starts_N, column.ends_N)
    elif isinstance(column, NumberColumn):
        flat = _finite(name, _native_floats(column))
    else:
        values_N = column.values_N.view(np.int64) if column.signed else column.values_N
        flat = NumericColumn(values_N, 1, column.missing_N if column.missing_N.any() else None)
    return flat if column.offsets_B1 is None else _pad(flat, np.diff(column.offsets_B1))


def as_doubles(values: NDArray[Any]) -> NDArray[np.float64]:
    """Floats as doubles. A 32- or 16-bit fraction becomes the double with the same text, so that 0.1 stays 0.1."""
    doubles = values.astype(np.float64)
    if values.dtype in (np.float16, np.float32):
        fractions = np.trunc(doubles) != doubles
        doubles[fractions] = values[fractions].astype(str).astype(np.float64)
    return doubles


def _native_floats(column: NumberColumn) -> NDArray[Any]:
    if column.precision == PRECISION[FLOAT32]:
        return column.values_N.astype(np.float32)
    if column.precision == PRECISION[FLOAT64]:
        return column.values_N
    texts = [category_text(value, column.precision) for value in column.values_N.tolist()]
    # 16-bit floats as doubles, since not all protocols have a type for them
    return np.array([float(text or "nan") for text in texts])


def _pad(flat: Column, counts_B: NDArray[np.int64]) -> Column:
    """Pad the values of rows, `counts_B` in each, to a rectangle."""
    width = max(int(counts_B.max(initial=1)), 1)
    if bool((counts_B == width).all()):
        return replace(flat, width=width)
    shift_B = np.arange(counts_B.size) * width - (np.cumsum(counts_B) - counts_B)
    places_N = np.arange(flat.size) + np.repeat(shift_B, counts_B)
    if not isinstance(flat, NumericColumn):
        flat = as_spans(flat)
        starts_P = np.zeros(counts_B.size * width, dtype=np.int64)
        ends_P = np.zeros_like(starts_P)
        starts_P[places_N], ends_P[places_N] = flat.starts_N, flat.ends_N
        return SpanColumn(flat.data, starts_P, ends_P, width)
    values_P = np.zeros(counts_B.size * width, dtype=flat.values_N.dtype)
    values_P[places_N] = flat.values_N
    missing_P = np.ones(values_P.size, dtype=np.bool_)
    missing_P[places_N] = False if flat.missing_N is None else flat.missing_N
    if values_P.dtype.kind == "f":
        values_P[missing_P] = np.nan
        return NumericColumn(values_P, width)
    return NumericColumn(values_P, width, missing_P)


def _inline_missing(column: Column) -> Column:
    if not isinstance(column, NumericColumn) or column.missing_N is None:
        return column
    doubles_N = column.values_N.astype(np.float64)
    if bool((np.abs(doubles_N) < _MAX_EXACT).all()):
        return NumericColumn(np.where(column.missing_N, np.nan, doubles_N), column.width)
    pairs = zip(column.values_N.tolist(), column.missing_N.tolist(), strict=True)
    return replace(
        _join_texts([b"" if missing else b"%d" % value for value, missing in pairs]), width=column.width
    )


def _invalid(message: str) -> RequestRefused:
    return RequestRefused("invalid", message)
