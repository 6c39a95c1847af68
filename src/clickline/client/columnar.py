"""Rows as callers have them become columns as protocols send them.

A column is numbers or texts, `width` values a row. Rows with fewer values than others are filled up with missing
ones: NaN or empty texts, which the server drops.
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
    NUMBER,
    PRECISION,
    SINGLE,
    IntegerColumn,
    NumberColumn,
    RawColumn,
    TextColumn,
    category_text,
)

Rows = Sequence[Mapping[str, Any]] | Mapping[str, Any]
"""Rows of field: value; or columns of field: values, each a list, a NumPy or an Arrow array, or a reader's column.
A value is text, bytes, a number, None for missing, or a list of these."""

_EXACT = 2.0**53  # whole numbers below are exact as doubles


@dataclass(frozen=True)
class Texts:
    """Spans of one buffer of bytes; an empty one is a missing value."""

    data: NDArray[np.uint8]
    starts_N: NDArray[np.int64]
    ends_N: NDArray[np.int64]
    width: int = 1

    @property
    def size(self) -> int:
        return self.starts_N.size


@dataclass(frozen=True)
class Numbers:
    """Of float32, float64, int64 or uint64. NaN is missing, and so is an integer that is marked."""

    values_N: NDArray[Any]
    width: int = 1
    missing_N: NDArray[np.bool_] | None = None

    @property
    def size(self) -> int:
        return self.values_N.size


@dataclass(frozen=True)
class Strings:
    """Texts that are Python's; an empty one is a missing value."""

    values: Sequence[str]
    width: int = 1

    @property
    def size(self) -> int:
        return len(self.values)


Column = Texts | Strings | Numbers


@dataclass(frozen=True)
class Table:
    """The rows of a request."""

    rows: int
    columns: Mapping[str, Column]

    def unmarked(self) -> Table:
        """The same for protocols whose integers are all there: columns that miss some become doubles, or texts."""
        return replace(self, columns={name: _unmarked(column) for name, column in self.columns.items()})


