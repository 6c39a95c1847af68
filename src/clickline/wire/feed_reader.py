"""The variables that Paddle Serving's clients feed for a model, and the rows of their requests.

One variable of 64-bit feasigns for each column of categories, in the order of the model's columns, then one vector
`dense_input` of all columns of numbers, or each of these by itself. Clients before v0.7 send tensors without names, in
the order of the config that `clickline versions client-config` writes: this order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from clickline.errors import RequestRefused
from clickline.features import FeatureSpec
from clickline.protobuf_wire import NameTable
from clickline.records import ABSENT, FEATURE_ID, IntegerColumn, RawColumn, RequestRows
from clickline.wire import feed_tensors, tensor_layout
from clickline.wire.request_reader import malformed, unknown_field

VECTOR = "dense_input"
"""The variable with all numbers; the prior systems' own configs have it under this name."""


@dataclass(frozen=True)
class FeedColumns:
    """The columns of a model as variables."""

    hashed: tuple[str, ...]  # categories that are texts in the log: a feasign is the hash of the text
    feasigns: tuple[str, ...]  # categories that are feasigns in the log
    numbers: tuple[str, ...]
    ambiguous: tuple[str, ...]  # texts that are also read as numbers, which a hash cannot give

    @staticmethod
    def of(features: FeatureSpec) -> FeedColumns:
        texts = {slot.column for slot in features.slots if slot.source == "text"}
        ids = {slot.column for slot in features.slots if slot.source == "feasign"} - texts
        buckets = {slot.column for slot in features.slots if slot.source not in ("text", "feasign")}
        numbers = {field.column for field in features.dense} | buckets

        def ordered(names: set[str]) -> tuple[str, ...]:
            return tuple(name for name in features.columns if name in names)

        return FeedColumns(
            ordered(texts - numbers), ordered(ids), ordered(numbers - texts - ids), ordered(texts & numbers)
        )

    def categories(self, features: FeatureSpec) -> tuple[str, ...]:
        """The columns of feasigns, in the order of the model's columns."""
        return tuple(name for name in features.columns if name in {*self.hashed, *self.feasigns})


