"""What the gate of a model without end looks at: rows that were held out, of the last hours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from clickline.evaluation.binary_metrics import Counts, Metrics

_ENOUGH_ROWS = 10_000  # to judge by; an hour of fewer is judged together with those before it
_MOST_HOURS = 24
_SCORES = 1 << 12  # that are told apart: the AUC is known to about 1e-4 of what so few rows can tell


class HeldOut:
    """Held-out rows of the newest hours, each as the model of its hour scored them, and the live version."""

    def __init__(self) -> None:
        self._hours: list[tuple[Counts, Counts | None]] = []

    def begin_hour(self, *, live: bool) -> tuple[Counts, Counts | None]:
        """Where the scores of one more hour are counted: the model's, and the live version's if there is one."""
        if live:  # hours that it did not score would leave nothing to compare
            self._hours = [hour for hour in self._hours if hour[1] is not None]
        self._hours.append((Counts(_SCORES), Counts(_SCORES) if live else None))
        while len(self._hours) > 1 and (
            len(self._hours) > _MOST_HOURS or sum(ours.rows for ours, _ in self._hours[1:]) >= _ENOUGH_ROWS
        ):
            self._hours.pop(0)
        return self._hours[-1]

    def measured(self) -> tuple[Metrics, Metrics | None]:
        """The model, and the live version on the same rows; None if it did not score all of them.

        Rows of hours before were scored by the models of those hours: what is wrong only since, they hide."""
        enough: list[tuple[Counts, Counts | None]] = []
        for hour in reversed(self._hours):
            enough.append(hour)
            if sum(ours.rows for ours, _ in enough) >= _ENOUGH_ROWS:
                break
        ours, live = Counts(_SCORES), Counts(_SCORES)
        for one, other in enough:
            ours.merge(one)
            if other is not None:
                live.merge(other)
        return ours.metrics(), live.metrics() if live.rows == ours.rows else None

    def measured_hour(self) -> tuple[Metrics, Metrics | None]:
        """The same of the newest hour alone: all of it was scored by the model as it is now."""
        ours, live = self._hours[-1]
        return ours.metrics(), None if live is None else live.metrics()

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """The whole state, for a checkpoint."""
        arrays: dict[str, NDArray[Any]] = {}
        for n, hour in enumerate(self._hours):
            for name, counts in zip(("ours", "live"), hour, strict=True):
                if counts is not None:
                    arrays |= {f"{n:02d}/{name}/{key}": array for key, array in counts.to_arrays().items()}
        return arrays

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> HeldOut:
        found: dict[tuple[str, str], dict[str, NDArray[Any]]] = {}
        for name, array in arrays.items():
            hour, who, key = name.split("/")
            found.setdefault((hour, who), {})[key] = array
        held_out = cls()
        for hour in sorted({hour for hour, _ in found}):
            live = found.get((hour, "live"))
            held_out._hours.append(
                (
                    Counts.from_arrays(found[hour, "ours"], _SCORES),
                    None if live is None else Counts.from_arrays(live, _SCORES),
                )
            )
        return held_out
