"""The one encoder once more, for requests: all fields in one kernel call, the same ids and floats.

Prepare reads millions of rows a column at a time, and what a call costs does not matter. A request has a few
rows in many columns, and then it is all that matters. So the fields are laid out once in arrays that one
kernel walks; a column that holds something unusual goes through `Encoder`, as do columns with several
values a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from clickline.features import encoder_kernels
from clickline.features.encoder import Encoder
from clickline.features.feature_spec import MOST_SPREADS, DenseField, FeatureSpec
from clickline.features.raw_columns import Faults, canonical_text, joined, missing_numbers, number_of
from clickline.features.request_kernels import (
    LOG1P,
    LOG2,
    QUANTILES,
    SCALE,
    SCALE_LOG1P,
    CategoryPlan,
    Missing,
    NumberPlan,
    encode_fields,
)
from clickline.records import (
    FEASIGN,
    INTEGER,
    PRECISION,
    SINGLE,
    TEXT,
    EncodedRows,
    IntegerColumn,
    NumberColumn,
    RawColumn,
    RawRows,
    RequestRows,
    SlotIds,
    TextColumn,
    category_text,
)

_PARTS = 64  # that are remembered
_KERNELS = {"log1p": LOG1P, "robust": SCALE_LOG1P}  # the others only scale


@dataclass(frozen=True)
class EncodedRequest:
    """Rows as the model sees them, the ids of all slots in one array."""

    rows: int
    dense_DB: NDArray[np.float32]
    ids_SB: NDArray[np.uint64]
    several: Mapping[
        int, SlotIds
    ]  # slots that may have several ids a row; their line in ids_SB means nothing

    def slotwise(self) -> EncodedRows:
        """The same, slot by slot."""
        slots = tuple(
            self.several.get(s) or SlotIds(ids_B)  # the lines of an array are made faster all at once
            for s, ids_B in enumerate(self.ids_SB)
        )
        return EncodedRows(self.rows, self.dense_DB, slots)


class PartEncoder:
    """Encodes those fields that are made from some of the columns. Safe to share between threads."""

    def __init__(self, spec: FeatureSpec, columns: frozenset[str]) -> None:
        place = {name: c for c, name in enumerate(spec.columns)}
        self.dense = tuple(d for d, field in enumerate(spec.dense) if field.column in columns)
        self.slots = tuple(s for s, slot in enumerate(spec.slots) if slot.column in columns)
        part = replace(
            spec,
            dense=tuple(spec.dense[d] for d in self.dense),
            slots=tuple(spec.slots[s] for s in self.slots),
        )
        nothing = RawRows(0, {}, np.zeros(0, dtype=np.int64))
        Encoder(part).encode(nothing)  # says now, not at the first request, if statistics are absent
        self._spec = part
        # The same where values came as their hashes: what text would have become is there already.
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
        # A fraction of 32 or 16 bits is not the double that a text such as 0.1 is: in a category it has to be printed.
        self._printed_C = np.zeros(len(place), dtype=np.bool_)
        if bool((np.trunc(self._missing.floats_M) != self._missing.floats_M).any()):
            self._printed_C[self._categories.columns_S] = True
        buckets = [s for s in range(len(part.slots)) if s not in set(named)]
        numbers = dict.fromkeys([f.column for f in part.dense] + [part.slots[s].column for s in buckets])
        order = {name: p for p, name in enumerate(numbers)}
        known = [part.slots[s].statistics for s in buckets]
        edges = [() if found is None else found.edges for found in known]
        log2 = [part.slots[s].source == "log2" for s in buckets]
        self._numbers = NumberPlan(
            longs([place[name] for name in numbers]),
            longs([order[field.column] for field in part.dense]),
            longs([_KERNELS.get(f.transform, SCALE) for f in part.dense]),
            np.array([_scaling(field) for field in part.dense], dtype=np.float64).reshape(-1, 4),
            longs([order[part.slots[s].column] for s in buckets]),
            longs([LOG2 if two else QUANTILES for two in log2]),
            longs(buckets),
            salts(buckets),
            np.array([edge for some in edges for edge in some], dtype=np.float32),
            longs([0, *np.cumsum([len(some) for some in edges]).tolist()]),
        )

    def arrays(self, rows: RequestRows) -> tuple[EncodedRequest, list[Faults]]:
        """Ids and floats of this part's fields, and the values that could not be encoded."""
        slow_C = self._slow_C.copy()
        for name in rows.several:
            if name in self._place:
                slow_C[self._place[name]] = True
        slow_C |= self._printed_C & (rows.kind_C >= SINGLE)
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
        several: dict[int, SlotIds] = {}
        faults: list[Faults] = []
        if slow_C.any():
            slow = {name for name, c in self._place.items() if slow_C[c]}
            hashed = {name for name in slow if rows.kind_C[self._place[name]] == FEASIGN}
            for columns, spec in ((slow - hashed, self._spec), (hashed, self._hashed)):
                if columns:
                    faults += self._encode_slowly(rows, spec, columns, dense_DB, ids_SB, several)
        return EncodedRequest(rows.rows, dense_DB, ids_SB, several), faults

    def encode(self, rows: RequestRows) -> tuple[EncodedRows, list[Faults]]:
        """The same, slot by slot."""
        encoded, faults = self.arrays(rows)
        return encoded.slotwise(), faults

    def _encode_slowly(
        self,
        rows: RequestRows,
        whole: FeatureSpec,
        columns: AbstractSet[str],
        dense_DB: NDArray[np.float32],
        ids_SB: NDArray[np.uint64],
        several: dict[int, SlotIds],
    ) -> list[Faults]:
        """What the ordinary encoder makes of these columns, put in its places."""
        dense = [d for d, field in enumerate(whole.dense) if field.column in columns]
        slots = [s for s, slot in enumerate(whole.slots) if slot.column in columns]
        spec = replace(
            whole,
            dense=tuple(whole.dense[d] for d in dense),
            slots=tuple(whole.slots[s] for s in slots),
        )
        found = {name: _raw_column(rows, name, self._place[name]) for name in columns}
        raw = {name: column for name, column in found.items() if column is not None}
        encoded, faults = Encoder(spec).encode(RawRows(rows.rows, raw, np.arange(1, rows.rows + 1)))
        dense_DB[dense] = encoded.dense_DB
        for s, ids in zip(slots, encoded.slots, strict=True):
            if ids.offsets_B1 is None:
                ids_SB[s] = ids.ids_N
            else:
                several[s] = ids
        return faults


