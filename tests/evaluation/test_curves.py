"""Curves: every point equals a direct count, and thinning keeps the shape."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from naive_measures import clicks_of, columns, expanded

from clickline.evaluation.binary_metrics import ECE_BINS, MetricCounts, auc_of
from clickline.evaluation.curves import POINTS, curves

BOTH = ("roc", "precision_recall", "gain")

shows = st.lists(
    st.tuples(
        st.integers(1, 4).flatmap(lambda weight: st.tuples(st.just(weight), st.integers(0, weight))),
        st.sampled_from([0.0, 0.05, 0.2, 0.25, 0.5, 0.9, 1.0]),
    ),
    min_size=1,
    max_size=40,
)


def counted(labels, weights, scores) -> MetricCounts:
    counts = MetricCounts()
    counts.add(*columns(labels, weights, scores))
    return counts


@given(shows)
def test_curve_points_equal_direct_counts(rows):
    weights = [weight for (weight, _), _ in rows]
    labels = [clicks / weight for (weight, clicks), _ in rows]
    scores = [score for _, score in rows]
    found = curves(counted(labels, weights, scores).bins())
    single = list(expanded(labels, weights, scores))
    clicks = sum(clicked for clicked, _ in single)
    others = len(single) - clicks
    if not clicks or not others:
        assert [found[name] for name in BOTH] == [None] * 3
        return
    reached = []  # (clicks, others) from each score on
    for bound in [2.0, *sorted(set(scores), reverse=True)]:
        above = [clicked for clicked, score in single if score >= bound]
        reached.append((sum(above), len(above) - sum(above)))
    assert found["roc"]["true_positive_rate"] == pytest.approx([c / clicks for c, _ in reached])
    assert found["roc"]["false_positive_rate"] == pytest.approx([o / others for _, o in reached])
    some = reached[1:]
    assert found["precision_recall"]["recall"] == pytest.approx([0, *(c / clicks for c, _ in some)])
    precision = [c / (c + o) for c, o in some]
    assert found["precision_recall"]["precision"] == pytest.approx([precision[0], *precision])
    assert found["gain"]["share_of_clicks"] == pytest.approx([c / clicks for c, _ in reached])
    assert found["gain"]["share_of_impressions"] == pytest.approx([(c + o) / len(single) for c, o in reached])
    lift = [c / clicks / ((c + o) / len(single)) for c, o in some]
    assert found["gain"]["lift"] == pytest.approx([lift[0], *lift])


def test_thinned_curves_keep_their_shape():
    counts = counted(*clicks_of(np.random.default_rng(1), 50_000))
    bins = counts.bins()
    found = curves(bins)
    for curve in found.values():
        assert curve is not None
        assert 2 <= max(len(column) for column in curve.values()) <= POINTS
    roc = found["roc"]
    places = list(zip(roc["false_positive_rate"], roc["true_positive_rate"], strict=True))
    assert places[0] == (0.0, 0.0)
    assert places[-1] == (1.0, 1.0)
    assert len(places) > 150
    assert max(x2 - x1 + y2 - y1 for (x1, y1), (x2, y2) in pairwise(places)) < 0.02
    area = sum((x2 - x1) * (y1 + y2) / 2 for (x1, y1), (x2, y2) in pairwise(places))
    assert area == pytest.approx(auc_of(bins), abs=1e-3)
    recall = found["precision_recall"]["recall"]
    assert max(b - a for a, b in pairwise(recall)) < 0.02
    assert recall[-1] == 1.0
    assert found["gain"]["share_of_impressions"][-1] == found["gain"]["share_of_clicks"][-1] == 1.0
    assert found["gain"]["lift"][-1] == pytest.approx(1.0)


def test_few_high_scores_stay_visible_in_curves():
    labels = np.zeros(100_000)
    labels[:10] = 1
    scores = np.linspace(0.1, 0.0, 100_000)
    scores[:10] = 0.9
    roc = curves(counted(labels, np.ones(100_000), scores).bins())["roc"]
    assert (roc["false_positive_rate"][1], roc["true_positive_rate"][1]) == (0.0, 1.0)


def test_calibration_curve_uses_the_ece_bins_with_intervals():
    label, weight, probability = clicks_of(np.random.default_rng(2), 20_000)
    counts = counted(label, weight, probability)
    found = curves(counts.bins())["calibration"]
    assert len(found["impressions"]) == ECE_BINS
    order = np.argsort(probability, kind="stable")
    for n, part in enumerate(np.array_split(order, ECE_BINS)):
        assert found["impressions"][n] == pytest.approx(len(part), abs=1)
        assert found["predicted"][n] == pytest.approx(probability[part].mean(), abs=1e-3)
        assert found["observed"][n] == pytest.approx(label[part].mean(), abs=2e-3)
    gap = [
        abs(p - o) * s
        for p, o, s in zip(*(found[k] for k in ("predicted", "observed", "impressions")), strict=True)
    ]
    assert sum(gap) / 20_000 == pytest.approx(counts.metrics().ece)


def test_calibration_interval_has_its_nominal_coverage():
    held = bins = 0
    for seed in range(40):
        found = curves(counted(*clicks_of(np.random.default_rng(seed), 4000)).bins())["calibration"]
        for predicted, low, high in zip(found["predicted"], found["low"], found["high"], strict=True):
            held += low <= predicted <= high  # what was predicted is the true rate here
            bins += 1
    assert 0.93 < held / bins < 0.97


def test_heavy_rows_do_not_narrow_the_calibration_interval():
    label, weight, probability = clicks_of(np.random.default_rng(3), 2000)
    single = curves(counted(label, weight, probability).bins())["calibration"]
    heavy = curves(counted(label, 50 * weight, probability).bins())["calibration"]
    assert heavy["low"] == pytest.approx(single["low"])
    assert heavy["high"] == pytest.approx(single["high"])


def test_calibration_interval_without_clicks_has_width():
    found = curves(counted([0, 0, 0, 0], [1, 1, 1, 1], [0.3, 0.3, 0.3, 0.3]).bins())["calibration"]
    assert (found["observed"], found["low"]) == ([0.0], [0.0])
    assert 0.3 < found["high"][0] < 0.7


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_single_class_has_no_ranking_curves(label):
    found = curves(counted([label] * 3, [1, 2, 1], [0.1, 0.2, 0.2]).bins())
    assert [found[name] for name in BOTH] == [None] * 3
    assert found["calibration"]["observed"] == [label] * 2
    assert sum(found["scores"]["clicks" if label else "others"]) == 4


@pytest.mark.parametrize("weight", [[], [0, 0]])
def test_no_rows_and_no_weight_give_no_curves(weight):
    rows = len(weight)
    found = curves(counted([1] * rows, weight, [0.5] * rows).bins())
    assert list(found) == ["roc", "precision_recall", "calibration", "scores", "gain"]
    assert set(found.values()) == {None}


@given(shows)
def test_score_histogram_counts_every_impression_once(rows):
    weights = [weight for (weight, _), _ in rows]
    labels = [clicks / weight for (weight, clicks), _ in rows]
    scores = [score for _, score in rows]
    found = curves(counted(labels, weights, scores).bins())["scores"]
    edges = found["edges"]
    assert len(edges) == len(found["clicks"]) + 1 == len(found["others"]) + 1
    assert all(a < b for a, b in pairwise(edges))
    assert edges[0] <= np.float32(min(scores))
    assert edges[-1] >= np.float32(max(scores))
    single = list(expanded(labels, weights, scores))
    assert sum(found["clicks"]) == pytest.approx(sum(clicked for clicked, _ in single))
    assert sum(found["clicks"]) + sum(found["others"]) == pytest.approx(len(single))


def test_curves_are_plain_json():
    found = curves(counted(*clicks_of(np.random.default_rng(4), 1000)).bins())
    assert json.loads(json.dumps(found)) == found
