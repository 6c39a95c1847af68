"""Admission, decay and eviction: which ids get a row, which lose it, and what the slots report."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from clickline.embedding import (
    Admission,
    Eviction,
    SlotReport,
    SlotShape,
    Tables,
    load_snapshot,
    save_snapshot,
)
from clickline.records import SlotIds


def train(tables: Tables, ids: list[int], hour: int = 0, click: int = 0, impressions: int = 1) -> np.ndarray:
    """Train on one row per id; returns the network's inputs."""
    batch = np.array(ids, np.uint64)
    inputs, wide = np.empty((batch.size, tables.width), np.float32), np.empty(batch.size, np.float32)
    lookup = tables.gather(
        [SlotIds(batch)],
        inputs,
        wide,
        impressions_B=np.full(batch.size, impressions, np.uint32),
        clicks_B=np.full(batch.size, click, np.uint32),
        hours_B=np.full(batch.size, hour, np.int32),
        train=True,
    )
    tables.apply(lookup, np.ones_like(inputs), np.ones_like(wide))
    return inputs


def test_candidates_share_the_default_row_until_they_are_admitted() -> None:
    tables = Tables([SlotShape("a", 3)], admission=Admission(min_impressions=3), seed=1)
    first = train(tables, [1, 2])
    assert (first == 0).all() and tables.report() == (SlotReport("a", 0, 2),)
    second = train(tables, [1, 2])
    assert (second != 0).all() and (second[0] == second[1]).all()  # the default row was trained on both
    third = train(tables, [1])
    assert (third[0] != second[0]).all() and tables.report() == (SlotReport("a", 1, 1),)
    assert np.abs(third[0]).max() <= 0.01  # its own first vector, not the default's
    assert tables.size == 2


def test_a_candidate_takes_little_memory() -> None:
    ids = list(range(1, 200_000))
    small, large = (Tables([SlotShape("a", 32)], admission=Admission(n)) for n in (2, 1))
    for tables in (small, large):
        for piece in np.array_split(ids, 50):
            train(tables, piece.tolist())
    assert small.memory_bytes < large.memory_bytes / 3


def test_admission_by_probability_admits_its_share() -> None:
    ids = list(range(1, 20_001))
    tables = Tables([SlotShape("a", 2)], admission=Admission(probability=0.25), seed=9)
    shares = []
    for _ in range(3):
        train(tables, ids)
        shares.append(tables.report()[0].ids / len(ids))
    np.testing.assert_allclose(shares, [0.25, 1 - 0.75**2, 1 - 0.75**3], atol=0.015)
    at_once = Tables([SlotShape("a", 2)], admission=Admission(probability=0.25), seed=9)
    train(at_once, ids, impressions=3)
    assert (
        at_once.report() == tables.report()
    )  # only the impressions count, not how they are split into batches


@pytest.mark.parametrize("admission", [{"min_impressions": 0}, {"probability": 0.0}, {"probability": 1.5}])
def test_invalid_admission_is_rejected(admission: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="admission"):
        Admission(**admission)  # type: ignore[arg-type]


def test_eviction_by_score_and_by_idle_hours() -> None:
    tables = Tables([SlotShape("a", 2)])
    train(tables, [1], hour=100, click=1)  # score 1.0
    train(tables, [2], hour=100)  # score 0.1
    train(tables, [3], hour=10, click=1)
    train(tables, [4], hour=-1, click=1)  # unknown hour
    assert tables.evict(Eviction(threshold=0.5, max_idle_hours=24), now_hour=110) == (SlotReport("a", 2, 0),)
    assert tables.report() == (SlotReport("a", 2, 0),)
    assert tables.evict(Eviction(threshold=0.5, max_idle_hours=24), now_hour=110) == (SlotReport("a", 0, 0),)
    tables.decay(0.4)
    assert tables.evict(Eviction(threshold=0.5)) == (SlotReport("a", 2, 0),)
    assert tables.size == 0


def test_an_id_counted_in_the_future_is_evicted_like_others() -> None:
    """Rows may be dated up to 24 hours after their file, and leave such hours in the tables."""
    tables = Tables([SlotShape("a", 2)])
    train(tables, [1], hour=100_000)
    train(tables, [2], hour=100)
    assert tables.evict(Eviction(max_idle_hours=24), now_hour=110) == (SlotReport("a", 0, 0),)
    train(tables, [2], hour=130)
    assert tables.evict(Eviction(max_idle_hours=24), now_hour=140) == (SlotReport("a", 1, 0),)


def test_an_evicted_id_comes_back_as_new_and_rows_are_reused() -> None:
    tables = Tables([SlotShape("a", 9)], seed=2, threads=2)
    ids = list(range(1, 20_001))
    first = train(tables, ids)
    trained = train(tables, ids)
    assert (first != trained).all()
    memory = tables.memory_bytes
    (evicted,) = tables.evict(Eviction(threshold=1e9))
    assert evicted.ids == len(ids) and tables.size == 0
    assert (train(tables, ids[::-1])[::-1] == first).all()
    assert tables.memory_bytes <= memory + 4 * len(ids) * 2  # the free list, not the rows


def test_evicting_half_of_the_ids_does_not_change_the_others() -> None:
    tables = Tables([SlotShape("a", 9)], seed=2, admission=Admission(2))
    rng = np.random.default_rng(1)
    for step in range(30):
        train(tables, np.unique(rng.integers(1, 5000, 1000)).tolist(), hour=step)
    ids = np.arange(1, 5000, dtype=np.uint64)
    inputs, after, wide = *np.empty((2, ids.size, 9), np.float32), np.empty(ids.size, np.float32)
    tables.gather([SlotIds(ids)], inputs, wide, train=False)
    size, before = tables.size, tables.report()[0]
    (evicted,) = tables.evict(Eviction(max_idle_hours=5), now_hour=30)
    remaining = tables.report()[0]
    assert 0 < evicted.ids + evicted.candidates < size
    assert (remaining.ids, remaining.candidates) == (
        before.ids - evicted.ids,
        before.candidates - evicted.candidates,
    )
    assert tables.size == remaining.ids + remaining.candidates
    tables.gather([SlotIds(ids)], after, wide, train=False)
    default = tables.parts[0].default_records()["vector"][0]
    same = (after == inputs).all(axis=1)
    assert (same | (after == default).all(axis=1)).all()
    assert ((after != default).any(axis=1)).sum() == remaining.ids


def test_evicting_while_a_batch_is_in_flight_fails() -> None:
    tables = Tables([SlotShape("a", 2)])
    tables.find([SlotIds(np.ones(1, np.uint64))], 1, train=True)
    with pytest.raises(RuntimeError, match="between a batch's find and its apply"):
        tables.evict(Eviction(threshold=1.0))


def test_checksums_depend_on_content_only(tmp_path: Path) -> None:
    ids = list(range(1, 3001))
    first, second = (Tables([SlotShape("a", 4)], threads=threads) for threads in (1, 2))
    train(first, ids)
    for piece in (ids[2000:], ids[:2000]):
        train(second, piece)
    assert first.checksums() == second.checksums()
    save_snapshot(first, tmp_path / "tables.bin")
    loaded = Tables([SlotShape("a", 4)])
    load_snapshot(loaded, tmp_path / "tables.bin")
    assert loaded.checksums() == first.checksums()
    train(loaded, [7])  # one row is trained
    assert loaded.checksums() != first.checksums()
    second.evict(Eviction(threshold=1e9))
    assert second.checksums() != first.checksums()
