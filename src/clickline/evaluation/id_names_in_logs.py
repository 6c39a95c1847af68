"""What an id of raw logs stands for: the values that get it are looked for in the logs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from clickline.data.input_blocks import Inputs
from clickline.evaluation.id_names import names_of
from clickline.features import Encoder, FeatureSpec
from clickline.features.raw_columns import as_text, split
from clickline.progress import Progress
from clickline.records import RawColumn, SlotIds


def names_in_blocks(
    inputs: Inputs, features: FeatureSpec, ids: Mapping[str, Sequence[int]]
) -> dict[str, dict[int, str]]:
    """Reads the logs again until every id has been met; for frequent ones that is soon."""
    slots = tuple(slot for slot in features.slots if slot.name in ids)
    encoder = Encoder(FeatureSpec((), slots, features.missing))
    named = {slot.name: names_of(slot, ()) for slot in slots}
    for _, block, _ in inputs.blocks(Progress()):
        left = {slot.name: set(ids[slot.name]) - named[slot.name].keys() for slot in slots}
        if not any(left.values()):
            break
        if block.payload is None:
            continue
        raw = inputs.reader.parse(block)
        encoded, _ = encoder.encode(raw)
        for slot, found in zip(slots, encoded.slots, strict=True):
            values = _values_with(left[slot.name], found, raw.columns[slot.column], slot.separator)
            named[slot.name] |= names_of(slot, values)
    return named


def _values_with(ids: set[int], found: SlotIds, column: RawColumn, separator: str | None) -> list[bytes]:
    """All values of the first rows that have these ids."""
    met_K, first_K = np.unique(found.ids_N, return_index=True)
    first_K = first_K[np.isin(met_K, np.array(sorted(ids), dtype=np.uint64))]
    rows_K = first_K if found.offsets_B1 is None else np.searchsorted(found.offsets_B1, first_K, "right") - 1
    if not rows_K.size:
        return []
    text = as_text(column if separator is None else split(column, separator))
    offsets_B1 = np.arange(text.starts_N.size + 1) if text.offsets_B1 is None else text.offsets_B1
    spans = [place for row in rows_K for place in range(offsets_B1[row], offsets_B1[row + 1])]
    return [text.data[text.starts_N[n] : text.ends_N[n]].tobytes() for n in spans]
