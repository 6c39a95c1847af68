"""What an id stands for. Ids are hashes, so one looks for values that get them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf

import numpy as np

from clickline.features import Encoder, FeatureSpec, SlotField

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


def _buckets(slot: SlotField) -> Iterator[tuple[float, str]]:
    """A number in each bucket of a slot, with the bucket's name."""
    if slot.source == "quantiles" and slot.statistics is not None:
        edges = slot.statistics.edges
        if not edges:  # nearly every row has the same number
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
