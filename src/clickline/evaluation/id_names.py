"""The values behind ids. Ids are hashes, so candidate values are encoded and compared.

The candidates are the frequent values that `prepare` stored, or the values in raw logs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf

import numpy as np

from clickline.data.input_blocks import Inputs
from clickline.features import Encoder, FeatureSpec, SlotField
from clickline.features.raw_columns import as_text, split_values
from clickline.progress import Progress
from clickline.records import RawColumn, SlotIds

_MAX_CHARS = 60  # characters of a value that are kept
_POWERS = range(-20, 64)  # of two, with a name for their log2 bucket


def id_names_of(slot: SlotField, values: Sequence[bytes]) -> dict[int, str]:
    """The names of ids: those of the given values, of a missing value, and of the slot's buckets."""
    named: dict[bytes | float, str] = dict(_buckets(slot))
    if slot.source in ("text", "feasign"):
        named |= {value: value[:_MAX_CHARS].decode("utf-8", "backslashreplace") for value in values}
    single = FeatureSpec((), (replace(slot, multi=False, separator=None),))
    encoded, invalid = Encoder(single).encode_values([{slot.column: value} for value in named])
    invalid_rows = {row for group in invalid for row in group.rows_F.tolist()}
    ids = encoded.slots[0].ids_N.tolist()
    names = {
        id: name
        for row, (id, name) in enumerate(zip(ids, named.values(), strict=True))
        if row not in invalid_rows
    }
    return {**names, slot.missing_id: "(missing)"}


def _buckets(slot: SlotField) -> Iterator[tuple[float, str]]:
    """A number from each bucket of a slot, with the bucket's name."""
    if slot.source == "quantiles" and slot.statistics is not None:
        edges = slot.statistics.edges
        if not edges:  # nearly all rows have the same number
            yield 0.0, "any number"
            return
        yield float(np.nextafter(np.float32(edges[0]), np.float32(-inf))), f"below {edges[0]:g}"
        for low, high in zip(edges, (*edges[1:], inf), strict=True):
            yield low, f"{low:g} to {high:g}" if high < inf else f"{low:g} and more"
    elif slot.source == "log2":
        yield 0.0, "0"
        for power in _POWERS:
            low, high = 2.0**power, 2.0 ** (power + 1)
            yield low, f"{low:g} to {high:g}"
            yield -low, f"-{high:g} to -{low:g}"


def find_id_names(
    inputs: Inputs, features: FeatureSpec, ids: Mapping[str, Sequence[int]]
) -> dict[str, dict[int, str]]:
    """The names of ids in raw logs. Reads them until all ids are found, which is soon for frequent ones."""
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