def as_table(rows: Rows) -> Table:
    """Rows in any of the forms of `Rows`; what cannot be sent is refused by the name of its field."""
    if isinstance(rows, Mapping):
        given: Iterable[tuple[str, Any]] = rows.items()
    elif isinstance(rows, Sequence) and all(isinstance(row, Mapping) for row in rows):
        given = _transposed(rows)
    else:
        found = type(rows).__name__
        raise _refused(f"The rows are {found}; a list of dicts or a dict of columns is allowed.")
    columns = {name: _column(name, values) for name, values in given}
    counts = {name: column.size // column.width for name, column in columns.items()}
    first, count = next(iter(counts.items()), ("", 0))
    for name, other in counts.items():
        if other != count:
            raise _refused(f"{name} has {other} rows and {first} has {count}; all fields have as many.")
    if not count:
        raise _refused("There are no rows to send. Give at least one, with at least one field.")
    return Table(count, columns)


def _transposed(rows: Sequence[Mapping[str, Any]]) -> Iterable[tuple[str, Sequence[Any]]]:
    names = list(rows[0]) if rows else []
    if len(names) > 1 and all(len(row) == len(names) for row in rows):
        with suppress(KeyError):  # all rows have the same fields, as is usual: no work a value
            return zip(names, list(zip(*map(itemgetter(*names), rows), strict=True)), strict=True)
    every = dict.fromkeys(name for row in rows for name in row)
    return ((name, [row.get(name) for row in rows]) for name in every)


def _column(name: str, values: Any) -> Column:
    if isinstance(values, list | tuple):
        return _from_values(name, values)
    if isinstance(values, TextColumn | IntegerColumn | NumberColumn):
        return _from_raw(name, values)
    if type(values).__module__.partition(".")[0] == "pyarrow":
        from clickline.data.readers.arrow_columns import (
            to_raw,
        )  # brings Numba along, and who has no Arrow arrays need not wait

        try:
            return _from_raw(name, to_raw(name, values))
        except DataError as error:
            raise _refused(f"{error}.") from error
    if hasattr(values, "__array__"):
        return _from_array(name, np.asarray(values))
    raise _refused(
        f"{name} is {type(values).__name__}; a list, a NumPy array or an Arrow array is allowed, "
        "with one value a row."
    )


# ── Python values ──────────────────────────────────────────────────────────────────────────────

_NUMBERS = {int, float, bool, NoneType}
_TEXTS = {str, bytes}


def _from_values(name: str, values: Sequence[Any]) -> Column:
    with suppress(TypeError):
        "".join(values)  # the fastest way to ask if all of them are text
        return Strings(values)
    kinds = set(map(type, values))
    if not kinds <= _NUMBERS | _TEXTS:
        if any(issubclass(kind, np.generic) for kind in kinds):
            return _from_values(name, [_python(v) if isinstance(v, np.generic) else v for v in values])
        if any(issubclass(kind, list | tuple | np.ndarray) for kind in kinds):
            return _from_lists(name, values)
        found = next(kind for kind in kinds if kind not in _NUMBERS | _TEXTS)
        raise _refused(
            f"{name} holds {found.__name__}; text, bytes, a number, None or a list of these is allowed."
        )
    if kinds <= {int, bool, NoneType} and (int in kinds or NoneType not in kinds):
        whole_N = _integers(name, [value or 0 for value in values])
        if whole_N is not None:
            gone = NoneType in kinds
            missing_N = np.array([value is None for value in values], dtype=np.bool_) if gone else None
            return Numbers(whole_N, 1, missing_N)
    elif kinds <= _NUMBERS:
        whole = [value for value in values if type(value) is int]
        if not whole or max(map(abs, whole)) < _EXACT:
            return _doubles(name, np.array(values, dtype=np.float64))
    return _spans([_bytes(name, value) for value in values])


def _python(value: np.generic | NDArray[Any]) -> Any:
    """A NumPy value or array as Python's."""
    value = np.asarray(value)
    return (as_doubles(value) if value.dtype.kind == "f" else value).tolist()


def _from_lists(name: str, values: Sequence[Any]) -> Column:
    rows = [
        _python(value)
        if isinstance(value, np.ndarray)
        else value
        if isinstance(value, list | tuple)
        else [value]
        for value in values
    ]
    flat = [value for row in rows for value in row]
    if any(isinstance(value, list | tuple) for value in flat):
        raise _refused(f"{name} holds lists of lists; a row has one value or a list of them.")
    return _filled(_from_values(name, flat), np.array([len(row) for row in rows], dtype=np.int64))


def _integers(name: str, values: Sequence[int]) -> NDArray[Any] | None:
    """None where some are negative and others too large beside them: no array holds both."""
    for kind in (np.int64, np.uint64):
        with suppress(OverflowError):
            return np.array(values, dtype=kind)
    if min(values) >= -(2**63) and max(values) < 2**64:
        return None
    raise _refused(f"{name} holds whole numbers beyond 64 bits; send them as text.")


def _doubles(name: str, values_N: NDArray[Any]) -> Numbers:
    if np.isinf(values_N).any():
        raise _refused(f"{name} holds infinity; a finite number is allowed, or NaN for none.")
    return Numbers(values_N)


def spans(column: Texts | Strings) -> Texts:
    """The column as spans of a buffer."""
    if isinstance(column, Texts):
        return column
    return replace(_spans([text.encode() for text in column.values]), width=column.width)


def _spans(texts: Sequence[bytes]) -> Texts:
    ends_N = np.cumsum([len(text) for text in texts], dtype=np.int64)
    starts_N = np.zeros_like(ends_N)
    starts_N[1:] = ends_N[:-1]
    return Texts(np.frombuffer(b"".join(texts), dtype=np.uint8), starts_N, ends_N)


def _bytes(name: str, value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes):
        return value
    if isinstance(value, float) and abs(value) == np.inf:
        raise _refused(f"{name} holds infinity; a finite number is allowed, or NaN for none.")
    return b"" if value is None else category_text(value)


# ── arrays ─────────────────────────────────────────────────────────────────────────────────────


def _from_array(name: str, values: NDArray[Any]) -> Column:
    if values.ndim not in (1, 2):
        raise _refused(f"{name} has {values.ndim} dimensions; [rows] or [rows, values] is allowed.")
    kind, width = values.dtype.kind, values.shape[1] if values.ndim == 2 else 1
    flat = values.reshape(-1)
    if kind == "f":
        numbers = _doubles(name, flat if flat.dtype == np.float32 else as_doubles(flat))
        return replace(numbers, width=width)
    if kind in "iub":
        return Numbers(flat.astype(np.uint64 if flat.dtype == np.uint64 else np.int64, copy=False), width)
    if kind in "SUO":
        return (
            replace(_from_values(name, flat.tolist()), width=width)
            if width != 1
            else _from_values(name, flat.tolist())
        )
    raise _refused(f"{name} is an array of {values.dtype}; texts or numbers are allowed.")


def _from_raw(name: str, column: RawColumn) -> Column:
    """A column as readers deliver it."""
    flat: Column
    if isinstance(column, TextColumn):
        flat = Texts(column.data, column.starts_N, column.ends_N)
    elif isinstance(column, NumberColumn):
        flat = _doubles(name, _as_they_came(column))
    else:
        values_N = column.values_N.view(np.int64) if column.signed else column.values_N
        flat = Numbers(values_N, 1, column.missing_N if column.missing_N.any() else None)
    return flat if column.offsets_B1 is None else _filled(flat, np.diff(column.offsets_B1))


def as_doubles(values: NDArray[Any]) -> NDArray[np.float64]:
    """Floats as doubles. A fraction of 32 or 16 bits becomes the double that has its text, so that 0.1 stays 0.1."""
    doubles = values.astype(np.float64)
    if values.dtype in (np.float16, np.float32):
        fractions = np.trunc(doubles) != doubles
        doubles[fractions] = values[fractions].astype(str).astype(np.float64)
    return doubles


def _as_they_came(column: NumberColumn) -> NDArray[Any]:
    if column.precision == PRECISION[SINGLE]:
        return column.values_N.astype(np.float32)
    if column.precision == PRECISION[NUMBER]:
        return column.values_N
    texts = [category_text(value, column.precision) for value in column.values_N.tolist()]
    return np.array(
        [float(text or "nan") for text in texts]
    )  # of 16 bits, for which not all protocols have a type


def _filled(flat: Column, counts_B: NDArray[np.int64]) -> Column:
    """Values of rows that have so many each, made a rectangle."""
    width = max(int(counts_B.max(initial=1)), 1)
    if bool((counts_B == width).all()):
        return replace(flat, width=width)
    shift_B = np.arange(counts_B.size) * width - (np.cumsum(counts_B) - counts_B)
    places_N = np.arange(flat.size) + np.repeat(shift_B, counts_B)
    if not isinstance(flat, Numbers):
        flat = spans(flat)
        starts_P = np.zeros(counts_B.size * width, dtype=np.int64)
        ends_P = np.zeros_like(starts_P)
        starts_P[places_N], ends_P[places_N] = flat.starts_N, flat.ends_N
        return Texts(flat.data, starts_P, ends_P, width)
    values_P = np.zeros(counts_B.size * width, dtype=flat.values_N.dtype)
    values_P[places_N] = flat.values_N
    missing_P = np.ones(values_P.size, dtype=np.bool_)
    missing_P[places_N] = False if flat.missing_N is None else flat.missing_N
    if values_P.dtype.kind == "f":
        values_P[missing_P] = np.nan
        return Numbers(values_P, width)
    return Numbers(values_P, width, missing_P)


def _unmarked(column: Column) -> Column:
    if not isinstance(column, Numbers) or column.missing_N is None:
        return column
    doubles_N = column.values_N.astype(np.float64)
    if bool((np.abs(doubles_N) < _EXACT).all()):
        return Numbers(np.where(column.missing_N, np.nan, doubles_N), column.width)
    shown = zip(column.values_N.tolist(), column.missing_N.tolist(), strict=True)
    return replace(_spans([b"" if gone else b"%d" % value for value, gone in shown]), width=column.width)


def _refused(message: str) -> RequestRefused:
    return RequestRefused("invalid", message)
