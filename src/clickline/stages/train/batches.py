"""Which rows come in which order: pure arithmetic from (dataset, seed, epoch), and the reading that follows it.

An epoch deals the row groups out in a random order, some of them at a time as a window; the rows of a
window are shuffled and cut into batches. A position names the next batch, so a run can stop anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from clickline.artifacts.dataset import Dataset, concat
from clickline.records import LabelledRows

__all__ = ["Batches", "Position"]

_WINDOW_ROWS = 1 << 17


@dataclass(frozen=True)
class Position:
    """The next batch to learn."""

    epoch: int = 0
    window: int = 0
    batch: int = 0


class Batches:
    """The batches of a dataset's training rows, from any position on."""

    def __init__(self, dataset: Dataset, folder: Path, batch_size: int, seed: int) -> None:
        self._dataset = dataset
        self._folder = folder
        self._batch_size = batch_size
        self._seed = seed

    def windows(self, epoch: int) -> list[list[tuple[int, int]]]:
        """(shard, row group) of each window of an epoch."""
        groups = list(self._dataset.row_groups("train"))
        order = np.random.default_rng([self._seed, epoch, 0]).permutation(len(groups))
        windows: list[list[tuple[int, int]]] = []
        rows = _WINDOW_ROWS
        for place in order.tolist():
            shard, group, count = groups[place]
            if rows + count > _WINDOW_ROWS:
                windows.append([])
                rows = 0
            windows[-1].append((shard, group))
            rows += count
        return windows

    def epoch(self, start: Position) -> Iterator[tuple[LabelledRows, Position]]:
        """The batches from `start` to the end of its epoch, each with the position behind it."""
        windows = self.windows(start.epoch)
        first = start.batch
        with ThreadPoolExecutor(1, thread_name_prefix="read") as pool:  # reads ahead while the model learns
            coming = pool.submit(self._window, start.epoch, start.window, windows) if windows else None
            for number in range(start.window, len(windows)):
                assert coming is not None
                rows = coming.result()
                if number + 1 < len(windows):
                    coming = pool.submit(self._window, start.epoch, number + 1, windows)
                last = -(-rows.rows // self._batch_size) - 1
                for batch in range(first, last + 1):
                    places = np.arange(
                        batch * self._batch_size, min((batch + 1) * self._batch_size, rows.rows)
                    )
                    after = Position(start.epoch, number, batch + 1)
                    if batch == last:
                        after = Position(start.epoch, number + 1)
                        if number + 1 == len(windows):
                            after = Position(start.epoch + 1)
                    yield rows.take(places), after
                first = 0

    def _window(self, epoch: int, number: int, windows: list[list[tuple[int, int]]]) -> LabelledRows:
        shards = self._dataset.splits["train"].shards
        parts = [self._dataset.read(self._folder / shards[s].file, [group]) for s, group in windows[number]]
        rows = concat(parts)
        return rows.take(np.random.default_rng([self._seed, epoch, number + 1]).permutation(rows.rows))
