"""Tables grow without losing or confusing rows, and stay small."""

from __future__ import annotations

import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clickline.embedding import Sgd, SlotShape, Tables
from clickline.embedding.index import GOLDEN
from clickline.records import SlotIds

MIX = np.uint64(0xD1342543DE82EF95)
UNMIX = np.uint64(pow(int(GOLDEN), -1, 2**64))


def vectors(tables: Tables, ids: np.ndarray) -> np.ndarray:
    inputs, wide = np.empty((ids.size, tables.width), np.float32), np.empty(ids.size, np.float32)
    tables.gather([SlotIds(ids)], inputs, wide, train=False)
    return inputs


def create(tables: Tables, ids: np.ndarray) -> None:
    """Create rows, and train each to its own vector: the low bits of its id."""
    inputs, wide = np.empty((ids.size, tables.width), np.float32), np.zeros(ids.size, np.float32)
    lookup = tables.gather([SlotIds(ids)], inputs, wide, train=True)
    grad = inputs - (ids & np.uint64(0xFFFF)).astype(np.float32)[:, None]
    tables.apply(lookup, grad, wide)


def test_all_rows_survive_many_rehashes() -> None:
    tables = Tables([SlotShape("a", 3)], embedding_optimizer=Sgd(1.0), threads=2)
    ids = np.arange(300_000, dtype=np.uint64) * MIX
    for piece in np.array_split(ids, 60):
        create(tables, piece)
    assert tables.size == ids.size
    want = (ids & np.uint64(0xFFFF)).astype(np.float32)[:, None]
    np.testing.assert_allclose(vectors(tables, ids), np.repeat(want, 3, axis=1), atol=0.02)


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=300), st.integers(1, 7))
def test_any_ids_are_found_again(numbers: list[int], pieces: int) -> None:
    tables = Tables([SlotShape("a", 1)], embedding_optimizer=Sgd(1.0))
    for piece in np.array_split(np.array(numbers, np.uint64), pieces):
        create(tables, np.unique(piece))
    assert tables.size == len(set(numbers))
    ids = np.array(numbers, np.uint64)
    np.testing.assert_allclose(vectors(tables, ids)[:, 0], (ids & np.uint64(0xFFFF)), atol=0.02)


@given(st.lists(st.integers(0, 2000), min_size=1, max_size=400))
def test_ids_that_collide_in_the_index(numbers: list[int]) -> None:
    """All in one shard, with few tags: the worst case for the index."""
    mixed = np.array(numbers, np.uint64) % np.uint64(3) << np.uint64(26) | np.array(numbers, np.uint64)
    ids = (mixed | np.uint64(63 << 58 | 0xFFFFFFFF << 26)) * UNMIX
    tables = Tables([SlotShape("a", 1)], embedding_optimizer=Sgd(1.0))
    for piece in np.array_split(ids, 4):
        create(tables, np.unique(piece))
    assert tables.size == np.unique(ids).size
    np.testing.assert_allclose(vectors(tables, ids)[:, 0], ids & np.uint64(0xFFFF), atol=0.02)


def test_an_initial_vector_depends_only_on_seed_and_id() -> None:
    ids = np.arange(1, 5000, dtype=np.uint64) * MIX
    one, other = (Tables([SlotShape("a", 9)], seed=4, threads=threads) for threads in (1, 3))
    for tables, order in ((one, ids), (other, ids[::-1])):
        for piece in np.array_split(order, 7):
            tables.find([SlotIds(piece)], piece.size, train=True)
    assert vectors(one, ids).tobytes() == vectors(other, ids).tobytes()
    assert np.abs(vectors(one, ids)).max() <= 0.01 / 3
    assert np.abs(vectors(one, ids)).max() > 0.9 * 0.01 / 3
    assert abs(vectors(one, ids).mean()) < 1e-4
    third = Tables([SlotShape("a", 9)], seed=5)
    third.find([SlotIds(ids)], ids.size, train=True)
    assert (vectors(third, ids) != vectors(one, ids)).mean() > 0.99


