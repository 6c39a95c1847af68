"""Converts raw columns for ElasticCTR's protocol: to integers, and to texts that are hashed."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from clickline.errors import DataError
from clickline.features import DenseField, FeatureSpec, SlotField
from clickline.features.encoder_kernels import NUMBER_OK, parse_feature_ids
from clickline.features.raw_columns import as_text, concatenate_texts, drop_missing, split_values, to_float32
from clickline.records import IntegerColumn, NumberColumn, RawColumn, TextColumn


def to_elasticctr_columns(
    columns: Mapping[str, RawColumn], features: FeatureSpec, rows: int
) -> dict[str, RawColumn]:
    """The same values, if they can be sent: a feasign is a hash, so a text column cannot also be read as numbers."""
    categories = {slot.column: slot for slot in features.slots if slot.source in ("text", "feasign")}
    texts = {slot.column for slot in features.slots if slot.source == "text"}
    for field in features.fields:
        if field.column in texts and (isinstance(field, DenseField) or field.source in ("log2", "quantiles")):
            raise DataError(
                f"the model uses {field.column} as a category and as a number; ElasticCTR's protocol only sends a hash "
                "of the category. Use another --protocol."
            )
    converted: dict[str, RawColumn] = {}
    for name, column in columns.items():
        slot = categories.get(name)
        if slot is None:
            values_B, _ = to_float32(column, name, rows, features.missing)
            converted[name] = NumberColumn(values_B.astype(np.float64))
        else:
            converted[name] = _category(column, slot, features.missing)
    return converted


def _category(column: RawColumn, slot: SlotField, missing: tuple[str, ...]) -> RawColumn:
    if slot.separator is not None:
        column = split_values(column, slot.separator)
    column = drop_missing(column, missing)
    if slot.source == "text":
        return as_text(column)
    if not isinstance(column, TextColumn):
        return column
    values_N = np.empty(column.starts_N.size, dtype=np.uint64)
    status_N = np.empty(values_N.size, dtype=np.uint8)
    parse_feature_ids(column.data, column.starts_N, column.ends_N, *concatenate_texts(()), values_N, status_N)
    return IntegerColumn(values_N, status_N != NUMBER_OK, False, column.offsets_B1)
