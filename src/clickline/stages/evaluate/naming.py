"""What an id stands for. Ids are hashes, so one looks for values that get them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf

import numpy as np

from clickline.features import Encoder, FeatureSpec, SlotField
from clickline.features.columns import as_text, split
from clickline.intake.inputs import Inputs
from clickline.progress import Progress
from clickline.records import RawColumn, SlotIds

__all__ = ["names_in_blocks", "names_of"]

_SHOWN = 60  # characters of a value
_POWERS = range(-20, 64)  # of two, that a log2 bucket is named for


def names_of(slot: SlotField, values: Sequence[bytes]) -> dict[int, str]:
    """The ids of these values, of "no value", and of a slot's buckets."""
    named: dict[bytes | float, str] = dict(_buckets(slot))
    if slot.source in ("text", "feasign"):
        named |= {value: value[:_SHOWN].decode("utf-8", "backslashreplace") for value in values}
    alone = FeatureSpec((), (replace(slot, multi=False, separator=None),))
    encoded, faults = Encoder(alone).encode_values([{slot.column: value} for value in named])
    bad = {row for group in faults for row in group.rows_F.tolist()}
    ids = encoded.slots[0].ids_N.tolist()
    found = {
        id: name for row, (id, name) in enumerate(zip(ids, named.values(), strict=True)) if row not in bad
    }
    return {**found, slot.missing_id: "(missing)"}


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
    text = as_text(column)
    if separator is not None:
        text = as_text(split(text, separator))
    offsets_B1 = np.arange(text.starts_N.size + 1) if text.offsets_B1 is None else text.offsets_B1
    spans = [place for row in rows_K for place in range(offsets_B1[row], offsets_B1[row + 1])]
    return [text.data[text.starts_N[n] : text.ends_N[n]].tobytes() for n in spans]


def _buckets(slot: SlotField) -> Iterator[tuple[float, str]]:
    """A number in each bucket of a slot, with the bucket's name."""
    if slot.source == "quantiles" and slot.statistics is not None:
        edges = slot.statistics.edges
        if edges:
            yield float(np.nextafter(np.float32(edges[0]), np.float32(-inf))), f"below {edges[0]:g}"
        for low, high in zip(edges, (*edges[1:], inf), strict=True):
            yield low, f"{low:g} to {high:g}" if high < inf else f"{low:g} and more"
    elif slot.source == "log2":
        yield 0.0, "0"
        for power in _POWERS:
            low, high = 2.0**power, 2.0 ** (power + 1)
            yield low, f"{low:g} to {high:g}"
            yield -low, f"-{high:g} to -{low:g}"
