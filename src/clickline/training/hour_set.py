"""The set of hours that a model was trained on."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence


class HourSet:
    """A set of mostly consecutive hours, stored as ranges, so that years of them fit in a line of text."""

    def __init__(self, hours: Iterable[int] = ()) -> None:
        self._ranges: list[tuple[int, int]] = []  # [first, stop), ascending, with gaps in between
        for hour in hours:
            self.add(hour)

    def __contains__(self, hour: int) -> bool:
        at = bisect_right(self._ranges, (hour, 2**63)) - 1
        return at >= 0 and hour < self._ranges[at][1]

    def __len__(self) -> int:
        return sum(stop - first for first, stop in self._ranges)

    @property
    def last(self) -> int | None:
        return self._ranges[-1][1] - 1 if self._ranges else None

    def add(self, hour: int) -> None:
        if hour in self:
            return
        ranges = sorted([*self._ranges, (hour, hour + 1)])
        merged: list[tuple[int, int]] = []
        for first, stop in ranges:
            if merged and merged[-1][1] == first:
                merged[-1] = (merged[-1][0], stop)
            else:
                merged.append((first, stop))
        self._ranges = merged

    def to_json(self) -> list[list[int]]:
        return [list(hours) for hours in self._ranges]

    @classmethod
    def from_json(cls, ranges: Sequence[Sequence[int]]) -> HourSet:
        hour_set = cls()
        hour_set._ranges = [(int(first), int(stop)) for first, stop in ranges]
        return hour_set
