"""Differences between two report documents: metrics with intervals, slices, and settings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from clickline.artifacts.diff import differing_settings


@dataclass(frozen=True)
class MetricSpec:
    """A metric of an evaluation, and which values of it are better."""

    key: str
    name: str
    better: Literal["higher", "lower", "near one", ""]

    def is_better(self, old: float, new: float) -> bool | None:
        """Whether the new value is better; None if they are equal or the metric has no direction."""
        if self.better == "near one":
            old, new = -abs(old - 1), -abs(new - 1)
        elif self.better == "lower":
            old, new = -old, -new
        return None if old == new or not self.better else new > old


METRICS = (
    MetricSpec("auc", "AUC", "higher"),
    MetricSpec("logloss", "log loss", "lower"),
    MetricSpec("normalised_entropy", "normalised entropy", "lower"),
    MetricSpec("calibration", "calibration", "near one"),
    MetricSpec("ece", "ECE", "lower"),
    MetricSpec("brier", "Brier score", "lower"),
    MetricSpec("accuracy", "accuracy", "higher"),
    MetricSpec("mean_prediction", "mean prediction", ""),
    MetricSpec("base_rate", "base rate", ""),
)


@dataclass(frozen=True)
class MetricDifference:
    """The difference of one metric, new minus old."""

    metric: MetricSpec
    old: float
    new: float
    interval: tuple[float, float] | None  # 95 %, if both have one
    better: bool | None

    @property
    def change(self) -> float:
        return self.new - self.old

    @property
    def significant(self) -> bool | None:
        """Whether the difference is more than chance; None if unknown."""
        return None if self.interval is None else self.interval[0] > 0 or self.interval[1] < 0

    def to_json(self) -> dict[str, Any]:
        return {
            "old": self.old,
            "new": self.new,
            "change": self.change,
            "interval": self.interval,
            "better": self.better,
            "clear": self.significant,
        }


def difference(old: Mapping[str, Any], new: Mapping[str, Any], metric: MetricSpec) -> MetricDifference | None:
    """The difference of a metric between two evaluations; None if one of them lacks it.

    The interval combines the two as if they came from different rows (MOVER). On the same rows the errors are mostly
    correlated, which makes the true interval narrower.
    """
    a, b = old.get(metric.key), new.get(metric.key)
    if a is None or b is None:
        return None
    interval = None
    old_interval, new_interval = (one.get(f"{metric.key}_interval") for one in (old, new))
    if old_interval is not None and new_interval is not None:
        (a_low, a_high), (b_low, b_high) = old_interval, new_interval
        change = b - a
        interval = (
            change - math.hypot(b - b_low, a_high - a),
            change + math.hypot(b_high - b, a - a_low),
        )
    return MetricDifference(metric, a, b, interval, metric.is_better(a, b))


@dataclass(frozen=True)
class SliceDifference:
    """The differences of one slice that both reports have."""

    slot: str
    value: str
    impressions: float
    differences: Mapping[str, MetricDifference]  # by the metric's key

    @property
    def significant(self) -> bool:
        return any(one.significant for one in self.differences.values())

    def to_json(self) -> dict[str, Any]:
        differences = {key: one.to_json() for key, one in self.differences.items()}
        return {"slot": self.slot, "value": self.value, "impressions": self.impressions, **differences}


def slice_differences(
    old: Mapping[str, Sequence[Mapping[str, Any]]] | None,
    new: Mapping[str, Sequence[Mapping[str, Any]]] | None,
) -> list[SliceDifference]:
    """The slices that both have, ordered by their effect on the total log loss."""
    differences = []
    for slot, slices in (new or {}).items():
        old_slices = {one["id"]: one for one in (old or {}).get(slot) or ()}
        for one in slices:
            if one["id"] in old_slices:
                pairs = {m.key: difference(old_slices[one["id"]], one, m) for m in METRICS[:4]}
                known = {key: pair for key, pair in pairs.items() if pair is not None}
                differences.append(SliceDifference(slot, _value(one), one.get("impressions") or 0.0, known))

    def weight(one: SliceDifference) -> float:
        loss = one.differences.get("logloss")
        return 0.0 if loss is None else abs(loss.change) * one.impressions

    return sorted(differences, key=lambda one: (-weight(one), one.slot, one.value))


def _value(one: Mapping[str, Any]) -> str:
    return str(one["id"] if one.get("value") is None else one["value"])


def config_differences(old: str | None, new: str | None) -> dict[str, tuple[object, object]] | None:
    """The settings that differ, by dotted path; None if one of the configs is unknown."""
    if old is None or new is None:
        return None
    return differing_settings(old, new)
