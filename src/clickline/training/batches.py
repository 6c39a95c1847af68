"""Batches in a reproducible order: pure arithmetic from (dataset, seed, epoch), and the reading that follows it.

An epoch visits the row groups in a random order, several at a time as a window; the rows of a window are shuffled and
split into batches. In time order the row groups come as they are stored, and rows are shuffled only within their hour.
A position names the next batch, so a run can stop anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clickline.artifacts.checkpoint import Position
from clickline.artifacts.dataset import Dataset, concat_rows
from clickline.config.sections import TrainSection
from clickline.models.from_config import batch_size_of
from clickline.records import LabelledRows

WINDOW_ROWS = 1 << 17
_MIN_SHARE = 100  # an hour counts as reached when one in this many rows of a row group is as new,
_MIN_ROWS = 10  # and at least this many rows


def batch_settings(train: TrainSection, rows: int, held_out: float) -> dict[str, Any]:
    """The settings of `Batches` for training on about `rows` rows, with this share of them held out."""
    return {
        "batch_size": batch_size_of(train, rows),
        "seed": train.seed,
        "time_ordered": train.order == "time",
        "held_out": held_out,
        "negative_sampling": train.negative_sampling,
    }


class Batches:
    """The batches of a dataset's training rows, starting at any position."""

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        seed: int,
        *,
        time_ordered: bool = False,
        held_out: float = 0.0,
        negative_sampling: float = 1.0,
    ) -> None:
        self._dataset = dataset
        self._batch_size = batch_size
        self._seed = seed
        self._time_ordered = time_ordered
        self._held_out = held_out  # share of the rows that is never trained on
        self._negative_sampling = negative_sampling  # share of the rows without a click that is trained on

    def windows(self, epoch: int) -> list[list[tuple[int, int]]]:
        """(shard, row group) of each window of an epoch."""
        groups = list(self._dataset.row_groups("train"))
        order = np.arange(len(groups))
        if not self._time_ordered:
            order = np.random.default_rng([self._seed, epoch, 0]).permutation(len(groups))
        windows: list[list[tuple[int, int]]] = []
        rows = WINDOW_ROWS
        for at in order.tolist():
            shard, group, count = groups[at]
            if rows + count > WINDOW_ROWS:
                windows.append([])
                rows = 0
            windows[-1].append((shard, group))
            rows += count
        return windows

    def read_window(self, epoch: int, number: int) -> LabelledRows:
        """The rows of one window, shuffled."""
        return self._window(epoch, number, self.windows(epoch))

    def epoch(self, start: Position) -> Iterator[tuple[LabelledRows, Position]]:
        """The batches from `start` to the end of its epoch, each with the next position."""
        windows = self.windows(start.epoch)
        first = start.batch
        with ThreadPoolExecutor(1, thread_name_prefix="read") as pool:  # reads ahead while the model trains
            next_window = pool.submit(self._window, start.epoch, start.window, windows) if windows else None
            for number in range(start.window, len(windows)):
                assert next_window is not None
                rows = next_window.result()
                if number + 1 < len(windows):
                    next_window = pool.submit(self._window, start.epoch, number + 1, windows)
                for start_row, stop_row, _, after in self.batch_slices(start.epoch, number, rows.rows)[
                    first:
                ]:
                    yield rows.slice(start_row, stop_row), after
                first = 0

    def batch_slices(self, epoch: int, number: int, rows: int) -> list[tuple[int, int, Position, Position]]:
        """The batches of a window with `rows` rows: first row, stop row, position, next position.

        A single remaining row joins the previous batch: batch norm cannot train on one row. A window whose rows were
        all sampled away is one empty batch."""
        count = max(1, -(-(rows - 1) // self._batch_size))
        last = number + 1 == len(self.windows(epoch))
        ends = Position(epoch + 1) if last else Position(epoch, number + 1)
        slices = []
        for batch in range(count):
            final = batch + 1 == count
            stop = rows if final else (batch + 1) * self._batch_size
            after = ends if final else Position(epoch, number, batch + 1)
            slices.append((batch * self._batch_size, stop, Position(epoch, number, batch), after))
        return slices

    def held_out(self) -> Iterator[LabelledRows]:
        """The rows that are never trained on."""
        for shard, group, _ in self._dataset.row_groups("train"):
            rows = self._read(shard, group)
            yield rows.select(self._held_out_mask(shard, group, rows.rows))

    def _read(self, shard: int, group: int) -> LabelledRows:
        rows = self._dataset.read_group("train", shard, group)
        return replace(rows, event_hour_B=_clip_stray_hours(rows.event_hour_B))

    def _held_out_mask(self, shard: int, group: int, rows: int) -> NDArray[np.bool_]:
        mask_B: NDArray[np.bool_] = (
            np.random.default_rng([self._seed, shard, group, 2**32 - 1]).random(rows) < self._held_out
        )
        return mask_B

    def _window(self, epoch: int, number: int, windows: list[list[tuple[int, int]]]) -> LabelledRows:
        parts = []
        for shard, group in windows[number]:
            rows = self._read(shard, group)
            if self._held_out:
                rows = rows.select(~self._held_out_mask(shard, group, rows.rows))
            parts.append(rows)
        rows = concat_rows(parts)
        random = np.random.default_rng([self._seed, epoch, number + 1])
        if self._negative_sampling < 1:
            rows = rows.select((rows.click_B > 0) | (random.random(rows.rows) < self._negative_sampling))
        order_B = random.permutation(rows.rows)
        if self._time_ordered:
            order_B = order_B[np.argsort(rows.event_hour_B[order_B], kind="stable")]
        return rows.take(order_B)


def _clip_stray_hours(hour_B: NDArray[np.int32]) -> NDArray[np.int32]:
    """The hours, clipped to the newest hour that a fair share of the rows has reached: a few rows with a wrong time
    must not make all other ids look idle."""
    known_K = hour_B[hour_B >= 0]
    if not known_K.size:
        return hour_B
    enough = max(known_K.size // _MIN_SHARE, min(_MIN_ROWS, (known_K.size + 1) // 2))
    at = known_K.size - enough
    bounded_B: NDArray[np.int32] = np.minimum(hour_B, np.partition(known_K, at)[at])
    return bounded_B