def test_scoring_does_not_create_ids() -> None:
    tables = Tables([SlotShape("a", 9)])
    assert (vectors(tables, np.arange(10, dtype=np.uint64)) == 0).all()
    assert tables.size == 0


def test_counters_equal_a_direct_count() -> None:
    rng = np.random.default_rng(3)
    tables = Tables([SlotShape("a", 2), SlotShape("b", 2, "mean")], threads=2)
    impressions, clicks, hours = Counter[int](), Counter[int](), dict[int, int]()
    for _ in range(20):
        rows = 300
        offsets = np.concatenate([[0], np.cumsum(rng.integers(0, 6, rows))]).astype(np.int64)
        batch = [
            SlotIds(rng.integers(0, 100, rows).astype(np.uint64)),
            SlotIds(rng.integers(1000, 1050, offsets[-1]).astype(np.uint64), offsets),  # ids twice in one row
        ]
        impressions_B, clicks_B = (
            rng.integers(1, 9, rows).astype(np.uint32),
            rng.integers(0, 3, rows).astype(np.uint32),
        )
        hours_B = rng.integers(-1, 500_000, rows).astype(np.int32)
        tables.find(batch, rows, impressions_B=impressions_B, clicks_B=clicks_B, hours_B=hours_B, train=True)
        for b in range(rows):
            for id in {int(batch[0].ids_N[b]), *map(int, batch[1].ids_N[offsets[b] : offsets[b + 1]])}:
                impressions[id] += int(impressions_B[b])
                clicks[id] += int(clicks_B[b])
                hours[id] = max(hours.get(id, -1), int(hours_B[b]))
    (table,) = tables.parts
    counted = {}
    table.begin_snapshot()
    for shard in range(64):
        _, admitted, _ = table.copy_shard(shard, -1, 1, np.zeros(0, np.uint8), lambda: None)
        for record in admitted.copy().view(table.layout.record):
            counted[int(record["id"])] = (
                int(record["impression"]),
                int(record["click"]),
                int(record["hour"]),
            )
    assert counted == {id: (impressions[id], clicks[id], hours[id]) for id in impressions}


def test_counters_are_exact_where_float32_is_not() -> None:
    tables = Tables([SlotShape("a", 1)])
    for _ in range(3):
        impressions_B = np.full(5, 2**24 + 1, np.uint32)
        tables.find([SlotIds(np.zeros(5, np.uint64))], 5, impressions_B=impressions_B, train=True)
    (table,) = tables.parts
    table.begin_snapshot()
    records = [table.copy_shard(s, -1, 1, np.zeros(0, np.uint8), lambda: None)[1].copy() for s in range(64)]
    (record,) = np.concatenate(records).view(table.layout.record)
    assert record["impression"] == 15 * (2**24 + 1)


def test_memory_stays_below_one_and_a_half_times_the_payload() -> None:
    tables = Tables([SlotShape("a", 9)])
    payload = tables.parts[0].layout.record.itemsize  # id, counters, weights and state
    ids = np.arange(400_000, dtype=np.uint64) * MIX
    for piece in np.array_split(ids, 40):
        tables.find([SlotIds(piece)], piece.size, train=True)
        if tables.size >= 100_000:
            assert tables.memory_bytes < 1.5 * payload * tables.size
    assert tables.memory_bytes / tables.size < 8 * 2**30 / 50e6  # 50 M such ids fit in 8 GiB


@pytest.mark.slow
def test_no_step_waits_for_the_growth_of_the_whole_table() -> None:
    tables = Tables([SlotShape("a", 9)], threads=2)
    steps = []
    for piece in np.array_split(np.arange(6_000_000, dtype=np.uint64) * MIX, 600):
        began = time.process_time()  # CPU time: other processes do not count
        tables.find([SlotIds(piece)], piece.size, train=True)
        steps.append(time.process_time() - began)
    assert tables.size == 6_000_000
    late = sorted(steps[300:])
    assert late[-1] < 30 * late[len(late) // 2]  # copying the payload would take some hundred steps' time
