"""Comparison of two documents: differences, intervals, slices."""

from __future__ import annotations

import math

import numpy as np
import pytest
from example_documents import bare, document, old
from test_page import Parsed

from clickline.evaluation.report.comparison import (
    METRICS,
    MetricSpec,
    config_differences,
    difference,
    slice_differences,
)
from clickline.evaluation.report.comparison_page import comparison, comparison_page
from clickline.evaluation.report.plots import overlay_figures

AUC, LOGLOSS = METRICS[:2]


def test_difference_is_new_minus_old_with_an_interval():
    change = difference(
        {"auc": 0.7, "auc_interval": [0.69, 0.71]}, {"auc": 0.75, "auc_interval": [0.74, 0.76]}, AUC
    )
    assert change.change == pytest.approx(0.05)
    wide = math.sqrt(2) * 0.01
    assert change.interval == pytest.approx((0.05 - wide, 0.05 + wide))
    assert change.significant and change.better
    unclear = difference(
        {"auc": 0.7, "auc_interval": (0.6, 0.8)}, {"auc": 0.75, "auc_interval": (0.7, 0.8)}, AUC
    )
    assert unclear.significant is False
    assert difference({"auc": 0.7}, {"auc": 0.75}, AUC).significant is None
    assert difference({"auc": None}, {"auc": 0.75}, AUC) is None
    assert difference({}, {"auc": 0.75}, AUC) is None


def test_interval_of_a_difference_has_its_nominal_coverage():
    """Two means of different samples: in about 95 of 100 draws the interval covers the true difference."""
    rng = np.random.default_rng(3)
    covered = 0
    for _ in range(1000):
        documents = []
        for mean in (0.4, 0.5):
            sample = rng.normal(mean, 0.2, 200)
            half = 1.96 * sample.std() / math.sqrt(200)
            documents.append(
                {"auc": sample.mean(), "auc_interval": (sample.mean() - half, sample.mean() + half)}
            )
        low, high = difference(*documents, AUC).interval
        covered += low <= 0.1 <= high
    assert 925 <= covered <= 975


@pytest.mark.parametrize(
    ("better", "old", "new", "expected"),
    [
        ("higher", 0.7, 0.8, True),
        ("lower", 0.7, 0.8, False),
        ("near one", 1.2, 0.9, True),
        ("near one", 0.9, 1.2, False),
        ("", 0.7, 0.8, None),
        ("higher", 0.7, 0.7, None),
    ],
)
def test_direction_of_each_metric(better, old, new, expected):
    assert MetricSpec("m", "m", better).is_better(old, new) is expected


def test_slices_are_matched_by_id_and_ordered_by_effect():
    def one(id, shows, logloss, value=None):
        return {
            "id": id,
            "value": value,
            "impressions": shows,
            "logloss": logloss,
            "logloss_interval": None,
            "auc": None,
        }

    before = {"site": [one("a", 100, 0.5, "news"), one("b", 1000, 0.5), one("gone", 9, 0.1)], "other": []}
    after = {
        "site": [one("a", 100, 0.9, "news"), one("b", 1000, 0.45), one("new", 9, 0.2)],
        "only": [one("a", 1, 1)],
    }
    differences = slice_differences(before, after)
    assert [(m.slot, m.value) for m in differences] == [("site", "b"), ("site", "news")]
    assert differences[0].differences["logloss"].change == pytest.approx(-0.05)
    assert slice_differences(None, after) == slice_differences(before, None) == []


def test_differing_settings_are_listed_by_path():
    found = config_differences("a: {b: 1, c: [1, 2]}\nd: x\n", "a: {b: 2, c: [1, 2]}\ne: y\n")
    assert found == {"a.b": (1, 2), "d": ("x", None), "e": (None, "y")}
    assert config_differences(None, "a: 1") is None


def test_both_reports_are_overlaid():
    a, b = document(seed=1), document(seed=2, skill=0.7)
    overlaid = overlay_figures([("A", a), ("B", b)])
    for n, one in enumerate((a, b)):
        assert overlaid["roc"]["data"][n]["y"] == one["curves"]["roc"]["true_positive_rate"]
        lost = {field["name"]: field["lost"] for field in one["importance"]}
        bars = overlaid["importance"]["data"][n]
        assert bars["x"] == [lost[name] for name in bars["y"]]
        psi = {field["name"]: field["psi"] for field in one["drift"]["fields"]}
        bars = overlaid["drift"]["data"][n]
        assert bars["x"] == [psi[name] for name in bars["y"]]
    colours = [
        {t["marker"]["color"] for t in overlaid["drift"]["data"]},
        {t["line"]["color"] for t in overlaid["roc"]["data"]},
    ]
    assert [len(found) for found in colours] == [2, 2]


def test_comparison_page_shows_all_differences():
    a, b = document(seed=1, skill=0.5), document(seed=2, skill=1.0)
    a["evaluation"]["own"], b["evaluation"]["own"] = {"ndcg": 0.25}, {"ndcg": 0.5}
    found = Parsed(comparison_page(("first", a), ("second", b)))
    change = b["evaluation"]["auc"] - a["evaluation"]["auc"]
    assert f"B ranks better than A: AUC +{change:.4f} (95 %: " in found.text
    assert "They were evaluated on different rows" not in found.text
    assert found.json("report") == b and found.json("report-before") == a
    metrics = {row[0]: row for row in found.tables[0][1:]}
    assert metrics["AUC"][3] == f"+{change:.4f} better"
    assert metrics["ndcg"][1:4] == ["0.2500", "0.5000", "+0.2500"]
    assert "1 setting differs" in found.text
    assert ["model.embedding_dim", "9", "10"] in found.tables[-1]
    assert "site = news" in found.text


def test_different_rows_and_insignificant_differences_are_stated():
    a, b = document(seed=1), document(seed=1)
    assert "No significant difference in ranking" in comparison_page(("a", a), ("b", b))
    b["evaluation"]["rows"] += 1
    assert "They were evaluated on different rows" in comparison_page(("a", a), ("b", b))
    worse = comparison_page(("a", a), ("b", document(seed=2, skill=0.4)))
    assert "B ranks worse than A" in worse


def test_document_without_metrics_can_be_compared():
    text = Parsed(comparison_page(("a", bare()), ("b", old()))).text
    assert "One of the reports has no AUC" in text
    assert "The reports have no metric in common." in text
    assert "One of the documents has no config." in text


def test_comparison_as_json():
    a, b = document(seed=1, skill=0.5), document(seed=2)
    found = comparison(a, b)
    assert found["same_rows"] is True
    auc = found["measures"]["auc"]
    assert (auc["old"], auc["new"]) == (a["evaluation"]["auc"], b["evaluation"]["auc"])
    assert auc["better"] and auc["clear"] and auc["interval"][0] > 0
    assert found["config"] == {"model.embedding_dim": [9, 10]}
    assert {one["value"] for one in found["slices"]} == {
        "news",
        "sport",
        "weather",
        "shop",
        "games",
        "travel",
    }
    assert LOGLOSS.key in found["slices"][0]
