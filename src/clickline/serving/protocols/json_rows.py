"""Converts JSON values to request rows.

A value is text, a number, true or false (1 and 0, as in training), null (missing), or a list of these for
a multi-value slot; [x] is x. {"b64": "…"} is text as bytes. Anything else is refused, with the name of the field:
an object, infinity, a list for a single-value field, a number too large for its text to be known.

Texts of all columns are joined at once, and so are numbers; values are handled one by one only in columns of mixed
kinds.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter
from types import NoneType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from clickline.errors import RequestRefused
from clickline.records import (
    ABSENT,
    FEATURE_ID,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    INTEGER,
    PRECISION,
    TEXT,
    IntegerColumn,
    NumberColumn,
    RawColumn,
    RequestRows,
    TextColumn,
    category_text,
)
from clickline.serving.open_versions import ScorerLike
from clickline.serving.protocols.http_common import kind_name, preview, similar_name
from clickline.serving.protocols.request import Limits, multi_value_columns

FLOATS = {"float16": FLOAT16, "float32": FLOAT32}
"""Kinds of floats narrower than 64 bits, by NumPy name."""


@dataclass(frozen=True)
class ModelFields:
    """Which values the columns of a model accept."""

    index: Mapping[str, int]  # column to its index in RequestRows
    multi_value: frozenset[str]  # columns with several values per row
    categories: frozenset[str]  # columns whose numbers are encoded by their text


_fields: WeakKeyDictionary[Any, ModelFields] = WeakKeyDictionary()  # by model: the same for all its requests


def fields_of(model: ScorerLike) -> ModelFields:
    fields = _fields.get(model)
    if fields is None:
        fields = _fields[model] = ModelFields(
            {name: n for n, name in enumerate(model.columns)},
            multi_value_columns(model.features),
            frozenset(slot.column for slot in model.features.slots if slot.source in ("text", "feasign")),
        )
    return fields


class RowsBuilder:
    """Collects the columns of one request."""

    def __init__(self, fields: ModelFields, rows: int, base: bytes = b"") -> None:
        """`base`: bytes of the request, which text spans point into."""
        self._fields = fields
        self._rows = rows
        self._base = base
        shape = (len(fields.index), rows)
        self._kind_C = np.zeros(shape[0], dtype=np.uint8)
        self._starts_CB = np.zeros(shape, dtype=np.int64)
        self._ends_CB = np.zeros(shape, dtype=np.int64)
        self._numbers_CB = np.zeros(shape, dtype=np.float64)
        self._integers_CB = np.zeros(shape, dtype=np.int64)
        self._several: dict[str, RawColumn] = {}
        self._texts: dict[int, Sequence[str]] = {}  # whole columns, converted all at once
        self._joined: list[str] = []
        self._numbers: dict[str, Sequence[Any]] = {}
        self._float_kind: dict[str, int] = {}  # for floats narrower than 64 bits

    def values(self, field: str, values: Sequence[Any], floats: int = FLOAT64) -> None:
        """Add a column of JSON values: one per row, or a list. `floats`: the kind of its floats."""
        if floats != FLOAT64:
            self._float_kind[field] = floats
        try:
            self._put_texts(field, values)
        except TypeError:  # from str.join: not all values are text
            kinds = set(map(type, values))
            if kinds <= _NUMBERS:
                self._numbers[field] = values
            elif list in kinds:
                self._lists(field, values)
            else:
                self._put_texts(field, [self._text(value, field, row) for row, value in enumerate(values)])

    def array(self, field: str, values_N: NDArray[Any], each: int) -> None:
        """Add a column of numbers, `each` per row."""
        offsets_B1, rows_N = self._regular(field, each)
        if values_N.dtype == np.uint64 and bool((values_N >= 2**63).any()):
            self._put_some_texts(field, [str(value) for value in values_N.tolist()], offsets_B1)
        else:
            kind = np.float64 if values_N.dtype.kind == "f" else np.int64
            if values_N.dtype.name in FLOATS:
                self._float_kind[field] = FLOATS[values_N.dtype.name]
            self._put_array(field, values_N.astype(kind), offsets_B1, rows_N)

    def spans(self, field: str, starts_N: NDArray[np.int64], ends_N: NDArray[np.int64], each: int) -> None:
        """Add a column of texts in `base`, `each` per row."""
        offsets_B1, _ = self._regular(field, each)
        if offsets_B1 is not None:
            data = np.frombuffer(self._base, dtype=np.uint8)
            self._several[field] = TextColumn(data, starts_N, ends_N, offsets_B1)
            return
        column = self._fields.index[field]
        self._kind_C[column] = TEXT
        self._starts_CB[column] = starts_N
        self._ends_CB[column] = ends_N

    def feature_ids(self, field: str, values: Sequence[Sequence[int]], hashes: bool) -> None:
        """Add a column of 64-bit feature ids, any number per row. `hashes`: the training log has text in their
        place."""
        column = self._fields.index[field]
        counts_B = np.fromiter(map(len, values), dtype=np.int64, count=self._rows)
        bits_N = np.array([value % 2**64 for row in values for value in row], dtype=np.uint64)
        if bool((counts_B <= 1).all()):
            self._kind_C[column] = FEATURE_ID if hashes else INTEGER
            self._integers_CB[column, counts_B == 1] = bits_N.view(np.int64)
            return
        self._check_multi_value(field, counts_B.tolist())
        self._kind_C[column] = FEATURE_ID if hashes else ABSENT
        self._several[field] = IntegerColumn(bits_N, bits_N == 0, False, _offsets(counts_B))

    def build(self) -> RequestRows:
        self._place_numbers()
        data = self._base + self._place_texts() if self._texts else self._base
        return RequestRows(
            self._rows,
            np.frombuffer(data or b"\0", dtype=np.uint8),
            self._kind_C,
            self._starts_CB,
            self._ends_CB,
            self._numbers_CB,
            self._integers_CB,
            self._several,
        )

    def _place_numbers(self) -> None:
        if not self._numbers:
            return
        numbers_NB = np.array(list(self._numbers.values()), dtype=np.float64)  # null becomes NaN: missing
        if bool((np.abs(numbers_NB) >= 2.0**53).any()):
            for field, values in self._numbers.items():
                self._put_flat(field, values, None, range(self._rows))
        else:
            columns = [self._fields.index[field] for field in self._numbers]
            self._kind_C[columns] = [self._float_kind.get(field, FLOAT64) for field in self._numbers]
            self._numbers_CB[columns] = numbers_NB

    def _place_texts(self) -> bytes:
        """Set the spans of all texts, and return the bytes they point into, which follow `base`."""
        data = "\0".join(self._joined).encode("utf-8", "surrogateescape")
        shape = (len(self._texts), self._rows)
        ends_N = np.append(np.flatnonzero(np.frombuffer(data, dtype=np.uint8) == 0), len(data))
        if ends_N.size != shape[0] * shape[1]:  # some text contains a NUL
            texts = [_bytes(text) for column in self._texts.values() for text in column]
            data = b"\0".join(texts)
            ends_N = np.cumsum([len(text) + 1 for text in texts]) - 1
        starts_N = np.append(0, ends_N[:-1] + 1)
        columns = list(self._texts)
        self._starts_CB[columns] = starts_N.reshape(shape) + len(self._base)
        self._ends_CB[columns] = ends_N.reshape(shape) + len(self._base)
        return data

    def _lists(self, field: str, values: Sequence[Any]) -> None:
        """Add a column that contains lists."""
        if all(type(value) is not list or len(value) < 2 for value in values):
            one = [(value[0] if value else None) if type(value) is list else value for value in values]
            self._put_flat(field, one, None, range(self._rows))
            return
        rows = [value if type(value) is list else [value] for value in values]
        counts = [len(row) for row in rows]
        self._check_multi_value(field, counts)
        rows_N = np.repeat(np.arange(self._rows), counts).tolist()
        self._put_flat(field, [value for row in rows for value in row], _offsets(counts), rows_N)

    def _put_flat(
        self, field: str, values: Sequence[Any], offsets_B1: NDArray[np.int64] | None, rows_N: Sequence[int]
    ) -> None:
        """Store values without lists as 64-bit integers or doubles if all of them are, else as texts."""
        kinds = set(map(type, values))
        if kinds <= {int, bool}:
            with suppress(OverflowError):
                self._put_array(field, np.array(values, dtype=np.int64), offsets_B1, rows_N)
                return
        elif kinds <= _NUMBERS:
            doubles_N = np.array(values, dtype=np.float64)
            if int not in kinds or not bool((np.abs(doubles_N) >= 2.0**53).any()):
                self._put_array(field, doubles_N, offsets_B1, rows_N)
                return
        texts = [self._text(value, field, row) for value, row in zip(values, rows_N, strict=True)]
        self._put_some_texts(field, texts, offsets_B1)

    def _text(self, value: Any, field: str, row: int) -> str:
        """Convert one value to text."""
        if type(value) is str:
            return value
        if value is None:
            return ""
        if type(value) is dict and value.keys() == {"b64"} and type(value["b64"]) is str:
            with suppress(ValueError):
                return base64.b64decode(value["b64"], validate=True).decode("utf-8", "surrogateescape")
            problem = f"{field} has a b64 value in row {row} (counted from 0) that is not valid base64."
            raise RequestRefused("invalid", problem)
        if type(value) is dict or type(value) is list:
            raise RequestRefused(
                "invalid",
                f"{field} is {kind_name(value)} in row {row} (counted from 0); it must be text, a number, "
                "null or a list of these.",
            )
        if type(value) is float:
            self._check_doubles(field, np.array([value]), [row])
        return category_text(value, PRECISION[self._float_kind.get(field, FLOAT64)]).decode()

    def _check_doubles(self, field: str, values_N: NDArray[np.float64], rows_N: Sequence[int]) -> None:
        """Refuse infinity and, in a category, what may have been a whole number beyond 64 bits."""
        bad_N = np.isinf(values_N)
        if field in self._fields.categories:
            bad_N |= (values_N >= 2.0**64) | (values_N <= -(2.0**63))
        if bool(bad_N.any()):
            position = int(bad_N.argmax())
            value = float(values_N[position])
            allowed = "it must be a finite number, or null for no value."
            if not np.isinf(value):
                allowed = "send a category that is a number beyond 64 bits as text."
            raise RequestRefused(
                "invalid", f"{field} is {value!r} in row {rows_N[position]} (counted from 0); {allowed}"
            )

    def _put_texts(self, field: str, texts: Sequence[str]) -> None:
        column = self._fields.index[field]
        self._joined.append("\0".join(texts))
        self._texts[column] = texts
        self._kind_C[column] = TEXT

    def _put_some_texts(self, field: str, texts: list[str], offsets_B1: NDArray[np.int64] | None) -> None:
        if offsets_B1 is None:
            self._put_texts(field, texts)
            return
        encoded = [_bytes(text) for text in texts]
        bounds_N1 = _offsets([len(text) for text in encoded])
        data = np.frombuffer(b"".join(encoded) or b"\0", dtype=np.uint8)
        self._several[field] = TextColumn(data, bounds_N1[:-1], bounds_N1[1:], offsets_B1)

    def _put_array(
        self, field: str, values_N: NDArray[Any], offsets_B1: NDArray[np.int64] | None, rows_N: Sequence[int]
    ) -> None:
        column = self._fields.index[field]
        if values_N.dtype == np.float64:
            self._check_doubles(field, values_N, rows_N)
            kind = self._float_kind.get(field, FLOAT64)
            if offsets_B1 is None:
                self._kind_C[column] = kind
                self._numbers_CB[column] = values_N
            else:
                self._several[field] = NumberColumn(values_N, offsets_B1, PRECISION[kind])
        elif offsets_B1 is None:
            self._kind_C[column] = INTEGER
            self._integers_CB[column] = values_N
        else:
            missing_N = np.zeros(values_N.size, dtype=np.bool_)
            self._several[field] = IntegerColumn(values_N.view(np.uint64), missing_N, True, offsets_B1)

    def _regular(self, field: str, each: int) -> tuple[NDArray[np.int64] | None, Sequence[int]]:
        if each == 1:
            return None, range(self._rows)
        self._check_multi_value(field, [each])
        rows_N = np.repeat(np.arange(self._rows), each).tolist()
        return np.arange(0, self._rows * each + 1, each, dtype=np.int64), rows_N

    def _check_multi_value(self, field: str, counts: Sequence[int]) -> None:
        if field not in self._fields.multi_value:
            row = next((row for row, count in enumerate(counts) if count > 1), None)
            if row is not None:
                raise RequestRefused(
                    "invalid",
                    f"{field} has {counts[row]} values in row {row} (counted from 0); it takes one value per row.",
                )


def _offsets(counts: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    offsets_B1 = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=offsets_B1[1:])
    return offsets_B1


# ── whole requests ─────────────────────────────────────────────────────────────────────────────


def rows_from_objects(model: ScorerLike, objects: Any, what: str, limits: Limits) -> RequestRows:
    """Convert a list of objects, field to value, to rows."""
    if type(objects) is not list:
        raise RequestRefused("invalid", f"{what} is {kind_name(objects)}; it must be a list of objects.")
    check_rows(len(objects), limits)
    for row, given in enumerate(objects):
        if type(given) is not dict:
            raise RequestRefused(
                "invalid", f"{what}[{row}] is {kind_name(given)}; it must be an object of field: value."
            )
    fields = fields_of(model)
    builder = RowsBuilder(fields, len(objects))
    for field, values in _transposed(objects, lambda field: known_field(field, fields, limits)):
        builder.values(field, values)
    return builder.build()


def rows_from_columns(model: ScorerLike, columns: Any, what: str, limits: Limits) -> RequestRows:
    """Convert an object, field to the list of its values, to rows."""
    if type(columns) is not dict:
        found = kind_name(columns)
        raise RequestRefused("invalid", f"{what} is {found}; it must be an object of field: [values].")
    rows, first = None, ""
    for field, values in columns.items():
        if type(values) is not list:
            found = kind_name(values)
            raise RequestRefused(
                "invalid", f"{preview(field)} is {found}; it must be a list with one value per row."
            )
        if rows is None:
            rows, first = len(values), field
        elif len(values) != rows:
            raise RequestRefused(
                "invalid",
                f"{preview(field)} has {len(values)} rows, but {preview(first)} has {rows}; "
                "all fields must have the same number.",
            )
    check_rows(rows or 0, limits)
    fields = fields_of(model)
    builder = RowsBuilder(fields, rows or 0)
    for field, values in columns.items():
        if known_field(field, fields, limits):
            builder.values(field, values)
    return builder.build()


def check_rows(rows: int, limits: Limits) -> None:
    if not rows:
        raise RequestRefused("invalid", "the request has no rows; at least one is needed.")
    if rows > limits.max_rows:
        raise RequestRefused(
            "invalid",
            f"the request has {rows} rows; at most {limits.max_rows} are allowed (serve.max_rows). "
            "Send them in several requests.",
        )


def known_field(field: str, fields: ModelFields, limits: Limits) -> bool:
    """Whether the model has this field. An unknown field is refused unless unknown fields are ignored."""
    if field in fields.index:
        return True
    if limits.ignore_unknown:
        return False
    hint = similar_name(field, fields.index)
    raise RequestRefused(
        "invalid",
        f"the model has no field {preview(field)}.{hint} "
        "Omit it, or set serve.unknown_fields: ignore on the server.",
    )


def _transposed(
    objects: list[dict[str, Any]], is_known: Callable[[str], bool]
) -> Iterator[tuple[str, Sequence[Any]]]:
    """Transpose rows to columns. Values of unknown fields are not collected."""
    names = list(objects[0])
    if len(names) > 1 and all(len(given) == len(names) for given in objects):
        with suppress(KeyError):  # the common case, all rows have the same fields: no work per value
            columns = list(zip(*map(itemgetter(*names), objects), strict=True))
            return (both for both in zip(names, columns, strict=True) if is_known(both[0]))
    every = dict.fromkeys(name for given in objects for name in given)
    return ((name, [given.get(name) for given in objects]) for name in every if is_known(name))


# ── values ─────────────────────────────────────────────────────────────────────────────────────

_NUMBERS = frozenset({int, float, bool, NoneType})


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")  # surrogate escapes are bytes that came as base64
