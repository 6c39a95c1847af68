"""The encoder for requests: all fields in one kernel call, with the same ids and floats as `Encoder`.

Prepare encodes millions of rows one column at a time, and the cost of a call does not matter. A request has a few
rows in many columns, and the cost of calls dominates. So the fields are laid out once in arrays that one kernel
processes; columns with unusual values or with several values per row go through `Encoder`.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from clickline.features import encoder_kernels
from clickline.features.encoder import Encoder
from clickline.features.feature_spec import FeatureSpec
from clickline.features.raw_columns import (
    ValidationErrors,
    canonical_text,
    concatenate_texts,
    exact_integers,
    exact_number,
    missing_numbers,
)
from clickline.features.request_kernels import CategoryPlan, MissingValues, NumberPlan, encode_fields
from clickline.records import (
    FEATURE_ID,
    FLOAT32,
    INTEGER,
    PRECISION,
    TEXT,
    EncodedRows,
    IntegerColumn,
    NumberColumn,
    RawColumn,
    RawRows,
    RequestRows,
    SlotIds,
    TextColumn,
)


@dataclass(frozen=True)
class EncodedRequest:
    """Rows in the form that the model takes, with the ids of all slots in one array."""

    rows: int
    dense_DB: NDArray[np.float32]
    ids_SB: NDArray[np.uint64]
    multi: Mapping[int, SlotIds]  # slots with several ids per row; their row in ids_SB is unused

    def by_slot(self) -> EncodedRows:
        """The same with separate ids per slot."""
        slots = tuple(
            self.multi.get(s) or SlotIds(ids_B)  # iterating over an array is faster than indexing it
            for s, ids_B in enumerate(self.ids_SB)
        )
        return EncodedRows(self.rows, self.dense_DB, slots)


class RequestEncoder:
    """Encodes requests by a `FeatureSpec`: all fields, or those that come from a subset of the columns. Safe to share
    between threads."""

    def __init__(self, spec: FeatureSpec, columns: frozenset[str] | None = None) -> None:
        """Fails now, not at the first request, if statistics are missing."""
        place = {name: c for c, name in enumerate(spec.columns)}
        columns = frozenset(place) if columns is None else columns
        self.dense = tuple(d for d, field in enumerate(spec.dense) if field.column in columns)
        self.slots = tuple(s for s, slot in enumerate(spec.slots) if slot.column in columns)
        part = self._spec = spec.subset(columns)
        # The same for values that arrive as feature ids, the hashes of their text.
        self._hashed = replace(
            part,
            slots=tuple(replace(s, source="feasign") if s.source == "text" else s for s in part.slots),
            missing=(),
        )
        self._place = {name: c for name, c in place.items() if name in columns}
        self._missing = _missing(spec.missing)
        self._slow_C = np.zeros(len(place), dtype=np.bool_)
        for slot in part.slots:
            self._slow_C[place[slot.column]] |= slot.multi or slot.separator is not None

        def longs(values: list[int]) -> NDArray[np.int64]:
            return np.array(values, dtype=np.int64)

        def salts(places: list[int]) -> NDArray[np.uint64]:
            return np.array([part.slots[s].salt for s in places], dtype=np.uint64)

        named = [s for s, slot in enumerate(part.slots) if slot.source in ("text", "feasign")]
        self._categories = CategoryPlan(
            longs([place[part.slots[s].column] for s in named]),
            longs(named),
            salts(named),
            np.array([part.slots[s].source == "feasign" for s in named], dtype=np.bool_),
        )
        # A 32- or 16-bit fraction differs from the double of a text such as 0.1: as a category it must be printed.
        self._printed_C = np.zeros(len(place), dtype=np.bool_)
        if bool((np.trunc(self._missing.floats_M) != self._missing.floats_M).any()):
            self._printed_C[self._categories.columns_S] = True
        buckets = [s for s in range(len(part.slots)) if s not in set(named)]
        numbers = dict.fromkeys([f.column for f in part.dense] + [part.slots[s].column for s in buckets])
        order = {name: p for p, name in enumerate(numbers)}
        edges = [np.zeros(0, dtype=np.float32), *(part.slots[s].edges_E for s in buckets)]
        self._numbers = NumberPlan(
            longs([place[name] for name in numbers]),
            longs([order[field.column] for field in part.dense]),
            longs([field.kernel for field in part.dense]),
            np.array([field.scaling for field in part.dense], dtype=np.float64).reshape(-1, 4),
            longs([order[part.slots[s].column] for s in buckets]),
            np.array([part.slots[s].source == "log2" for s in buckets], dtype=np.bool_),
            longs(buckets),
            salts(buckets),
            np.concatenate(edges),
            np.cumsum([edges_E.size for edges_E in edges], dtype=np.int64),
        )

    def encode_arrays(self, rows: RequestRows) -> tuple[EncodedRequest, list[ValidationErrors]]:
        """Ids and floats of this subset's fields, and the errors of values that could not be encoded."""
        slow_C = self._slow_C.copy()
        for name in rows.multi:
            if name in self._place:
                slow_C[self._place[name]] = True
        slow_C |= self._printed_C & (rows.kind_C >= FLOAT32)
        dense_DB = np.empty((len(self.dense), rows.rows), dtype=np.float32)
        ids_SB = np.empty((len(self.slots), rows.rows), dtype=np.uint64)
        encode_fields(
            rows.data,
            rows.kind_C,
            rows.starts_CB,
            rows.ends_CB,
            rows.numbers_CB,
            rows.integers_CB,
            self._missing,
            self._categories,
            self._numbers,
            dense_DB,
            ids_SB,
            slow_C,
        )
        multi: dict[int, SlotIds] = {}
        errors: list[ValidationErrors] = []
        if slow_C.any():
            slow = {name for name, c in self._place.items() if slow_C[c]}
            hashed = {name for name in slow if rows.kind_C[self._place[name]] == FEATURE_ID}
            for columns, spec in ((slow - hashed, self._spec), (hashed, self._hashed)):
                if columns:
                    errors += self._encode_fallback(rows, spec, columns, dense_DB, ids_SB, multi)
        return EncodedRequest(rows.rows, dense_DB, ids_SB, multi), errors

    def encode(self, rows: RequestRows) -> tuple[EncodedRows, list[ValidationErrors]]:
        """The same with separate ids per slot."""
        encoded, errors = self.encode_arrays(rows)
        return encoded.by_slot(), errors

    def _encode_fallback(
        self,
        rows: RequestRows,
        spec: FeatureSpec,
        columns: AbstractSet[str],
        dense_DB: NDArray[np.float32],
        ids_SB: NDArray[np.uint64],
        multi: dict[int, SlotIds],
    ) -> list[ValidationErrors]:
        """Encode these columns with the ordinary `Encoder`, and store the results."""
        dense = [d for d, field in enumerate(spec.dense) if field.column in columns]
        slots = [s for s, slot in enumerate(spec.slots) if slot.column in columns]
        found = {name: _raw_column(rows, name, self._place[name]) for name in columns}
        raw = {name: column for name, column in found.items() if column is not None}
        raw_rows = RawRows(rows.rows, raw, np.arange(1, rows.rows + 1))
        encoded, errors = Encoder(spec.subset(columns)).encode(raw_rows)
        dense_DB[dense] = encoded.dense_DB
        for s, ids in zip(slots, encoded.slots, strict=True):
            if ids.offsets_B1 is None:
                ids_SB[s] = ids.ids_N
            else:
                multi[s] = ids
        return errors


