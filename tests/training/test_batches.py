"""The order of rows: every row once an epoch, the same from any position, another in every epoch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clickline.artifacts.checkpoint import Position
from clickline.artifacts.dataset import Dataset, Shard, Split, concat_rows
from clickline.features import FeatureSpec
from clickline.records import EncodedRows, LabelledRows, SlotIds
from clickline.storage.storage import Storage
from clickline.training import batches as module
from clickline.training.batches import WINDOW_ROWS, Batches


@pytest.fixture
def dataset(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> Dataset:
    monkeypatch.setattr(module, "WINDOW_ROWS", 6000)
    return Dataset.current(Storage(), str(prepared / ".clickline"))


def signature(rows: LabelledRows) -> list[bytes]:
    table = np.stack([slot.ids_N for slot in rows.encoded.slots], axis=1)
    return [line.tobytes() for line in np.ascontiguousarray(table)]


def test_every_row_comes_once_per_epoch_in_a_new_order(dataset):
    made = Batches(dataset, 256, seed=1)
    stored = concat_rows(
        [
            dataset.read(Path(dataset.folder, shard.file), range(len(shard.row_groups)))
            for shard in dataset.splits["train"].shards
        ]
    )
    orders = [[row for rows, _ in made.epoch(Position(epoch)) for row in signature(rows)] for epoch in (0, 1)]
    for order in orders:
        assert sorted(order) == sorted(signature(stored))
    assert orders[0] != orders[1]
    assert orders[0] != signature(stored)


def test_batches_are_the_same_from_any_position(dataset):
    made = Batches(dataset, 500, seed=2)
    whole = list(made.epoch(Position(3)))
    assert whole[-1][1] == Position(4)
    for n in (0, 1, len(whole) // 2, len(whole) - 2):
        rest = list(made.epoch(whole[n][1]))
        assert [after for _, after in rest] == [after for _, after in whole[n + 1 :]]
        for (rows, _), (expected, _) in zip(rest, whole[n + 1 :], strict=True):
            assert signature(rows) == signature(expected)


lists = st.lists(st.lists(st.integers(0, 2**64 - 1), max_size=4), min_size=1, max_size=10)


@given(lists, st.data())
def test_multi_value_rows_are_selected_and_concatenated_correctly(values, data):
    counts = np.array([len(ids) for ids in values])
    flat = np.array([one for ids in values for one in ids], dtype=np.uint64)
    slot = SlotIds(flat, np.concatenate([[0], np.cumsum(counts)]))
    rows = len(values)
    some = np.arange(rows, dtype=np.float32)
    whole = LabelledRows(
        some,
        some,
        some.astype(np.uint32),
        some.astype(np.uint32),
        some.astype(np.int32),
        EncodedRows(rows, some[None], (slot,)),
    )
    order = np.array(data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=12)))
    taken = whole.take(order)
    joined = concat_rows([taken, whole])
    assert joined.label_B.tolist() == [*order.tolist(), *range(rows)]
    (ids,) = joined.encoded.slots
    found = [ids.ids_N[a:b].tolist() for a, b in zip(ids.offsets_B1[:-1], ids.offsets_B1[1:], strict=True)]
    assert found == [values[row] for row in order] + values


@pytest.mark.parametrize(
    ("strays", "rows", "newest"),
    [
        (0, 1000, 50),
        (9, 1000, 50),
        (10, 1000, 900),
        (999, 100_000, 50),
        (1000, 100_000, 900),
        (1, 5, 50),
        (3, 5, 900),
    ],
)
def test_newest_hour_is_one_that_enough_rows_have_reached(strays, rows, newest):
    """1 % of a row group, at least 10 rows; of less than 20 rows, half."""
    hours = np.full(rows, 50, dtype=np.int32)
    hours[:strays] = 900
    hours[-1] = 3
    known = module._clip_stray_hours(hours)
    assert (known.max(), known.min()) == (newest, 3)
    unknown = np.full(10 * rows, -1, dtype=np.int32)  # of other files: they do not count
    assert module._clip_stray_hours(np.concatenate((hours, unknown))).max() == newest
    assert np.array_equal(module._clip_stray_hours(unknown), unknown)


def dataset_of(*shards: tuple[int, ...]) -> Dataset:
    """A manifest alone: nothing of the arithmetic reads a row."""
    made = tuple(Shard(f"train-{n:05}.parquet", sum(rows), rows, 0, "") for n, rows in enumerate(shards))
    features = FeatureSpec((), ())
    return Dataset("", "d", features, {}, {"train": Split(made, {})})


groups = st.lists(st.lists(st.integers(1, WINDOW_ROWS), max_size=6).map(tuple), min_size=1, max_size=5)


@given(groups, st.integers(0, 2**31 - 1), st.integers(0, 50), st.booleans())
def test_windows_of_an_epoch_have_every_row_group_once(
    shards: list[tuple[int, ...]], seed: int, epoch: int, time_ordered: bool
) -> None:
    dataset = dataset_of(*shards)
    windows = Batches(dataset, 256, seed, time_ordered=time_ordered).windows(epoch)
    rows = {(shard, group): count for shard, group, count in dataset.row_groups("train")}
    dealt = [place for window in windows for place in window]
    assert (dealt if time_ordered else sorted(dealt)) == list(rows)
    assert all(sum(rows[place] for place in window) <= WINDOW_ROWS for window in windows)


def test_order_of_a_seed_and_epoch_is_stable() -> None:
    """Checkpoints name their place in it: another order would learn rows twice and others never."""
    dataset = dataset_of((70_000, 60_000, 50_000), (70_000, 60_000))
    windows = Batches(dataset, 256, 5).windows
    assert windows(0) == [[(1, 1), (1, 0)], [(0, 1), (0, 2)], [(0, 0)]]
    assert windows(1) == [[(0, 2), (0, 0)], [(1, 1), (1, 0)], [(0, 1)]]
