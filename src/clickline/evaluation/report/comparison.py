"""What differs between two documents: measures with intervals, slices, settings. Figures in, figures out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from clickline.artifacts.diff import differing_settings


@dataclass(frozen=True)
class Measure:
    """One figure of an evaluation and what makes it better."""

    key: str
    name: str
    better: Literal["higher", "lower", "near one", ""]

    def gains(self, old: float, new: float) -> bool | None:
        """Whether the new figure is the better one; None: the same, or neither is."""
        if self.better == "near one":
            old, new = -abs(old - 1), -abs(new - 1)
        elif self.better == "lower":
            old, new = -old, -new
        return None if old == new or not self.better else new > old


MEASURES = (
    Measure("auc", "AUC", "higher"),
    Measure("logloss", "log loss", "lower"),
    Measure("normalised_entropy", "normalised entropy", "lower"),
    Measure("calibration", "calibration", "near one"),
    Measure("ece", "ECE", "lower"),
    Measure("brier", "Brier score", "lower"),
    Measure("accuracy", "accuracy", "higher"),
    Measure("mean_prediction", "mean prediction", ""),
    Measure("base_rate", "base rate", ""),
)


@dataclass(frozen=True)
class Difference:
    """New less old, of one measure."""

    measure: Measure
    old: float
    new: float
    interval: tuple[float, float] | None  # 95 %, where both have one
    better: bool | None

    @property
    def change(self) -> float:
        return self.new - self.old

    @property
    def clear(self) -> bool | None:
        """Whether it is more than chance; None: not known."""
        return None if self.interval is None else self.interval[0] > 0 or self.interval[1] < 0

    def to_json(self) -> dict[str, Any]:
        return {
            "old": self.old,
            "new": self.new,
            "change": self.change,
            "interval": self.interval,
            "better": self.better,
            "clear": self.clear,
        }


def difference(old: Mapping[str, Any], new: Mapping[str, Any], measure: Measure) -> Difference | None:
    """None where one of them was not measured.

    The interval joins those of the two as if they came of different rows (MOVER). On the same rows errors mostly go
    together, which makes the true one narrower.
    """
    a, b = old.get(measure.key), new.get(measure.key)
    if a is None or b is None:
        return None
    interval = None
    before, after = (one.get(f"{measure.key}_interval") for one in (old, new))
    if before is not None and after is not None:
        (a_low, a_high), (b_low, b_high) = before, after
        change = b - a
        interval = (
            change - math.hypot(b - b_low, a_high - a),
            change + math.hypot(b_high - b, a - a_low),
        )
    return Difference(measure, a, b, interval, measure.gains(a, b))


@dataclass(frozen=True)
class MovedSlice:
    """One value of a slot that both have measured."""

    slot: str
    value: str
    shows: float
    differences: Mapping[str, Difference]  # by the measure's key

    @property
    def clear(self) -> bool:
        return any(one.clear for one in self.differences.values())

    def to_json(self) -> dict[str, Any]:
        found = {key: one.to_json() for key, one in self.differences.items()}
        return {"slot": self.slot, "value": self.value, "shows": self.shows, **found}


def moved_slices(
    old: Mapping[str, Sequence[Mapping[str, Any]]] | None,
    new: Mapping[str, Sequence[Mapping[str, Any]]] | None,
) -> list[MovedSlice]:
    """The slices of both, first what has changed the loss of all rows most."""
    found = []
    for slot, slices in (new or {}).items():
        before = {one["id"]: one for one in (old or {}).get(slot) or ()}
        for one in slices:
            if one["id"] in before:
                pairs = {m.key: difference(before[one["id"]], one, m) for m in MEASURES[:4]}
                known = {key: pair for key, pair in pairs.items() if pair is not None}
                found.append(MovedSlice(slot, _value(one), one.get("shows") or 0.0, known))

    def weight(one: MovedSlice) -> float:
        loss = one.differences.get("logloss")
        return 0.0 if loss is None else abs(loss.change) * one.shows

    return sorted(found, key=lambda one: (-weight(one), one.slot, one.value))


def _value(one: Mapping[str, Any]) -> str:
    return str(one["id"] if one.get("value") is None else one["value"])


def config_differences(old: str | None, new: str | None) -> dict[str, tuple[object, object]] | None:
    """The settings that differ, by dotted path; None where one of the two is not known."""
    if old is None or new is None:
        return None
    return differing_settings(old, new)
