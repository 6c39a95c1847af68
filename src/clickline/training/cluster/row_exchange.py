"""How a group shares the rows of an epoch: each window is read by one worker, which deals every batch of it to all.

Which worker reads which window, and which rows of a batch are whose, follows from the numbers alone. A worker reads its
next window while the group is at most one round of windows behind, so each holds about one window's worth of rows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from clickline.records import LabelledRows
from clickline.training.batches import Batches, Position
from clickline.training.cluster.work_units import share

Send = Callable[[int, int, int, LabelledRows], None]
"""To another member of the group: window, rows of the whole window, the member's rows."""


class Portion(NamedTuple):
    """A worker's rows of one batch."""

    rows: LabelledRows
    position: Position
    after: Position
    of: int  # rows of the whole batch


class Exchange:
    """The windows of one epoch from some position on, for member `rank` of `size`."""

    def __init__(self, batches: Batches, start: Position, rank: int, size: int, send: Send) -> None:
        self._batches = batches
        self._start = start
        self._rank = rank
        self._size = size
        self._send = send
        self._windows = len(batches.windows(start.epoch))
        self._here = threading.Condition()
        self._parts: dict[int, tuple[int, LabelledRows | Exception]] = {}
        self._at = start.window
        self._reading: int | None = None  # the window that is read here now
        self._error: BaseException | None = None
        self._closed = False
        self._reader = threading.Thread(target=self._read, name="read", daemon=True)
        self._reader.start()

    def portions(self) -> Iterator[Portion]:
        """This worker's part of each batch, to the end of the epoch."""
        for number in range(self._start.window, self._windows):
            total, rows = self._window(number)
            at = 0
            for start, stop, position, after in self._batches.places(self._start.epoch, number, total):
                mine = share(stop - start, self._rank, self._size)
                count = mine.stop - mine.start
                if position.batch >= self._start.batch or number > self._start.window:
                    yield Portion(rows.part(at, at + count), position, after, stop - start)
                at += count

    def take(self, number: int, total: int, rows: LabelledRows | Exception) -> None:
        """Rows of a window that another worker has read; or why they did not come."""
        with self._here:
            self._parts[number] = total, rows
            self._here.notify_all()

    @property
    def is_waited_for(self) -> bool:
        """Whether the group waits for a window that is read here."""
        reading = self._reading
        return reading is not None and reading <= self._at

    def close(self) -> None:
        """Read no more; whoever waits for a window gives up."""
        with self._here:
            self._closed = True
            self._here.notify_all()

    def _window(self, number: int) -> tuple[int, LabelledRows]:
        with self._here:
            self._parts.pop(number - 1, None)
            self._at = number
            self._here.notify_all()
            self._here.wait_for(lambda: number in self._parts or self._closed or self._error is not None)
            if self._error is not None:
                raise self._error
            if self._closed:
                raise Closed
            total, rows = self._parts[number]
            if isinstance(rows, Exception):
                raise rows
            return total, rows

    def _read(self) -> None:
        first = self._start.window + (self._rank - self._start.window) % self._size
        try:
            for number in range(first, self._windows, self._size):
                with self._here:
                    while number > self._at + self._size and not self._closed:
                        self._here.wait()
                    if self._closed:
                        return
                self._reading = number
                rows = self._batches.read_window(self._start.epoch, number)
                places = self._batches.places(self._start.epoch, number, rows.rows)
                for member in range(self._size):
                    chosen = [
                        np.arange(start, stop)[share(stop - start, member, self._size)]
                        for start, stop, _, _ in places
                    ]
                    give = self.take if member == self._rank else partial(self._send, member)
                    give(number, rows.rows, rows.take(np.concatenate(chosen)))
                self._reading = None
        except BaseException as error:  # noqa: BLE001  (told to who waits for the window)
            with self._here:
                self._error = error
                self._here.notify_all()


class Closed(Exception):
    """The exchange was closed while somebody waited for a window."""
