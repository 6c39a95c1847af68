"""The units of an epoch: all row groups once, the windows of local training, whichever worker trains them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clickline.artifacts.dataset import Dataset, Shard, Split
from clickline.features import FeatureSpec
from clickline.training.batches import WINDOW_ROWS, Batches
from clickline.training.cluster.work_units import WorkUnit, row_share, units_of


def dataset_of(*shards: tuple[int, ...]) -> Dataset:
    """A manifest alone: nothing of the arithmetic reads a row."""
    made = tuple(Shard(f"train-{n:05}.parquet", sum(rows), rows, 0, "") for n, rows in enumerate(shards))
    features = FeatureSpec((), ())
    return Dataset("", "d", features, {}, {"train": Split(made, {})})


GOLDEN_0 = [
    WorkUnit(0, 0, ((1, 1), (1, 0)), 130_000),
    WorkUnit(0, 1, ((0, 1), (0, 2)), 110_000),
    WorkUnit(0, 2, ((0, 0),), 70_000),
]
GOLDEN_1 = [
    WorkUnit(1, 0, ((0, 2), (0, 0)), 120_000),
    WorkUnit(1, 1, ((1, 1), (1, 0)), 130_000),
    WorkUnit(1, 2, ((0, 1),), 60_000),
]


groups = st.lists(st.lists(st.integers(1, WINDOW_ROWS), max_size=6).map(tuple), min_size=1, max_size=5)


@given(groups, st.integers(0, 2**31 - 1), st.integers(0, 50), st.booleans())
def test_units_are_the_windows_of_local_training_with_every_row_group_once(
    shards: list[tuple[int, ...]], seed: int, epoch: int, time_ordered: bool
) -> None:
    dataset = dataset_of(*shards)
    units = units_of(dataset, seed, epoch, time_ordered=time_ordered)
    local = Batches(dataset, Path(), 256, seed, time_ordered=time_ordered)
    assert [list(unit.row_groups) for unit in units] == local.windows(epoch)
    assert [unit.number for unit in units] == list(range(len(units)))
    every = [(shard, group) for shard, group, _ in dataset.row_groups("train")]
    dealt = [place for unit in units for place in unit.row_groups]
    assert dealt == every if time_ordered else sorted(dealt) == every
    assert sum(unit.rows for unit in units) == dataset.splits["train"].rows
    assert all(unit.rows <= WINDOW_ROWS for unit in units)


def test_order_of_a_seed_and_epoch_is_stable() -> None:
    """Checkpoints name their place in it: another order would learn rows twice and others never."""
    dataset = dataset_of((70_000, 60_000, 50_000), (70_000, 60_000))
    assert units_of(dataset, 5, 0) == GOLDEN_0
    assert units_of(dataset, 5, 1) == GOLDEN_1


@pytest.mark.parametrize(
    ("rows", "of", "expected"),
    [(8, 2, [4, 4]), (7, 3, [2, 2, 3]), (2, 4, [0, 1, 0, 1]), (0, 2, [0, 0]), (5, 1, [5])],
)
def test_batch_is_split_evenly(rows: int, of: int, expected: list[int]) -> None:
    assert [len(range(rows)[row_share(rows, worker, of)]) for worker in range(of)] == expected


@given(st.integers(0, 10_000), st.integers(1, 64))
def test_shares_are_contiguous_cover_the_batch_and_differ_by_one_row(rows: int, of: int) -> None:
    shares = [range(rows)[row_share(rows, worker, of)] for worker in range(of)]
    assert [row for one in shares for row in one] == list(range(rows))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
