"""The values behind ids. Ids are hashes, so candidate values are encoded and compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf

import numpy as np

from clickline.features import Encoder, FeatureSpec, SlotField

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