class FeedReader:
    """Reads the requests of a model with these features."""

    def __init__(self, features: FeatureSpec) -> None:
        found = self.found = FeedColumns.of(features)
        categories = found.categories(features)
        self.columns = features.columns
        self.categories, self.numbers = categories, found.numbers
        single = (*categories, *found.numbers, *found.ambiguous)
        # The vectors are the last two: `find_tensors` expects them there.
        self._variables = (*single, "sparse_ids", VECTOR)
        kinds = dict.fromkeys(found.hashed, feed_tensors.HASHED) | dict.fromkeys(
            found.numbers, feed_tensors.NUMBER
        )
        kinds |= dict.fromkeys(found.ambiguous, feed_tensors.AMBIGUOUS)
        by_name = [kinds.get(name, feed_tensors.FEASIGN) for name in single]
        index = {name: n for n, name in enumerate(features.columns)}
        s, d, vector = len(categories), len(found.numbers), len(single) + 1
        self._kind_V = _longs([*by_name, feed_tensors.FEASIGN, feed_tensors.NUMBER])
        self._columns_K = _longs([index[name] for name in (*single, *categories, *found.numbers)])
        self._first_V = _longs([*range(len(single)), len(single), len(single) + s])
        self._width_V = _longs([0] * len(single) + [s, d])
        self._compact_F = _longs([*range(s), *([vector] if d else [])])
        self._per_field_F = _longs([*range(s + d)])
        self._multi = frozenset(slot.column for slot in features.slots if slot.multi)
        variable = {name: v for v, name in enumerate(single)}
        names = {VECTOR: vector} if d else {}
        categorical = {*categories, *found.ambiguous}
        names |= {
            str(slot.number): variable[slot.column] for slot in features.slots if slot.column in categorical
        }
        names |= variable | {field.name: variable[field.column] for field in features.fields}
        self._names = NameTable.of(tuple(names))
        self._variable_N = _longs(list(names.values()))

    def rows(self, body: bytes, layout: int, max_rows: int, ignore_unknown: bool) -> tuple[RequestRows, int]:
        """Decode a request of this layout; INSTS stands for both layouts of the general model. Returns the layout that
        it has."""
        data = np.frombuffer(body, dtype=np.uint8)
        instances, layout = feed_tensors.count_instances(data, layout)
        if instances < 0:
            raise malformed()
        if layout == feed_tensors.TENSORS:
            instances = min(instances, 1)
        _check_rows(instances, max_rows)
        header_IVH = np.zeros((instances, len(self._variables), feed_tensors.FEED_FIELDS), dtype=np.int64)
        rows_I = np.full(instances, -1, dtype=np.int64)
        status, i, v, end = feed_tensors.find_tensors(
            data, layout, *self._names, self._variable_N, self._kind_V, self._compact_F, self._per_field_F,
            ignore_unknown, header_IVH, rows_I,
        )  # fmt: skip
        if status == tensor_layout.UNKNOWN:
            raise unknown_field(bytes(body[v:end]).decode("utf-8", "backslashreplace"), self.columns)
        if status:
            raise self._error(status, i, v, header_IVH, rows_I)
        rows = int(np.maximum(rows_I, 0).sum())
        _check_rows(rows, max_rows)
        return self._decode(data, layout, rows, header_IVH, rows_I), layout

    def _decode(
        self,
        data: NDArray[np.uint8],
        layout: int,
        rows: int,
        header_IVH: NDArray[np.int64],
        rows_I: NDArray[np.int64],
    ) -> RequestRows:
        shape = len(self.columns), rows
        kind_C = np.full(shape[0], ABSENT, dtype=np.uint8)
        numbers_CB, integers_CB = np.empty(shape, dtype=np.float64), np.empty(shape, dtype=np.int64)
        several_V = np.zeros(len(self._variables), dtype=np.bool_)
        status, i, v = feed_tensors.place_values(
            data, layout, header_IVH, rows_I, self._kind_V, self._columns_K, self._first_V, self._width_V,
            kind_C, numbers_CB, integers_CB, several_V,
        )  # fmt: skip
        if status:
            raise self._error(status, i, v, header_IVH, rows_I)
        multi: dict[str, RawColumn] = {}
        for v in np.flatnonzero(several_V).tolist():
            name, c = self._variables[v], int(self._columns_K[self._first_V[v]])
            if name not in self._multi:
                raise _several(name)
            offsets_B1 = np.empty(rows + 1, dtype=np.int64)
            values_N = np.empty(int(header_IVH[:, v, tensor_layout.COUNT].sum()), dtype=np.int64)
            feed_tensors.collect_values(data, layout, header_IVH, rows_I, v, offsets_B1, values_N)
            bits_N = values_N.view(np.uint64)
            multi[name] = IntegerColumn(bits_N, bits_N == 0, False, offsets_B1)
            if kind_C[c] != FEATURE_ID:
                kind_C[c] = ABSENT
        no_spans_CB = np.zeros(shape, dtype=np.int64)
        return RequestRows(rows, data, kind_C, no_spans_CB, no_spans_CB, numbers_CB, integers_CB, multi)

    def _error(
        self, status: int, i: int, v: int, header_IVH: NDArray[np.int64], rows_I: NDArray[np.int64]
    ) -> RequestRefused:
        if status == tensor_layout.MALFORMED:
            return malformed(f" at instance {i} (counted from 0)")
        if status == feed_tensors.TENSOR_COUNT:
            compact, single = self._compact_F.size, self._per_field_F.size
            other = "" if compact == single else f", or {single} with --per-field"
            return RequestRefused(
                "invalid",
                f"Instance {i} (counted from 0) has {v} tensors; this model takes {compact}{other}, in the order of "
                "the config that `clickline versions client-config` writes.",
            )
        name, header = self._variables[v], header_IVH[i, v].tolist()
        count, rows = header[tensor_layout.COUNT], header[tensor_layout.ROWS]
        if status == feed_tensors.SEVERAL:
            return _several(name)
        width = int(self._width_V[v])
        if status == feed_tensors.NO_NUMBER:
            problem = (
                "is a feasign, but this model reads it as a category and as a number, which a hash cannot give. Use a "
                "protocol that takes the value itself (gRPC or /v1/models/NAME:predict), or leave it out."
            )
        elif status == tensor_layout.DUPLICATE:
            problem = f"is sent twice, by itself or within {VECTOR}. Send each field once."
        elif status == tensor_layout.UNSUPPORTED_TYPE:
            allowed = "a number" if self._kind_V[v] == feed_tensors.NUMBER else "int64 (a feasign)"
            problem = f"has elem_type {header[tensor_layout.TYPE]}; allowed: {allowed}."
        elif status == tensor_layout.RAGGED:
            problem = (
                f"has {rows} rows and the variables before it have {rows_I[i]}; all must have the same number. Send "
                "the shape [rows, values], or a lod."
            )
        elif status == feed_tensors.LOD:
            problem = f"has a lod that does not ascend from 0 to its {count} values."
        elif status == feed_tensors.INFINITE:
            problem = "contains infinity; allowed: a finite number, or NaN for missing."
        elif width:
            problem = f"has {count} values in {rows} rows; allowed: {width} in each."
        else:
            problem = f"has {count} values, which do not match its shape."
        return RequestRefused("invalid", f"{name} {problem}")


def _several(name: str) -> RequestRefused:
    return RequestRefused("invalid", f"{name} has several values in a row; it takes one value per row.")


def _check_rows(rows: int, max_rows: int) -> None:
    if rows < 1:
        raise RequestRefused("invalid", "The request has no rows. Send at least one.")
    if rows > max_rows:
        raise RequestRefused(
            "invalid",
            f"The request has {rows} rows; allowed: up to {max_rows} (serve.max_rows). Send the rest in further "
            "requests.",
        )


def _longs(values: list[int]) -> NDArray[np.int64]:
    return np.array(values, dtype=np.int64)