def _raw_column(rows: RequestRows, name: str, c: int) -> RawColumn | None:
    if name in rows.multi:
        return rows.multi[name]
    kind = rows.kind_C[c]
    if kind == TEXT:
        return TextColumn(rows.data, rows.starts_CB[c], rows.ends_CB[c])
    if kind in PRECISION:
        return NumberColumn(rows.numbers_CB[c], precision=PRECISION[int(kind)])
    if kind == FEATURE_ID:
        bits_B = rows.integers_CB[c].view(np.uint64)
        return IntegerColumn(bits_B, bits_B == 0, signed=False)
    if kind == INTEGER:
        none_missing_B = np.zeros(rows.rows, dtype=np.bool_)
        return IntegerColumn(rows.integers_CB[c].view(np.uint64), none_missing_B, signed=True)
    return None


def _missing(texts: tuple[str, ...]) -> MissingValues:
    """The values that mean missing: the texts, the integers and floats with such a text, the numbers they denote."""
    encoded = [canonical_text(text) for text in texts]
    floats = [number for number in map(exact_number, encoded) if number is not None]
    return MissingValues(
        *concatenate_texts(texts),
        np.array(exact_integers(encoded, signed=True), dtype=np.int64),
        np.array(floats, dtype=np.float64),
        np.array([_feature_id(text) for text in encoded], dtype=np.uint64),
        missing_numbers(texts)[1],
    )


def _feature_id(text: bytes) -> int:
    return int(encoder_kernels.xxh64(np.frombuffer(text, dtype=np.uint8), 0, len(text)))
