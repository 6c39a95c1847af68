"""Admission, decay and eviction: who gets a row, who loses it, and what the slots report."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from clickline.embedding import Admission, Eviction, SlotReport, SlotShape, Tables, load, save
from clickline.records import SlotIds


def show(tables: Tables, ids: list[int], hour: int = 0, click: int = 0, shows: int = 1) -> np.ndarray:
    """One training row for each id; the vectors the network sees."""
    batch = np.array(ids, np.uint64)
    inputs, wide = np.empty((batch.size, tables.width), np.float32), np.empty(batch.size, np.float32)
    found = tables.gather(
        [SlotIds(batch)],
        inputs,
        wide,
        shows_B=np.full(batch.size, shows, np.uint32),
        clicks_B=np.full(batch.size, click, np.uint32),
        hours_B=np.full(batch.size, hour, np.int32),
        train=True,
    )
    tables.apply(found, np.ones_like(inputs), np.ones_like(wide))
    return inputs


def test_candidates_share_the_default_row_until_they_are_admitted() -> None:
    tables = Tables([SlotShape("a", 3)], admission=Admission(shows=3), seed=1)
    first = show(tables, [1, 2])
    assert (first == 0).all() and tables.report() == (SlotReport("a", 0, 2),)
    second = show(tables, [1, 2])
    assert (second != 0).all() and (second[0] == second[1]).all()  # the default row has learned from both
    third = show(tables, [1])
    assert (third[0] != second[0]).all() and tables.report() == (SlotReport("a", 1, 1),)
    assert np.abs(third[0]).max() <= 0.01  # its own first vector, not the default's
    assert tables.size == 2


def test_a_candidate_is_small() -> None:
    ids = list(range(1, 200_000))
    small, large = (Tables([SlotShape("a", 32)], admission=Admission(n)) for n in (2, 1))
    for tables in (small, large):
        for piece in np.array_split(ids, 50):
            show(tables, piece.tolist())
    assert small.memory_bytes < large.memory_bytes / 3


def test_admission_by_probability_lets_in_its_share() -> None:
    ids = list(range(1, 20_001))
    tables = Tables([SlotShape("a", 2)], admission=Admission(probability=0.25), seed=9)
    shares = []
    for _ in range(3):
        show(tables, ids)
        shares.append(tables.report()[0].ids / len(ids))
    np.testing.assert_allclose(shares, [0.25, 1 - 0.75**2, 1 - 0.75**3], atol=0.015)
    at_once = Tables([SlotShape("a", 2)], admission=Admission(probability=0.25), seed=9)
    show(at_once, ids, shows=3)
    assert at_once.report() == tables.report()  # only the shows count, not how they were dealt to batches


@pytest.mark.parametrize("admission", [{"shows": 0}, {"probability": 0.0}, {"probability": 1.5}])
def test_impossible_admission_is_refused(admission: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="admission"):
        Admission(**admission)  # type: ignore[arg-type]


def test_eviction_by_worth_and_by_hours_unseen() -> None:
    tables = Tables([SlotShape("a", 2)])
    show(tables, [1], hour=100, click=1)  # worth 1.0
    show(tables, [2], hour=100)  # worth 0.1
    show(tables, [3], hour=10, click=1)
    show(tables, [4], hour=-1, click=1)  # nobody knows when
    assert tables.evict(Eviction(threshold=0.5, hours_unseen=24), now_hour=110) == (SlotReport("a", 2, 0),)
    assert tables.report() == (SlotReport("a", 2, 0),)
    assert tables.evict(Eviction(threshold=0.5, hours_unseen=24), now_hour=110) == (SlotReport("a", 0, 0),)
    tables.decay(0.4)
    assert tables.evict(Eviction(threshold=0.5)) == (SlotReport("a", 2, 0),)
    assert tables.size == 0


def test_id_that_was_counted_in_the_future_goes_like_others() -> None:
    """Rows may be dated up to 24 hours after their file: they leave such hours in the tables of a history."""
    tables = Tables([SlotShape("a", 2)])
    show(tables, [1], hour=100_000)
    show(tables, [2], hour=100)
    assert tables.evict(Eviction(hours_unseen=24), now_hour=110) == (SlotReport("a", 0, 0),)
    show(tables, [2], hour=130)
    assert tables.evict(Eviction(hours_unseen=24), now_hour=140) == (SlotReport("a", 1, 0),)


def test_an_evicted_id_comes_back_as_new_and_rows_are_used_again() -> None:
    tables = Tables([SlotShape("a", 9)], seed=2, threads=2)
    ids = list(range(1, 20_001))
    first = show(tables, ids)
    learned = show(tables, ids)
    assert (first != learned).all()
    memory = tables.memory_bytes
    (gone,) = tables.evict(Eviction(threshold=1e9))
    assert gone.ids == len(ids) and tables.size == 0
    assert (show(tables, ids[::-1])[::-1] == first).all()
    assert tables.memory_bytes <= memory + 4 * len(ids) * 2  # the list of free rows, not the rows


def test_half_of_the_ids_go_and_the_others_stay_as_they_were() -> None:
    tables = Tables([SlotShape("a", 9)], seed=2, admission=Admission(2))
    rng = np.random.default_rng(1)
    for step in range(30):
        show(tables, np.unique(rng.integers(1, 5000, 1000)).tolist(), hour=step)
    ids = np.arange(1, 5000, dtype=np.uint64)
    inputs, after, wide = *np.empty((2, ids.size, 9), np.float32), np.empty(ids.size, np.float32)
    tables.gather([SlotIds(ids)], inputs, wide, train=False)
    size, before = tables.size, tables.report()[0]
    (gone,) = tables.evict(Eviction(hours_unseen=5), now_hour=30)
    left = tables.report()[0]
    assert 0 < gone.ids + gone.candidates < size
    assert (left.ids, left.candidates) == (before.ids - gone.ids, before.candidates - gone.candidates)
    assert tables.size == left.ids + left.candidates
    tables.gather([SlotIds(ids)], after, wide, train=False)
    default = tables.parts[0].default_records()["vector"][0]
    same = (after == inputs).all(axis=1)
    assert (same | (after == default).all(axis=1)).all()
    assert ((after != default).any(axis=1)).sum() == left.ids


def test_evicting_under_a_batch_is_refused() -> None:
    tables = Tables([SlotShape("a", 2)])
    tables.find([SlotIds(np.ones(1, np.uint64))], 1, train=True)
    with pytest.raises(RuntimeError, match="between a batch's find and its apply"):
        tables.evict(Eviction(threshold=1.0))


def test_checksums_tell_content_and_not_how_it_came_about(tmp_path: Path) -> None:
    ids = list(range(1, 3001))
    one, other = (Tables([SlotShape("a", 4)], threads=threads) for threads in (1, 2))
    show(one, ids)
    for piece in (ids[2000:], ids[:2000]):
        show(other, piece)
    assert one.checksums() == other.checksums()
    save(one, tmp_path / "tables.bin")
    loaded = Tables([SlotShape("a", 4)])
    load(loaded, tmp_path / "tables.bin")
    assert loaded.checksums() == one.checksums()
    show(loaded, [7])  # one row learns
    assert loaded.checksums() != one.checksums()
    other.evict(Eviction(threshold=1e9))
    assert other.checksums() != one.checksums()
