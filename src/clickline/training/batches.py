"""Which rows come in which order: pure arithmetic from (dataset, seed, epoch), and the reading that follows it.

An epoch deals the row groups out in a random order, some of them at a time as a window; the rows of a
window are shuffled and cut into batches. In the order of time the row groups come as they are stored, and
rows are shuffled only within their hour. A position names the next batch, so a run can stop anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from clickline.artifacts.dataset import Dataset, concat
from clickline.records import LabelledRows

WINDOW_ROWS = 1 << 17
_NEWEST_SHARE = 100  # an hour counts as reached when one in so many rows of a row group is as new,
_NEWEST_ROWS = 10  # and so many rows


@dataclass(frozen=True)
class Position:
    """The next batch to learn."""

    epoch: int = 0
    window: int = 0
    batch: int = 0


def windows(dataset: Dataset, seed: int, epoch: int, *, in_time: bool = False) -> list[list[tuple[int, int]]]:
    """(shard, row group) of each window of an epoch."""
    groups = list(dataset.row_groups("train"))
    order = np.arange(len(groups))
    if not in_time:
        order = np.random.default_rng([seed, epoch, 0]).permutation(len(groups))
    found: list[list[tuple[int, int]]] = []
    rows = WINDOW_ROWS
    for place in order.tolist():
        shard, group, count = groups[place]
        if rows + count > WINDOW_ROWS:
            found.append([])
            rows = 0
        found[-1].append((shard, group))
        rows += count
    return found


class Batches:
    """The batches of a dataset's training rows, from any position on."""

    def __init__(
        self,
        dataset: Dataset,
        folder: Path,
        batch_size: int,
        seed: int,
        *,
        in_time: bool = False,
        held_out: float = 0.0,
        negative_sampling: float = 1.0,
    ) -> None:
        self._dataset = dataset
        self._folder = folder
        self._batch_size = batch_size
        self._seed = seed
        self._in_time = in_time
        self._held_out = held_out  # share of the rows that is never learned
        self._negative_sampling = negative_sampling  # share of the rows without a click that is learned

    def windows(self, epoch: int) -> list[list[tuple[int, int]]]:
        """(shard, row group) of each window of an epoch."""
        return windows(self._dataset, self._seed, epoch, in_time=self._in_time)

    def read_window(self, epoch: int, number: int) -> LabelledRows:
        """The rows of one window, shuffled."""
        return self._window(epoch, number, self.windows(epoch))

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
                for start_row, stop_row, _, after in self.places(start.epoch, number, rows.rows)[first:]:
                    yield rows.part(start_row, stop_row), after
                first = 0

    def places(self, epoch: int, number: int, rows: int) -> list[tuple[int, int, Position, Position]]:
        """The batches of a window that has so many rows: first row, row behind the last, position, position behind.

        A row left alone joins the batch before: batch norm has nothing to say of one row. A window that has lost all
        of its rows is one empty batch."""
        count = max(1, -(-(rows - 1) // self._batch_size))
        last = number + 1 == len(self.windows(epoch))
        ends = Position(epoch + 1) if last else Position(epoch, number + 1)
        places = []
        for batch in range(count):
            final = batch + 1 == count
            stop = rows if final else (batch + 1) * self._batch_size
            after = ends if final else Position(epoch, number, batch + 1)
            places.append((batch * self._batch_size, stop, Position(epoch, number, batch), after))
        return places

    def held_out(self) -> Iterator[LabelledRows]:
        """The rows that are never learned."""
        for shard, group, _ in self._dataset.row_groups("train"):
            rows = self._read(shard, group)
            yield rows.select(self._kept_back(shard, group, rows.rows))

    def _read(self, shard: int, group: int) -> LabelledRows:
        file = self._dataset.splits["train"].shards[shard].file
        rows = self._dataset.read(self._folder / file, [group])
        return replace(rows, event_hour_B=_without_strays(rows.event_hour_B))

    def _kept_back(self, shard: int, group: int, rows: int) -> NDArray[np.bool_]:
        marked_B: NDArray[np.bool_] = (
            np.random.default_rng([self._seed, shard, group, 2**32 - 1]).random(rows) < self._held_out
        )
        return marked_B

    def _window(self, epoch: int, number: int, windows: list[list[tuple[int, int]]]) -> LabelledRows:
        parts = []
        for shard, group in windows[number]:
            rows = self._read(shard, group)
            if self._held_out:
                rows = rows.select(~self._kept_back(shard, group, rows.rows))
            parts.append(rows)
        rows = concat(parts)
        random = np.random.default_rng([self._seed, epoch, number + 1])
        if self._negative_sampling < 1:
            rows = rows.select((rows.click_B > 0) | (random.random(rows.rows) < self._negative_sampling))
        order_B = random.permutation(rows.rows)
        if self._in_time:
            order_B = order_B[np.argsort(rows.event_hour_B[order_B], kind="stable")]
        return rows.take(order_B)


def _without_strays(hour_B: NDArray[np.int32]) -> NDArray[np.int32]:
    """The hours, none newer than the newest hour that a fair share of the rows has reached: a few rows with a wrong
    time must not make all other ids look unseen for long."""
    known_K = hour_B[hour_B >= 0]
    if not known_K.size:
        return hour_B
    enough = max(known_K.size // _NEWEST_SHARE, min(_NEWEST_ROWS, (known_K.size + 1) // 2))
    place = known_K.size - enough
    bounded_B: NDArray[np.int32] = np.minimum(hour_B, np.partition(known_K, place)[place])
    return bounded_B
