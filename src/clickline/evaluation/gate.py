"""Whether a model may be published: measured values against thresholds, with the reasons in words."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from clickline.evaluation.binary_metrics import Metrics

LEAST_AUC = 0.51
"""Below it a model tells clicks from non-clicks no better than chance, however sure the measurement is."""

LEAST_SPREAD = 1e-3
"""Predictions whose standard deviation is a smaller part of the rate they predict are all the same."""

LARGEST_AUC_ERROR = 1e-4


@dataclass(frozen=True)
class Thresholds:
    """What a model must reach; None: not asked for."""

    auc: float | None = None  # smallest
    logloss: float | None = None  # largest
    accuracy: float | None = None  # smallest
    calibration: float | None = None  # largest distance from 1 of predicted / real clicks
    vs_current: float | None = None  # smallest gain in AUC over the current version; below 0: largest loss


@dataclass(frozen=True)
class Verdict:
    """Passed or not. `reasons` says why not, `warnings` what to know in either case."""

    passed: bool
    reasons: tuple[str, ...]
    warnings: tuple[str, ...] = ()

    def warned(self, warning: str | None) -> Verdict:
        """The same with one warning more, if there is one."""
        return self if warning is None else replace(self, warnings=(*self.warnings, warning))

    def refused(self, reasons: Iterable[str]) -> Verdict:
        """The same with more reasons against the model, if there are any."""
        together = (*self.reasons, *reasons)
        return replace(self, passed=not together, reasons=together)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def judge(
    measured: Metrics, thresholds: Thresholds, current: Metrics | None = None, why_no_current: str = ""
) -> Verdict:
    """Judge a model; `current` is the live version measured on the same rows; without it, `why_no_current` says why.

    A model that predicts about the same for every row is refused, whatever it reaches, unless accuracy is
    all that was asked for: then the user is told what that is worth.
    """
    asked = {name for name, value in asdict(thresholds).items() if value is not None}
    reasons = [*_missed(measured, thresholds), *_lost(measured, thresholds.vs_current, current)]
    warnings = []
    if asked == {"accuracy"}:
        warnings.append(_worth_of_accuracy(measured, thresholds.accuracy))
    elif measured.auc is not None or not reasons:  # what cannot be measured is said once
        reasons += _constant(measured)
    if thresholds.vs_current is not None and current is None:
        why = why_no_current or "there is no current version to compare with"
        warnings.append(f"gate.vs_current was not checked: {why}.")
    if not asked:
        warnings.append("the gate asks for nothing: set gate.auc, gate.logloss or gate.calibration.")
    if measured.auc_error is not None and not measured.auc_error <= LARGEST_AUC_ERROR:
        warnings.append(
            f"AUC is only known to {measured.auc_error:.2g}, where {LARGEST_AUC_ERROR:g} is usual."
        )
    return Verdict(not reasons, tuple(reasons), tuple(warnings))


def surely_worse(measured: Metrics, thresholds: Thresholds, current: Metrics | None = None) -> Iterator[str]:
    """Why rows that are too few to pass a model by are enough to refuse it: even the upper end of its AUC's confidence
    interval is too low. They are those of the newest hour of several."""
    if measured.auc is None or measured.auc_interval is None:
        return
    high = measured.auc_interval[1]
    found = (
        f"on this hour's own {measured.rows:,} held-out rows AUC is {measured.auc:.6g}, with 95 % confidence below "
        f"{high:.6g}"
    )
    if thresholds.auc is not None and high < thresholds.auc:
        yield f"{found}; gate.auc asks for {thresholds.auc:.6g}."
    if thresholds.vs_current is not None and current is not None and current.auc is not None:
        least = current.auc + thresholds.vs_current
        if high < least:
            yield (
                f"{found}, and the current version's is {current.auc:.6g}; gate.vs_current asks for at least "
                f"{least:.6g}."
            )


def _missed(measured: Metrics, thresholds: Thresholds) -> Iterator[str]:
    """Thresholds that are not met. Comparisons are written so that NaN meets none."""
    auc, logloss, accuracy = measured.auc, measured.logloss, measured.accuracy
    if thresholds.auc is not None:
        if auc is None:
            yield _unmeasured("AUC", measured)
        elif not auc >= thresholds.auc:
            yield f"AUC is {auc:.6g}, below gate.auc {thresholds.auc:.6g}."
    if thresholds.logloss is not None:
        entropy = measured.normalised_entropy
        if logloss is None or entropy is None:
            yield _unmeasured("log loss against that of the base rate", measured)
        elif not logloss <= thresholds.logloss:
            yield f"log loss is {logloss:.6g}, above gate.logloss {thresholds.logloss:.6g}."
        elif not entropy < 1:
            yield (
                f"log loss is {logloss:.6g}, within gate.logloss {thresholds.logloss:.6g}, but no better than "
                f"that of always predicting the base rate {measured.base_rate:.6g}: normalised entropy is "
                f"{entropy:.6g}, and must be below 1."
            )
    if thresholds.accuracy is not None:
        if accuracy is None:
            yield _unmeasured("accuracy", measured)
        elif not accuracy >= thresholds.accuracy:
            yield f"accuracy is {accuracy:.6g}, below gate.accuracy {thresholds.accuracy:.6g}."
    if thresholds.calibration is not None:
        calibration = measured.calibration
        if calibration is None:
            yield _unmeasured("calibration", measured)
        elif not abs(calibration - 1) <= thresholds.calibration:
            yield (
                f"predicted clicks / real clicks is {calibration:.6g}, {abs(calibration - 1):.6g} away from 1; "
                f"gate.calibration allows {thresholds.calibration:.6g}."
            )


def _lost(measured: Metrics, threshold: float | None, current: Metrics | None) -> Iterator[str]:
    """Why the model is not good enough beside the current version."""
    if threshold is None or current is None:
        return
    same_clicks = math.isclose(measured.clicks, current.clicks, rel_tol=1e-6)  # sums in another order
    if measured.rows != current.rows or not same_clicks:
        yield (
            f"the current version was measured on {current.rows:,} rows with {current.clicks:,.10g} clicks, "
            f"this model on {measured.rows:,} with {measured.clicks:,.10g}; gate.vs_current needs the same rows."
        )
    elif measured.auc is None or current.auc is None:
        yield _unmeasured("AUC beside the current version's", measured)
    elif not measured.auc - current.auc >= threshold:
        asks = (
            f"asks for a gain of {threshold:.6g}"
            if threshold > 0
            else f"allows a loss of {abs(threshold):.6g}"
        )
        yield (
            f"AUC is {measured.auc:.6g}, the current version's {current.auc:.6g}: a change of "
            f"{measured.auc - current.auc:+.6g}; gate.vs_current {asks}."
        )


def _unmeasured(name: str, measured: Metrics) -> str:
    why = " ".join(measured.notes) or "Evaluate on rows with clicks and without."
    return f"{name} could not be measured. {why}"


def _constant(measured: Metrics) -> Iterator[str]:
    """Why the model is as good as a constant, if it is."""
    rate, spread, auc = measured.mean_prediction, measured.spread, measured.auc
    if rate is None or spread is None:
        yield _unmeasured("whether the model is better than a constant", measured)
    elif not spread > LEAST_SPREAD * min(rate, 1 - rate):
        yield (
            f"the model is a constant predictor: all predictions lie between {measured.lowest_prediction:.6g} "
            f"and {measured.highest_prediction:.6g}, with a standard deviation of {spread:.2g} around "
            f"{rate:.6g}; at least {LEAST_SPREAD:.1%} of that is asked."
        )
    elif auc is None:
        yield _unmeasured("whether the model is better than a constant", measured)
    else:
        low = measured.auc_interval[0] if measured.auc_interval else math.nan
        if not (auc >= LEAST_AUC and low > 0.5):
            yield (
                f"the model is no better than a constant predictor: AUC is {auc:.6g}, with 95 % confidence "
                f"above {low:.6g}; at least {LEAST_AUC} and a confidence above 0.5 are asked, which is what a "
                f"constant has. Normalised entropy is {measured.normalised_entropy:.6g}; a constant has 1."
                f"{_too_few(measured, auc, low)}"
            )


def _too_few(measured: Metrics, auc: float, low: float) -> str:
    """How many clicks there were and how many it takes, where the AUC would do if it were sure."""
    if not (auc >= LEAST_AUC and low <= 0.5):
        return ""
    others = measured.shows - measured.clicks
    kind, count = ("clicks", measured.clicks) if measured.clicks <= others else ("non-clicks", others)
    # A margin shrinks with the root of the number.
    enough = math.ceil(count * ((auc - low) / (auc - 0.5)) ** 2)
    return (
        f" There are {measured.clicks:,.6g} clicks in {measured.shows:,.10g} shows, too few to be sure; at this AUC "
        f"about {enough:,} {kind} are enough: evaluate on more rows (data.eval, or with --follow a larger "
        "follow.holdout)."
    )


def _worth_of_accuracy(measured: Metrics, threshold: float | None) -> str:
    if measured.base_rate is None:
        return "accuracy is all the gate asks for: set gate.auc or gate.logloss as well."
    answer, share = (
        ("click", measured.base_rate) if measured.base_rate > 0.5 else ("no click", 1 - measured.base_rate)
    )
    enough = " and would pass" if threshold is not None and share >= threshold else ""
    return (
        f'accuracy is all the gate asks for, and always saying "{answer}" is {100 * share:.1f} % accurate on '
        f"these rows{enough}: set gate.auc or gate.logloss as well."
    )
