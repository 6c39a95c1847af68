"""Calibration corrects probabilities, keeps the order, survives JSON, and does not depend on batches."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from naive_measures import columns, sigmoid

from clickline.errors import ArtifactError, DataError
from clickline.evaluation.binary_metrics import MetricCounts
from clickline.evaluation.calibration_fit import fit_isotonic, fit_platt
from clickline.models.calibration import Isotonic, Platt, calibration_from_json

FITS = [fit_isotonic, fit_platt]
WRONG = {
    "too sure": lambda logit: 2 * logit + 1,
    "too timid": lambda logit: 0.4 * logit,
    "too high": lambda logit: logit + 1,
    "bent": lambda logit: np.where(logit > -1, 2.5 * logit + 1.5, logit),
}


def rows_of(seed, rows, wrong):
    rng = np.random.default_rng(seed)
    logit = rng.normal(-2, 1, rows)
    return columns(
        rng.random(rows) < sigmoid(logit), np.ones(rows), sigmoid(WRONG.get(wrong, np.copy)(logit))
    )


def counted(*batch, limit=1 << 16):
    counts = MetricCounts(limit)
    counts.add(*batch)
    return counts


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("wrong", WRONG)
def test_calibration_improves_other_rows_and_keeps_the_ranking(fit, wrong):
    calibration = fit(counted(*rows_of(1, 20_000, wrong)).bins())
    label, weight, score = rows_of(2, 50_000, wrong)
    before = counted(label, weight, score).metrics()
    after = counted(label, weight, calibration.apply(score)).metrics()
    assert after.logloss < before.logloss
    assert after.ece < before.ece
    assert abs(after.calibration - 1) < max(0.04, 0.5 * abs(before.calibration - 1))
    assert after.auc == pytest.approx(before.auc, abs=1e-5)
    if fit is fit_isotonic or wrong != "bent":
        best = counted(*rows_of(2, 50_000, "right")).metrics().logloss  # the same rows, as they truly are
        assert after.logloss == pytest.approx(best, abs=1e-3)


@pytest.mark.parametrize("fit", FITS)
def test_calibrated_probabilities_hardly_change(fit):
    label, weight, score = rows_of(3, 50_000, "right")
    calibration = fit(counted(label, weight, score).bins())
    assert np.abs(calibration.apply(score) - score).mean() < 0.01
    before, after = counted(label, weight, score), counted(label, weight, calibration.apply(score))
    assert after.metrics().logloss == pytest.approx(before.metrics().logloss, abs=1.5e-3)


def test_platt_recovers_the_distortion():
    found = fit_platt(counted(*rows_of(4, 400_000, "too sure")).bins())
    assert found.slope == pytest.approx(0.5, abs=0.01)
    assert found.offset == pytest.approx(-0.5, abs=0.02)


def test_fit_on_joined_scores_agrees_with_exact_fit():
    batch = rows_of(5, 60_000, "bent")
    grid = np.linspace(0.01, 0.9, 90)
    for fit in FITS:
        exact, joined = (fit(counted(*batch, limit=limit).bins()).apply(grid) for limit in (1 << 16, 1 << 12))
        assert np.abs(exact - joined).max() < 0.02
        assert np.abs(exact - joined).mean() < 2e-3


@given(
    st.lists(
        st.tuples(
            st.integers(0, 5),
            st.integers(0, 5),
            st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1, width=32)),
        ),
        min_size=1,
        max_size=200,
    ).filter(lambda rows: any(a + b for a, b, _ in rows)),
    st.lists(st.floats(0, 1, width=32), min_size=1, max_size=50),
)
def test_calibration_is_increasing_and_within_0_and_1(rows, probes):
    batch = columns(
        [a / (a + b) if a + b else 0 for a, b, _ in rows],
        [a + b for a, b, _ in rows],
        [s for _, _, s in rows],
    )
    probes = np.array(sorted(probes))
    for fit in FITS:
        calibration = fit(counted(*batch).bins())
        found = calibration.apply(probes)
        assert np.all((found >= 0) & (found <= 1))
        assert np.all(np.diff(found) >= 0)
        assert (
            calibration_from_json(json.loads(json.dumps(calibration.to_json(), allow_nan=False)))
            == calibration
        )


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_single_row_is_calibrated_like_in_a_batch(fit, dtype):
    calibration = fit(counted(*rows_of(6, 5000, "bent")).bins())
    score = np.random.default_rng(7).random(1000).astype(dtype)
    together = calibration.apply(score)
    assert together.dtype == dtype
    assert np.array_equal(
        together, np.concatenate([calibration.apply(score[i : i + 1]) for i in range(1000)])
    )
    assert np.array_equal(together, calibration_from_json(calibration.to_json()).apply(score))


@pytest.mark.parametrize("fit", FITS)
def test_inverted_clicks_do_not_reverse_the_order(fit):
    rng = np.random.default_rng(8)
    probability = rng.random(5000)
    calibration = fit(counted(*columns(rng.random(5000) > probability, np.ones(5000), probability)).bins())
    found = calibration.apply(np.linspace(0.05, 0.95, 10))
    assert np.all(np.diff(found) > 0)
    if fit is fit_platt:
        assert calibration.slope == 1e-3
        assert found == pytest.approx(np.full(10, 0.5), abs=0.05)


@pytest.mark.parametrize("fit", FITS)
def test_group_without_clicks_has_positive_probability(fit):
    label, score = np.repeat([0, 0, 1], 500), np.repeat([0.1, 0.2, 0.9], 500)
    low, high = fit(counted(*columns(label, np.ones(1500), score)).bins()).apply(np.array([0.1, 0.9]))
    assert 1e-7 < low < 0.01
    assert 0.99 < high < 1 - 1e-7


@pytest.mark.parametrize("fit", FITS)
def test_calibration_is_invariant_to_the_scale_of_weights(fit):
    label, weight, score = rows_of(9, 3000, "bent")
    grid = np.linspace(0.01, 0.9, 20)
    one, heavy = (fit(counted(label, weight * unit, score).bins()).apply(grid) for unit in (1, 64))
    assert heavy == pytest.approx(one, rel=1e-6)


@pytest.mark.parametrize("fit", FITS)
def test_calibration_without_rows_is_an_error(fit):
    with pytest.raises(DataError, match="no rows are held out to fit the calibration on"):
        fit(MetricCounts().bins())


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({}, "unknown calibration kind None; expected isotonic or platt"),
        ({"kind": "spline"}, "kind 'spline'"),
        ({"kind": "platt", "slope": 1.0}, "the platt calibration is invalid: 'offset'"),
        ({"kind": "platt", "slope": -1.0, "offset": 0.0}, "is not increasing"),
        ({"kind": "platt", "slope": math.nan, "offset": 0.0}, "is not increasing"),
        ({"kind": "isotonic", "scores": [0, 0.5, 1], "values": [0, 0.6, 0.5]}, "is not increasing"),
        ({"kind": "isotonic", "scores": [0, 0.5, 0.4, 1], "values": [0, 0.1, 0.2, 1]}, "is not increasing"),
        ({"kind": "isotonic", "scores": [0, 1], "values": [0, 0.5, 1]}, "is not increasing"),
        ({"kind": "isotonic", "scores": [], "values": []}, "is not increasing"),
        ({"kind": "isotonic", "scores": "ab", "values": [0, 1]}, "is invalid"),
    ],
)
def test_invalid_calibration_document_is_refused(document, words):
    with pytest.raises(ArtifactError, match=words):
        calibration_from_json(document)


def test_isotonic_interpolation_matches_manual_values():
    line = Isotonic((0.0, 0.5, 1.0), (0.0, 0.1, 1.0))
    assert line.apply(np.array([0.0, 0.25, 0.5, 0.75, 1.0])) == pytest.approx([0, 0.05, 0.1, 0.55, 1])
    assert Platt(1.0, 0.0).apply(np.array([0.2, 0.7])) == pytest.approx([0.2, 0.7])
    assert Platt(1.0, math.log(2)).apply(np.array([0.5])) == pytest.approx([2 / 3])


def test_isotonic_is_increasing_despite_rounding_at_knots():
    # Found by search: without care the score just below the second point gets more than the point itself.
    second, value = 0.878985668547148, 0.8907245963190537
    line = Isotonic((0.0, 0.0005424560441484316, second, 1.0), (0.0, 0.0007501046232195143, value, 1.0))
    below, at = line.apply(np.array([np.nextafter(second, 0), second]))
    assert below <= at == value


def test_blocks_put_out_of_order_by_the_prior_are_pooled():
    # 49.9 % of 1,000 and 50 % of 20 clicked; with the prediction 0.2 as one more row the 20 fall below the 1,000.
    label = np.concatenate([np.arange(1000) < 499, np.arange(20) < 10])
    fitted = fit_isotonic(counted(*columns(label, np.ones(1020), np.repeat([0.1, 0.2], [1000, 20]))).bins())
    assert list(fitted.values) == sorted(fitted.values)
    assert fitted.apply(np.array([0.1, 0.2])) == pytest.approx([0.499, 0.499], abs=0.25)
    assert np.all(np.diff(fitted.apply(np.linspace(0, 1, 50))) > 0)
