"""The ordered work units of an epoch: pure arithmetic, the same for any number of workers."""

from __future__ import annotations

from dataclasses import dataclass

from clickline.artifacts.dataset import Dataset
from clickline.training.batches import windows


@dataclass(frozen=True)
class WorkUnit:
    """A window of `Batches`: what one worker leases with `sync: false`."""

    epoch: int
    number: int
    row_groups: tuple[tuple[int, int], ...]  # (shard, row group) of the dataset
    rows: int  # as stored, including rows that are held out or sampled away


def units_of(dataset: Dataset, seed: int, epoch: int, *, time_ordered: bool = False) -> list[WorkUnit]:
    """The units of an epoch, in the order of local training."""
    rows = {(shard, group): count for shard, group, count in dataset.row_groups("train")}
    return [
        WorkUnit(epoch, number, tuple(window), sum(rows[place] for place in window))
        for number, window in enumerate(windows(dataset, seed, epoch, time_ordered=time_ordered))
    ]


def row_share(rows: int, worker: int, of: int) -> slice:
    """The rows of a batch that worker 0 … of - 1 computes with `sync: true`; none if there are fewer rows than
    workers."""
    return slice(rows * worker // of, rows * (worker + 1) // of)
