"""Raw columns as ElasticCTR's protocol wants them: whole numbers, and texts that are to be hashed."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from clickline.errors import DataError
from clickline.features import DenseField, FeatureSpec, SlotField
from clickline.features.encoder_kernels import NUMBER_OK, parse_feasigns
from clickline.features.raw_columns import as_text, joined, numbers, split, without
from clickline.records import IntegerColumn, NumberColumn, RawColumn, TextColumn


def for_elasticctr(
    columns: Mapping[str, RawColumn], features: FeatureSpec, rows: int
) -> dict[str, RawColumn]:
    """The same values. A feasign is a hash: a column of texts that are read as numbers, too, cannot be sent."""
    categories = {slot.column: slot for slot in features.slots if slot.source in ("text", "feasign")}
    texts = {slot.column for slot in features.slots if slot.source == "text"}
    for field in features.fields:
        if field.column in texts and (isinstance(field, DenseField) or field.source in ("log2", "quantiles")):
            raise DataError(
                f"the model reads {field.column} as a category and as a number; ElasticCTR's protocol sends a hash of "
                "the category, which does not tell the number. Use another --protocol."
            )
    found: dict[str, RawColumn] = {}
    for name, column in columns.items():
        slot = categories.get(name)
        if slot is None:
            values_B, _ = numbers(column, name, rows, features.missing)
            found[name] = NumberColumn(values_B.astype(np.float64))
        else:
            found[name] = _category(column, slot, features.missing)
    return found


def _category(column: RawColumn, slot: SlotField, missing: tuple[str, ...]) -> RawColumn:
    if slot.separator is not None:
        column = split(column, slot.separator)
    column = without(column, missing)
    if slot.source == "text":
        return as_text(column)
    if not isinstance(column, TextColumn):
        return column
    values_N = np.empty(column.starts_N.size, dtype=np.uint64)
    status_N = np.empty(values_N.size, dtype=np.uint8)
    parse_feasigns(column.data, column.starts_N, column.ends_N, *joined(()), values_N, status_N)
    return IntegerColumn(values_N, status_N != NUMBER_OK, False, column.offsets_B1)
