"""The encoder: raw fields in, ids and floats out. Both prepare and serve use it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clickline.features import encoder_kernels
from clickline.features.feature_spec import DenseField, FeatureSpec, SlotField
from clickline.features.raw_columns import (
    ValidationErrors,
    as_text,
    concatenate_texts,
    drop_missing,
    empty_column,
    format_value,
    raw_column,
    single_valued,
    split_values,
    to_float32,
)
from clickline.records import (
    EncodedRows,
    IntegerColumn,
    NumberColumn,
    RawColumn,
    RawRows,
    SlotIds,
    TextColumn,
)


class Encoder:
    """Encodes raw rows by a `FeatureSpec`. Stateless: safe to share between threads."""

    def __init__(self, spec: FeatureSpec) -> None:
        self.spec = spec

    def encode(self, raw: RawRows) -> tuple[EncodedRows, list[ValidationErrors]]:
        """Ids and floats of `raw`, and the errors of values that could not be encoded."""
        errors: list[ValidationErrors] = []
        floats: dict[str, NDArray[np.float32]] = {}  # a column can feed both a dense field and a bucket

        def number(field: DenseField | SlotField) -> NDArray[np.float32]:
            if field.column not in floats:
                column = raw.columns.get(field.column, empty_column(raw.rows))
                floats[field.column], bad = to_float32(column, field.name, raw.rows, self.spec.missing)
                errors.extend(bad)
            return floats[field.column]

        dense_DB = np.empty((len(self.spec.dense), raw.rows), dtype=np.float32)
        for d, field in enumerate(self.spec.dense):
            encoder_kernels.transform(field.kernel, np.array(field.scaling), number(field), dense_DB[d])
        slots = []
        for slot in self.spec.slots:
            if slot.source == "log2" or slot.source == "quantiles":
                ids_B = np.empty(raw.rows, dtype=np.uint64)
                encoder_kernels.bucket(slot.source == "log2", slot.edges_E, slot.salt, number(slot), ids_B)
                slots.append(SlotIds(ids_B))
            else:
                ids, bad = self._categories(
                    slot, raw.columns.get(slot.column, empty_column(raw.rows)), raw.rows
                )
                slots.append(ids)
                errors.extend(bad)
        return EncodedRows(raw.rows, dense_DB, tuple(slots)), errors

    def encode_values(self, rows: Sequence[Mapping[str, Any]]) -> tuple[EncodedRows, list[ValidationErrors]]:
        """Encode rows given as dicts of Python values: text, numbers, None, or lists of these."""
        columns = {name: raw_column([row.get(name) for row in rows], name) for name in self.spec.columns}
        return self.encode(RawRows(len(rows), columns, np.arange(1, len(rows) + 1, dtype=np.int64)))

    def _categories(
        self, slot: SlotField, column: RawColumn, rows: int
    ) -> tuple[SlotIds, list[ValidationErrors]]:
        if slot.separator is not None:
            column = split_values(column, slot.separator)
        errors: list[ValidationErrors] = []
        if not slot.multi:
            column, errors = single_valued(column, slot.name, "; set multi: true")
        offsets_B1 = column.offsets_B1
        ids_N, bad = _ids(slot, column, self.spec.missing)
        errors += bad
        if not slot.multi:
            return SlotIds(ids_N), errors
        if offsets_B1 is None:
            return SlotIds(ids_N, np.arange(rows + 1, dtype=np.int64)), errors
        pooled_N = np.empty(ids_N.size + rows, dtype=np.uint64)
        pooled_offsets_B1 = np.empty(rows + 1, dtype=np.int64)
        count = encoder_kernels.drop_missing_values(
            ids_N, offsets_B1, np.uint64(slot.missing_id), pooled_N, pooled_offsets_B1
        )
        return SlotIds(pooled_N[:count].copy(), pooled_offsets_B1), errors


def _ids(
    slot: SlotField, column: RawColumn, missing: tuple[str, ...]
) -> tuple[NDArray[np.uint64], list[ValidationErrors]]:
    """Ids of all values of a column, and the errors of values that have none."""
    salt = slot.salt
    if not isinstance(column, TextColumn):
        column = drop_missing(column, missing)
    if isinstance(column, NumberColumn):
        column = _number_text(column)
    if isinstance(column, IntegerColumn):
        ids_N = np.empty(column.values_N.size, dtype=np.uint64)
        if slot.source == "feasign":  # 64 bits; sources without unsigned integers write some as negative
            encoder_kernels.mix_feature_ids(
                column.values_N, column.missing_N | (column.values_N == 0), salt, ids_N
            )
        else:
            encoder_kernels.hash_integers(column.values_N, column.missing_N, column.signed, salt, ids_N)
        return ids_N, []
    ids_N = np.empty(column.starts_N.size, dtype=np.uint64)
    if slot.source == "text":
        encoder_kernels.hash_spans(
            column.data, column.starts_N, column.ends_N, *concatenate_texts(missing), salt, ids_N
        )
        return ids_N, []
    values_N = np.empty(ids_N.size, dtype=np.uint64)
    status_N = np.empty(ids_N.size, dtype=np.uint8)
    errors: list[ValidationErrors] = []
    if encoder_kernels.parse_feature_ids(
        column.data, column.starts_N, column.ends_N, *concatenate_texts(missing), values_N, status_N
    ):
        bad_F = np.flatnonzero(status_N == encoder_kernels.NUMBER_BAD)
        rows_N = np.arange(ids_N.size)
        if column.offsets_B1 is not None:
            rows_N = np.repeat(np.arange(column.offsets_B1.size - 1), np.diff(column.offsets_B1))
        text, first_bad = column, {int(rows_N[n]): int(n) for n in bad_F[::-1]}
        errors = [
            ValidationErrors(
                slot.name,
                "not a number",
                np.unique(rows_N[bad_F]),
                lambda row: f"{slot.name} is {format_value(text, first_bad[row])}, a 64-bit integer expected",
            )
        ]
    encoder_kernels.mix_feature_ids(values_N, status_N != encoder_kernels.NUMBER_OK, salt, ids_N)
    return ids_N, errors


def _number_text(column: NumberColumn) -> TextColumn | IntegerColumn:
    """Floats used as categories, as canonical text: 7.0 is "7", since nullable integers arrive as floats."""
    values_N = column.values_N
    missing_N = np.isnan(values_N)
    if bool(np.all(missing_N | ((np.trunc(values_N) == values_N) & (np.abs(values_N) < 2.0**63)))):
        integers_N = np.where(missing_N, 0.0, values_N).astype(np.int64)
        return IntegerColumn(integers_N.view(np.uint64), missing_N, True, column.offsets_B1)
    return as_text(column)
