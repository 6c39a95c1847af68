"""What there is to learn in an epoch, as ordered units of work: pure arithmetic, the same for any number of workers."""

from __future__ import annotations

from dataclasses import dataclass

from clickline.artifacts.dataset import Dataset
from clickline.training.batches import windows


@dataclass(frozen=True)
class Unit:
    """A window of `Batches`: what one worker leases with `sync: false`."""

    epoch: int
    number: int
    row_groups: tuple[tuple[int, int], ...]  # (shard, row group) of the dataset
    rows: int  # as stored; those held out or sampled away are among them


def units_of(dataset: Dataset, seed: int, epoch: int, *, in_time: bool = False) -> list[Unit]:
    """The units of an epoch, in the order in which local training learns them."""
    rows = {(shard, group): count for shard, group, count in dataset.row_groups("train")}
    return [
        Unit(epoch, number, tuple(window), sum(rows[place] for place in window))
        for number, window in enumerate(windows(dataset, seed, epoch, in_time=in_time))
    ]


def share(rows: int, worker: int, of: int) -> slice:
    """Which of a batch's rows worker 0 … of - 1 takes with `sync: true`; none, where there are fewer than workers."""
    return slice(rows * worker // of, rows * (worker + 1) // of)
