"""The gate's messages, and that no worthless model passes it."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from naive_measures import clicks_of, columns

from clickline.evaluation.binary_metrics import MetricCounts, Metrics
from clickline.evaluation.gate import Thresholds, check_gate


def measure(*batch) -> Metrics:
    counts = MetricCounts()
    counts.add(*batch)
    return counts.metrics()


GOOD = measure(*clicks_of(np.random.default_rng(30), 20_000))  # AUC 0.777, log loss 0.45
LABEL = columns(np.arange(2000) % 4 == 0, [], [])[0]  # a quarter are clicks
ONES = np.ones(2000, dtype=np.float32)


def test_model_that_meets_all_thresholds_passes_without_warnings():
    thresholds = Thresholds(auc=0.76, logloss=0.46, accuracy=0.78, calibration=0.05, vs_current=-0.001)
    verdict = check_gate(GOOD, thresholds, current=GOOD)
    assert verdict.passed and verdict.reasons == () and verdict.warnings == ()
    assert json.loads(json.dumps(verdict.to_json())) == {"passed": True, "reasons": [], "warnings": []}


@pytest.mark.parametrize(
    ("thresholds", "measured", "reason"),
    [
        ({"auc": 0.8}, {"auc": 0.7312}, "AUC is 0.7312, below gate.auc 0.8."),
        ({"auc": 0.74}, {"auc": 0.739999}, "AUC is 0.739999, below gate.auc 0.74."),
        ({"logloss": 0.4}, {"logloss": 0.45}, "log loss is 0.45, above gate.logloss 0.4."),
        ({"accuracy": 0.9}, {"accuracy": 0.79}, "accuracy is 0.79, below gate.accuracy 0.9."),
        (
            {"calibration": 0.05},
            {"calibration": 0.9},
            "predicted clicks / actual clicks is 0.9, 0.1 away from 1; gate.calibration allows 0.05.",
        ),
        (
            {"calibration": 0.05},
            {"calibration": 1.25},
            "predicted clicks / actual clicks is 1.25, 0.25 away from 1; gate.calibration allows 0.05.",
        ),
    ],
)
def test_refusal_names_the_metric_and_its_threshold(thresholds, measured, reason):
    verdict = check_gate(replace(GOOD, **measured), Thresholds(**thresholds))
    assert not verdict.passed
    assert verdict.reasons == (reason,)


def test_gate_reports_all_reasons_at_once():
    verdict = check_gate(GOOD, Thresholds(auc=0.99, logloss=0.01, accuracy=0.99, calibration=1e-9))
    assert [reason.split(" is ")[0] for reason in verdict.reasons] == [
        "AUC",
        "log loss",
        "accuracy",
        "predicted clicks / actual clicks",
    ]


def test_threshold_exactly_reached_passes():
    assert check_gate(GOOD, Thresholds(auc=GOOD.auc, logloss=GOOD.logloss, accuracy=GOOD.accuracy)).passed


# ── against the current version ────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("auc", "thresholds", "end"),
    [
        (
            0.740,
            -0.002,
            "AUC is 0.74, the current version's 0.75: a change of -0.01; gate.vs_current allows a loss of 0.002.",
        ),
        (
            0.749,
            0.0,
            "AUC is 0.749, the current version's 0.75: a change of -0.001; gate.vs_current allows a loss of 0.",
        ),
        (
            0.751,
            0.01,
            "AUC is 0.751, the current version's 0.75: a change of +0.001; gate.vs_current requires a gain of 0.01.",
        ),
    ],
)
def test_model_worse_than_the_current_version_is_refused(auc, thresholds, end):
    verdict = check_gate(replace(GOOD, auc=auc), Thresholds(vs_current=thresholds), replace(GOOD, auc=0.75))
    assert not verdict.passed and verdict.reasons[0] == end


@pytest.mark.parametrize(("auc", "thresholds"), [(0.749, -0.002), (0.75, 0.0), (0.77, 0.01)])
def test_model_within_the_allowed_loss_passes(auc, thresholds):
    assert check_gate(
        replace(GOOD, auc=auc), Thresholds(vs_current=thresholds), replace(GOOD, auc=0.75)
    ).passed


def test_first_version_has_no_comparison():
    verdict = check_gate(GOOD, Thresholds(vs_current=0.5))
    assert verdict.passed
    assert verdict.warnings == (
        "gate.vs_current was not checked: there is no current version to compare with.",
    )


def test_versions_evaluated_on_other_rows_are_not_compared():
    verdict = check_gate(GOOD, Thresholds(vs_current=-1), replace(GOOD, rows=7, clicks=2.0))
    assert not verdict.passed
    assert "was measured on 7 rows with 2 clicks, this model on 20,000 with" in verdict.reasons[0]
    assert "gate.vs_current needs the same rows" in verdict.reasons[0]


# ── constants ──────────────────────────────────────────────────────────────────────────────────

LENIENT = {"auc": 0.5, "logloss": 1.0, "calibration": 1.0, "vs_current": -1.0}


@pytest.mark.parametrize("thresholds", LENIENT)
@pytest.mark.parametrize("answer", [0.25, 0.2, 0.0, 1.0, 0.5])
def test_constant_predictor_never_passes(thresholds, answer):
    constant = measure(LABEL, ONES, np.full(2000, answer, dtype=np.float32))
    verdict = check_gate(
        constant, Thresholds(**{thresholds: LENIENT[thresholds]}, accuracy=0.01), current=constant
    )
    assert not verdict.passed
    assert any(
        "the model is a constant predictor: all predictions are between" in reason
        for reason in verdict.reasons
    )


@given(st.sampled_from(sorted(LENIENT)), st.floats(0, 0.05), st.integers(0, 50))
def test_noise_around_the_base_rate_never_passes(thresholds, noise, seed):
    jitter = np.random.default_rng(seed).normal(0, noise, 2000)
    label = LABEL.copy()
    np.random.default_rng(seed + 1000).shuffle(label)
    nearly = measure(label, ONES, np.clip(0.25 + jitter, 0.01, 0.99).astype(np.float32))
    verdict = check_gate(nearly, Thresholds(**{thresholds: LENIENT[thresholds]}), current=nearly)
    lucky = nearly.auc_interval is not None and nearly.auc_interval[0] > 0.5  # 1 in 40
    assert not verdict.passed or (lucky and nearly.spread > 1e-3 * 0.25)


@pytest.mark.parametrize("impressions", [1, 10], ids=["single rows", "rows of ten"])
@pytest.mark.parametrize("clicks", [1, 2, 3, 5, 10, 50, 1000])
def test_random_model_passes_at_most_1_in_20_with_any_number_of_clicks(clicks, impressions):
    rng = np.random.default_rng([clicks, impressions])
    rows, tries, passed = max(500, 4 * clicks), 300, 0
    weight = np.full(rows, impressions)
    for _ in range(tries):
        at = rng.choice(rows * impressions, clicks, replace=False) // impressions
        label = np.bincount(at, minlength=rows) / impressions
        passed += check_gate(measure(*columns(label, weight, rng.random(rows))), Thresholds()).passed
    # 2.5 % of 300 are 7.5, with a standard deviation of 2.7.
    assert passed <= 15


@pytest.mark.parametrize("clicks", [10, 50, 1000])
def test_good_model_passes_with_few_clicks(clicks):
    rng = np.random.default_rng(clicks)
    label = np.arange(10 * clicks) < clicks
    passed = [
        check_gate(
            measure(*columns(label, np.ones(label.size), 1 / (1 + np.exp(3 - rng.normal(1.5 * label, 1))))),
            Thresholds(),
        ).passed
        for _ in range(100)
    ]  # AUC 0.856
    assert sum(passed) >= 95


def test_refusal_for_too_few_clicks_names_the_needed_number():
    few = measure(*columns([1, 1] + [0] * 98, [1] * 100, [0.8, 0.5, *np.linspace(0.1, 0.7, 98)]))
    (reason,) = check_gate(few, Thresholds(auc=0.6)).reasons
    assert f"AUC is {few.auc:.6g}, with 95 % confidence above {few.auc_interval[0]:.6g};" in reason
    assert (
        "There are 2 clicks in 100 impressions, too few to be sure; at this AUC about 3 clicks are enough"
        in reason
    )
    assert "evaluate on more rows (data.eval, or with --follow a larger follow.holdout)." in reason
    hopeless = measure(*columns([1, 1] + [0] * 98, [1] * 100, [0.05, 0.06, *np.linspace(0.1, 0.7, 98)]))
    assert "too few" not in check_gate(hopeless, Thresholds(auc=0.6)).reasons[-1]


def test_model_no_better_than_chance_is_refused():
    backwards = measure(LABEL, ONES, np.where(LABEL > 0, 0.2, 0.3).astype(np.float32))
    verdict = check_gate(backwards, Thresholds(calibration=1.0))
    assert not verdict.passed
    assert "no better than a constant predictor: AUC is 0, " in verdict.reasons[0]
    assert "a constant has 1" in verdict.reasons[0]


def test_log_loss_no_better_than_the_base_rate_is_refused():
    # Ranks well, but is so sure of itself that a constant has the smaller loss.
    label, weight, score = clicks_of(np.random.default_rng(31), 20_000)
    wild = measure(label, weight, (score**0.2).astype(np.float32))
    assert wild.auc > 0.7
    verdict = check_gate(wild, Thresholds(logloss=1.0))
    assert not verdict.passed
    assert "but no better than that of always predicting the base rate" in verdict.reasons[0]
    assert "normalised entropy is" in verdict.reasons[0]
    assert check_gate(wild, Thresholds(auc=0.7)).passed


def test_accuracy_only_gate_passes_a_constant_with_a_warning():
    constant = measure(LABEL, ONES, np.full(2000, 0.25, dtype=np.float32))
    verdict = check_gate(constant, Thresholds(accuracy=0.74))
    assert verdict.passed
    assert verdict.warnings == (
        'accuracy is the only threshold of the gate, and always predicting "no click" is 75.0 % accurate on these rows '
        "and would pass: set gate.auc or gate.logloss as well.",
    )
    refused = check_gate(constant, Thresholds(accuracy=0.8))
    assert not refused.passed and "would pass" not in refused.warnings[0] and "75.0 %" in refused.warnings[0]


def test_accuracy_warning_with_a_majority_of_clicks():
    mostly = measure(1 - LABEL, ONES, np.full(2000, 0.75, dtype=np.float32))
    assert (
        'always predicting "click" is 75.0 % accurate'
        in check_gate(mostly, Thresholds(accuracy=0.7)).warnings[0]
    )


def test_gate_without_thresholds_warns_and_refuses_constants():
    assert check_gate(GOOD, Thresholds()).passed
    assert "the gate has no threshold" in check_gate(GOOD, Thresholds()).warnings[0]
    assert not check_gate(measure(LABEL, ONES, np.full(2000, 0.25, dtype=np.float32)), Thresholds()).passed


# ── what could not be measured ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["auc", "logloss", "accuracy", "calibration"])
@pytest.mark.parametrize("value", [math.nan, None])
def test_nan_metrics_never_pass(name, value):
    verdict = check_gate(replace(GOOD, **{name: value}), Thresholds(**{name: 1.0 if name != "auc" else 0.5}))
    assert not verdict.passed
    assert "could not be measured" in verdict.reasons[0] if value is None else "nan" in verdict.reasons[0]


@pytest.mark.parametrize("name", ["spread", "mean_prediction", "auc", "normalised_entropy"])
def test_nan_spread_never_passes(name):
    verdict = check_gate(replace(GOOD, **{name: math.nan}), Thresholds(logloss=1.0))
    assert not verdict.passed


def test_nan_of_either_version_is_refused():
    for mine, current in ((math.nan, 0.7), (0.7, math.nan), (None, 0.7), (0.7, None)):
        thresholds = Thresholds(vs_current=-1.0)
        assert not check_gate(replace(GOOD, auc=mine), thresholds, replace(GOOD, auc=current)).passed


def test_single_class_rows_are_refused_with_the_reason():
    one_class = measure(*columns([0] * 100, [1] * 100, np.linspace(0.1, 0.9, 100)))
    for thresholds in (
        Thresholds(auc=0.6),
        Thresholds(logloss=1.0),
        Thresholds(calibration=1.0),
        Thresholds(vs_current=-1),
    ):
        verdict = check_gate(one_class, thresholds, one_class)
        assert not verdict.passed
        assert "all 100 impressions lack a click" in verdict.reasons[0]


def test_no_rows_are_refused_with_the_reason():
    nothing = MetricCounts().metrics()
    for thresholds in (Thresholds(accuracy=0.1), Thresholds(auc=0.6), Thresholds()):
        verdict = check_gate(nothing, thresholds)
        assert not verdict.passed and "there are no rows" in verdict.reasons[0]


def test_imprecise_auc_gives_a_warning():
    assert (
        "AUC is only known to 0.002"
        in check_gate(replace(GOOD, auc_error=2e-3), Thresholds(auc=0.6)).warnings[0]
    )
