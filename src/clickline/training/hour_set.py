"""Which hours a model has learned."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence


class HourSet:
    """A set of hours that are mostly in a row: kept as runs, so that years of them stay a line of text."""

    def __init__(self, hours: Iterable[int] = ()) -> None:
        self._runs: list[tuple[int, int]] = []  # first and behind the last, rising, with gaps between
        for hour in hours:
            self.add(hour)

    def __contains__(self, hour: int) -> bool:
        at = bisect_right(self._runs, (hour, 2**63)) - 1
        return at >= 0 and hour < self._runs[at][1]

    def __len__(self) -> int:
        return sum(stop - first for first, stop in self._runs)

    @property
    def first(self) -> int | None:
        return self._runs[0][0] if self._runs else None

    @property
    def last(self) -> int | None:
        return self._runs[-1][1] - 1 if self._runs else None

    def add(self, hour: int) -> None:
        if hour in self:
            return
        runs = sorted([*self._runs, (hour, hour + 1)])
        joined: list[tuple[int, int]] = []
        for first, stop in runs:
            if joined and joined[-1][1] == first:
                joined[-1] = (joined[-1][0], stop)
            else:
                joined.append((first, stop))
        self._runs = joined

    def to_json(self) -> list[list[int]]:
        return [list(run) for run in self._runs]

    @classmethod
    def from_json(cls, runs: Sequence[Sequence[int]]) -> HourSet:
        found = cls()
        found._runs = [(int(first), int(stop)) for first, stop in runs]
        return found