class RequestEncoder:
    """Encodes requests as one `FeatureSpec` says. Safe to share between threads."""

    def __init__(self, spec: FeatureSpec) -> None:
        self.spec = spec
        self.whole = PartEncoder(spec, frozenset(spec.columns))
        self._parts: dict[frozenset[str], PartEncoder] = {}

    def part(self, columns: frozenset[str]) -> PartEncoder:
        """The encoder for the fields made from these columns."""
        part = self._parts.get(columns)
        if part is None:
            part = PartEncoder(self.spec, columns)
            if len(self._parts) >= _PARTS:  # clients have a few shapes of requests; whoever has more pays
                self._parts = {}
            self._parts[columns] = part
        return part

    def encode(
        self, rows: RequestRows, columns: frozenset[str] | None = None
    ) -> tuple[EncodedRows, list[Faults]]:
        """Ids and floats of `rows`, and the values that could not be encoded."""
        return (self.whole if columns is None else self.part(columns)).encode(rows)


def _raw_column(rows: RequestRows, name: str, c: int) -> RawColumn | None:
    if name in rows.several:
        return rows.several[name]
    kind = rows.kind_C[c]
    if kind == TEXT:
        return TextColumn(rows.data, rows.starts_CB[c], rows.ends_CB[c])
    if kind in PRECISION:
        return NumberColumn(rows.numbers_CB[c], precision=PRECISION[int(kind)])
    if kind == FEASIGN:
        bits_B = rows.integers_CB[c].view(np.uint64)
        return IntegerColumn(bits_B, bits_B == 0, signed=False)
    if kind == INTEGER:
        there_B = np.zeros(rows.rows, dtype=np.bool_)
        return IntegerColumn(rows.integers_CB[c].view(np.uint64), there_B, signed=True)
    return None


def _scaling(field: DenseField) -> tuple[float, float, float, float]:
    """Shift, factor and bounds of `kernels.scale`."""
    known = field.statistics
    if known is not None and field.transform == "minmax":
        span = known.high - known.low
        return known.low, 1.0 / span if span > 0 else 0.0, 0.0, 1.0
    if known is not None and field.transform == "zscore":
        return known.mean, 1.0 / known.deviation if known.deviation > 0 else 0.0, -np.inf, np.inf
    if known is not None and field.transform == "robust":
        factor = 1.0 / known.spread if known.spread > 0 else 0.0
        return known.median, factor, -MOST_SPREADS, MOST_SPREADS
    return 0.0, 1.0, -np.inf, np.inf


def _missing(texts: tuple[str, ...]) -> Missing:
    """The texts that stand for no value, the integers and floats whose text is one of them, the numbers they are."""
    encoded = [canonical_text(text) for text in texts]
    floats = [number for number in map(number_of, encoded) if number is not None]
    integers: list[int] = []
    for text in encoded:
        with suppress(ValueError):
            whole = int(text)
            if category_text(whole) == text and -(2**63) <= whole < 2**63:
                integers.append(whole)
    return Missing(
        *joined(texts),
        np.array(integers, dtype=np.int64),
        np.array(floats, dtype=np.float64),
        np.array([_feasign(text) for text in encoded], dtype=np.uint64),
        missing_numbers(texts)[1],
    )


def _feasign(text: bytes) -> int:
    return int(encoder_kernels.xxh64(np.frombuffer(text, dtype=np.uint8), 0, len(text)))
