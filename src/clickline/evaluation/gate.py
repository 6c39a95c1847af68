"""Whether a model may be published: its metrics against thresholds, with the reasons as messages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from clickline.config.sections import GateSection
from clickline.evaluation.binary_metrics import Metrics

MIN_AUC = 0.51
"""Below this AUC a model ranks no better than chance, however precise the measurement is."""

MIN_SPREAD = 1e-3
"""Predictions count as constant if their standard deviation is below this share of their mean."""

MAX_AUC_ERROR = 1e-4


@dataclass(frozen=True)
class Thresholds:
    """What a model must reach; None: not checked."""

    auc: float | None = None  # minimum
    logloss: float | None = None  # maximum
    accuracy: float | None = None  # minimum
    calibration: float | None = None  # maximum distance of predicted / actual clicks from 1
    vs_current: float | None = None  # minimum AUC gain over the current version; negative: maximum loss

    @classmethod
    def of(cls, gate: GateSection) -> Thresholds:
        return cls(**gate.model_dump(exclude={"extra_epochs"}))


@dataclass(frozen=True)
class Verdict:
    """The gate's decision: `reasons` for a refusal, and `warnings` in either case."""

    passed: bool
    reasons: tuple[str, ...]
    warnings: tuple[str, ...] = ()

    def warned(self, warning: str | None) -> Verdict:
        """A copy with one more warning, if there is one."""
        return self if warning is None else replace(self, warnings=(*self.warnings, warning))

    def refused(self, reasons: Iterable[str]) -> Verdict:
        """A copy with more reasons for refusal, if there are any."""
        together = (*self.reasons, *reasons)
        return replace(self, passed=not together, reasons=together)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def check_gate(
    metrics: Metrics | None, thresholds: Thresholds, current: Metrics | None = None, why_no_current: str = ""
) -> Verdict:
    """Check the metrics of a model; None: there were no rows to evaluate it on. `current`: those of the live version on
    the same rows; else `why_no_current` is the reason.

    A model that predicts about the same for every row is always refused, unless accuracy is the only threshold: then a
    warning explains how little accuracy means.
    """
    set_names = {name for name, value in asdict(thresholds).items() if value is not None}
    if metrics is None and set_names:
        missing = "the gate has thresholds, but without data.eval there are no rows to evaluate on."
        return Verdict(False, (missing,))
    if metrics is None:
        return Verdict(True, (), ("not evaluated: data.eval is not set.",))
    reasons = [
        *_missed_thresholds(metrics, thresholds),
        *_worse_than_current(metrics, thresholds.vs_current, current),
    ]
    warnings = []
    if set_names == {"accuracy"}:
        warnings.append(_accuracy_warning(metrics, thresholds.accuracy))
    elif metrics.auc is not None or not reasons:  # what cannot be measured is reported once
        reasons += _constant(metrics)
    if thresholds.vs_current is not None and current is None:
        why = why_no_current or "there is no current version to compare with"
        warnings.append(f"gate.vs_current was not checked: {why}.")
    if not set_names:
        warnings.append("the gate has no threshold: set gate.auc, gate.logloss or gate.calibration.")
    if metrics.auc_error is not None and not metrics.auc_error <= MAX_AUC_ERROR:
        warnings.append(
            f"AUC is only known to {metrics.auc_error:.2g}; usually it is known to {MAX_AUC_ERROR:g}."
        )
    return Verdict(not reasons, tuple(reasons), tuple(warnings))


def clearly_worse(metrics: Metrics, thresholds: Thresholds, current: Metrics | None = None) -> Iterator[str]:
    """Reasons to refuse a model by the rows of the newest hour alone: even the upper end of the confidence interval of
    its AUC on them is too low. Such rows are too few to pass a model."""
    if metrics.auc is None or metrics.auc_interval is None:
        return
    high = metrics.auc_interval[1]
    found = (
        f"on this hour's own {metrics.rows:,} held-out rows AUC is {metrics.auc:.6g}, with 95 % confidence below "
        f"{high:.6g}"
    )
    if thresholds.auc is not None and high < thresholds.auc:
        yield f"{found}; gate.auc requires {thresholds.auc:.6g}."
    if thresholds.vs_current is not None and current is not None and current.auc is not None:
        required = current.auc + thresholds.vs_current
        if high < required:
            yield (
                f"{found}, and the current version's is {current.auc:.6g}; gate.vs_current requires at least "
                f"{required:.6g}."
            )


