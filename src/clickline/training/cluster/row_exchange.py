"""Shares the rows of an epoch in a process group: one worker reads each window and sends every peer its part of each
batch.

Which rank reads which window, and which rows of a batch belong to which rank, is pure arithmetic. A worker reads its
next window when the group is at most one round of windows behind, so each holds about one window's worth of rows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from clickline.artifacts.checkpoint import Position
from clickline.records import LabelledRows
from clickline.training.batches import Batches

Send = Callable[[int, int, int, LabelledRows], None]
"""Sends to a peer: its rank, the window, rows of the whole window, the rows of the peer."""


class LocalBatch(NamedTuple):
    """This worker's rows of one batch."""

    rows: LabelledRows
    position: Position
    after: Position
    total_rows: int  # of the whole batch


def row_share(rows: int, worker: int, of: int) -> slice:
    """The rows of a batch that worker 0 … of - 1 computes with `sync: true`; none if there are fewer rows than
    workers."""
    return slice(rows * worker // of, rows * (worker + 1) // of)


class RowExchange:
    """The windows of one epoch from a position on, for rank `rank` of `size`."""

    def __init__(self, batches: Batches, start: Position, rank: int, size: int, send: Send) -> None:
        self._batches = batches
        self._start = start
        self._rank = rank
        self._size = size
        self._send = send
        self._windows = len(batches.windows(start.epoch))
        self._changed = threading.Condition()
        self._parts: dict[int, tuple[int, LabelledRows | Exception]] = {}
        self._at = start.window
        self._reading: int | None = None  # the window that this worker is reading
        self._error: BaseException | None = None
        self._closed = False
        self._reader = threading.Thread(target=self._read, name="read", daemon=True)
        self._reader.start()

    def local_batches(self) -> Iterator[LocalBatch]:
        """This worker's part of each batch until the end of the epoch."""
        for number in range(self._start.window, self._windows):
            total, rows = self._window(number)
            at = 0
            for start, stop, position, after in self._batches.batch_slices(self._start.epoch, number, total):
                mine = row_share(stop - start, self._rank, self._size)
                count = mine.stop - mine.start
                if position.batch >= self._start.batch or number > self._start.window:
                    yield LocalBatch(rows.slice(at, at + count), position, after, stop - start)
                at += count

    def receive(self, number: int, total: int, rows: LabelledRows | Exception) -> None:
        """Rows of a window that another worker has read, or the error why they did not arrive."""
        with self._changed:
            self._parts[number] = total, rows
            self._changed.notify_all()

    @property
    def blocks_group(self) -> bool:
        """Whether the group waits for a window that this worker is reading."""
        reading = self._reading
        return reading is not None and reading <= self._at

    def close(self) -> None:
        """Stop reading; a call that waits for a window raises ExchangeClosed."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _window(self, number: int) -> tuple[int, LabelledRows]:
        with self._changed:
            self._parts.pop(number - 1, None)
            self._at = number
            self._changed.notify_all()
            self._changed.wait_for(lambda: number in self._parts or self._closed or self._error is not None)
            if self._error is not None:
                raise self._error
            if self._closed:
                raise ExchangeClosed
            total, rows = self._parts[number]
            if isinstance(rows, Exception):
                raise rows
            return total, rows

    def _read(self) -> None:
        first = self._start.window + (self._rank - self._start.window) % self._size
        try:
            for number in range(first, self._windows, self._size):
                with self._changed:
                    while number > self._at + self._size and not self._closed:
                        self._changed.wait()
                    if self._closed:
                        return
                self._reading = number
                rows = self._batches.read_window(self._start.epoch, number)
                places = self._batches.batch_slices(self._start.epoch, number, rows.rows)
                for peer in range(self._size):
                    chosen = [
                        np.arange(start, stop)[row_share(stop - start, peer, self._size)]
                        for start, stop, _, _ in places
                    ]
                    give = self.receive if peer == self._rank else partial(self._send, peer)
                    give(number, rows.rows, rows.take(np.concatenate(chosen)))
                self._reading = None
        except BaseException as error:  # noqa: BLE001  (raised where the window is awaited)
            with self._changed:
                self._error = error
                self._changed.notify_all()


class ExchangeClosed(Exception):
    """The exchange was closed while a window was awaited."""
