"""Batches of random ids, and a step that trains on them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from clickline.embedding import Tables
from clickline.records import SlotIds

Step = Callable[[Tables, list[SlotIds], int], None]


@pytest.fixture
def train() -> Step:
    """Gather and apply one batch; gradients depend only on the seed."""

    def step(tables: Tables, slots: list[SlotIds], seed: int) -> None:
        rows = slots[0].ids_N.size
        rng = np.random.default_rng(seed)
        inputs, wide = np.empty((rows, tables.width), np.float32), np.empty(rows, np.float32)
        impressions = rng.integers(1, 4, rows).astype(np.uint32)
        clicks = rng.integers(0, 2, rows).astype(np.uint32)
        hours = np.full(rows, seed, np.int32)
        lookup = tables.gather(
            slots, inputs, wide, impressions_B=impressions, clicks_B=clicks, hours_B=hours, train=True
        )
        grad = rng.normal(size=inputs.shape).astype(np.float32)
        tables.apply(lookup, grad, rng.normal(size=rows).astype(np.float32))

    return step


def ids_of(rng: np.random.Generator, slots: int, rows: int, vocabulary: int) -> list[SlotIds]:
    """One id per row in each slot; no id in two slots."""
    drawn = rng.integers(0, vocabulary, (slots, rows)).astype(np.uint64)
    return [SlotIds(drawn[s] * np.uint64(1000) + np.uint64(s)) for s in range(slots)]


@pytest.fixture
def draw_ids() -> Callable[[np.random.Generator, int, int, int], list[SlotIds]]:
    return ids_of
