"""Finds the values behind ids by searching the raw logs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from clickline.data.input_blocks import Inputs
from clickline.evaluation.id_names import id_names_of
from clickline.features import Encoder, FeatureSpec
from clickline.features.raw_columns import as_text, split_values
from clickline.progress import Progress
from clickline.records import RawColumn, SlotIds


def find_id_names(
    inputs: Inputs, features: FeatureSpec, ids: Mapping[str, Sequence[int]]
) -> dict[str, dict[int, str]]:
    """Read the logs again until all ids are found, which is soon for frequent ones."""
    slots = tuple(slot for slot in features.slots if slot.name in ids)
    encoder = Encoder(FeatureSpec((), slots, features.missing))
    named = {slot.name: id_names_of(slot, ()) for slot in slots}
    for _, block, _ in inputs.blocks(Progress()):
        wanted = {slot.name: set(ids[slot.name]) - named[slot.name].keys() for slot in slots}
        if not any(wanted.values()):
            break
        if block.payload is None:
            continue
        raw = inputs.reader.parse(block)
        encoded, _ = encoder.encode(raw)
        for slot, encoded_ids in zip(slots, encoded.slots, strict=True):
            values = _values_with(wanted[slot.name], encoded_ids, raw.columns[slot.column], slot.separator)
            named[slot.name] |= id_names_of(slot, values)
    return named


def _values_with(
    ids: set[int], encoded_ids: SlotIds, column: RawColumn, separator: str | None
) -> list[bytes]:
    """All values of the first rows with these ids."""
    unique_K, first_K = np.unique(encoded_ids.ids_N, return_index=True)
    first_K = first_K[np.isin(unique_K, np.array(sorted(ids), dtype=np.uint64))]
    rows_K = (
        first_K
        if encoded_ids.offsets_B1 is None
        else np.searchsorted(encoded_ids.offsets_B1, first_K, "right") - 1
    )
    if not rows_K.size:
        return []
    text = as_text(column if separator is None else split_values(column, separator))
    offsets_B1 = np.arange(text.starts_N.size + 1) if text.offsets_B1 is None else text.offsets_B1
    spans = [place for row in rows_K for place in range(offsets_B1[row], offsets_B1[row + 1])]
    return [text.data[text.starts_N[n] : text.ends_N[n]].tobytes() for n in spans]