def _missed_thresholds(metrics: Metrics, thresholds: Thresholds) -> Iterator[str]:
    """Thresholds that are not met. Comparisons are written so that NaN meets none."""
    auc, logloss, accuracy = metrics.auc, metrics.logloss, metrics.accuracy
    if thresholds.auc is not None:
        if auc is None:
            yield _not_measured("AUC", metrics)
        elif not auc >= thresholds.auc:
            yield f"AUC is {auc:.6g}, below gate.auc {thresholds.auc:.6g}."
    if thresholds.logloss is not None:
        entropy = metrics.normalised_entropy
        if logloss is None or entropy is None:
            yield _not_measured("log loss relative to that of the base rate", metrics)
        elif not logloss <= thresholds.logloss:
            yield f"log loss is {logloss:.6g}, above gate.logloss {thresholds.logloss:.6g}."
        elif not entropy < 1:
            yield (
                f"log loss is {logloss:.6g}, within gate.logloss {thresholds.logloss:.6g}, but no better than "
                f"that of always predicting the base rate {metrics.base_rate:.6g}: normalised entropy is "
                f"{entropy:.6g}, and must be below 1."
            )
    if thresholds.accuracy is not None:
        if accuracy is None:
            yield _not_measured("accuracy", metrics)
        elif not accuracy >= thresholds.accuracy:
            yield f"accuracy is {accuracy:.6g}, below gate.accuracy {thresholds.accuracy:.6g}."
    if thresholds.calibration is not None:
        calibration = metrics.calibration
        if calibration is None:
            yield _not_measured("calibration", metrics)
        elif not abs(calibration - 1) <= thresholds.calibration:
            yield (
                f"predicted clicks / actual clicks is {calibration:.6g}, {abs(calibration - 1):.6g} away from 1; "
                f"gate.calibration allows {thresholds.calibration:.6g}."
            )


def _worse_than_current(metrics: Metrics, threshold: float | None, current: Metrics | None) -> Iterator[str]:
    """Why the model is not good enough compared with the current version."""
    if threshold is None or current is None:
        return
    same_clicks = math.isclose(
        metrics.clicks, current.clicks, rel_tol=1e-6
    )  # the order of summation may differ
    if metrics.rows != current.rows or not same_clicks:
        yield (
            f"the current version was measured on {current.rows:,} rows with {current.clicks:,.10g} clicks, "
            f"this model on {metrics.rows:,} with {metrics.clicks:,.10g}; gate.vs_current needs the same rows."
        )
    elif metrics.auc is None or current.auc is None:
        yield _not_measured("AUC relative to the current version", metrics)
    elif not metrics.auc - current.auc >= threshold:
        limit = (
            f"requires a gain of {threshold:.6g}"
            if threshold > 0
            else f"allows a loss of {abs(threshold):.6g}"
        )
        yield (
            f"AUC is {metrics.auc:.6g}, the current version's {current.auc:.6g}: a change of "
            f"{metrics.auc - current.auc:+.6g}; gate.vs_current {limit}."
        )


def _not_measured(name: str, metrics: Metrics) -> str:
    why = " ".join(metrics.notes) or "Evaluate on rows with and without clicks."
    return f"{name} could not be measured. {why}"


def _constant(metrics: Metrics) -> Iterator[str]:
    """Why the model is no better than a constant, if so."""
    rate, spread, auc = metrics.mean_prediction, metrics.spread, metrics.auc
    if rate is None or spread is None:
        yield _not_measured("whether the model is better than a constant", metrics)
    elif not spread > MIN_SPREAD * min(rate, 1 - rate):
        yield (
            f"the model is a constant predictor: all predictions are between {metrics.lowest_prediction:.6g} "
            f"and {metrics.highest_prediction:.6g}, with a standard deviation of {spread:.2g} around "
            f"{rate:.6g}; at least {MIN_SPREAD:.1%} of that is required."
        )
    elif auc is None:
        yield _not_measured("whether the model is better than a constant", metrics)
    else:
        low = metrics.auc_interval[0] if metrics.auc_interval else math.nan
        if not (auc >= MIN_AUC and low > 0.5):
            yield (
                f"the model is no better than a constant predictor: AUC is {auc:.6g}, with 95 % confidence "
                f"above {low:.6g}; required are at least {MIN_AUC} and a confidence bound above 0.5, the AUC of a "
                f"constant. Normalised entropy is {metrics.normalised_entropy:.6g}; a constant has 1."
                f"{_too_few_clicks(metrics, auc, low)}"
            )


def _too_few_clicks(metrics: Metrics, auc: float, low: float) -> str:
    """How many clicks there are and how many are needed, if only the confidence is missing."""
    if not (auc >= MIN_AUC and low <= 0.5):
        return ""
    others = metrics.impressions - metrics.clicks
    kind, count = ("clicks", metrics.clicks) if metrics.clicks <= others else ("non-clicks", others)
    # The margin shrinks with the square root of the count.
    enough = math.ceil(count * ((auc - low) / (auc - 0.5)) ** 2)
    return (
        f" There are {metrics.clicks:,.6g} clicks in {metrics.impressions:,.10g} impressions, too few to be sure; at "
        f"this AUC about {enough:,} {kind} are enough: evaluate on more rows (data.eval, or with --follow a larger "
        "follow.holdout)."
    )


def _accuracy_warning(metrics: Metrics, threshold: float | None) -> str:
    if metrics.base_rate is None:
        return "accuracy is the only threshold of the gate: set gate.auc or gate.logloss as well."
    answer, share = (
        ("click", metrics.base_rate) if metrics.base_rate > 0.5 else ("no click", 1 - metrics.base_rate)
    )
    enough = " and would pass" if threshold is not None and share >= threshold else ""
    return (
        f'accuracy is the only threshold of the gate, and always predicting "{answer}" is '
        f"{100 * share:.1f} % accurate on these rows{enough}: set gate.auc or gate.logloss as well."
    )
