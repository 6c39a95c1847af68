"""The figures of a report have the values of its document."""

from __future__ import annotations

import json

import pytest
from example_documents import HOSTILE, bare, document, hostile, long, old, one_class

from clickline.evaluation.report.plots import DARK, MAX_FIELDS, figures, overlay_figures

ALL = {"roc", "precision_recall", "calibration", "gain", "lift", "hours", "learning", "importance", "drift"}


def named(figure, name, axis=None):
    (found,) = [
        t for t in figure["data"] if t["name"].startswith(name) and t.get("yaxis", "y") == (axis or "y")
    ]
    return found


@pytest.fixture(scope="module")
def whole():
    return document()


def test_complete_document_has_all_figures_as_plain_json(whole):
    all_figures = figures(whole)
    assert all_figures.keys() == ALL
    assert json.loads(json.dumps(all_figures)) == all_figures


def test_curves_are_overlaid_with_the_current_version(whole):
    all_figures = figures(whole)
    for name, source in (("this model", whole), ("current version 3", whole["current"])):
        curves = source["curves"]
        roc, pr = named(all_figures["roc"], name), named(all_figures["precision_recall"], name)
        assert (roc["x"], roc["y"]) == (
            curves["roc"]["false_positive_rate"],
            curves["roc"]["true_positive_rate"],
        )
        assert roc["name"] == f"{name}, AUC {source['evaluation']['auc']:.4f}"
        assert (pr["x"], pr["y"]) == (
            curves["precision_recall"]["recall"],
            curves["precision_recall"]["precision"],
        )
        gain, lift = named(all_figures["gain"], name), named(all_figures["lift"], name)
        assert (gain["x"], gain["y"]) == (
            curves["gain"]["share_of_impressions"],
            curves["gain"]["share_of_clicks"],
        )
        assert lift["y"] == curves["gain"]["lift"]


def test_calibration_figure_has_interval_and_histogram(whole):
    data = figures(whole)["calibration"]["data"]
    low, high, line = data[:3]
    curve, scores = whole["curves"]["calibration"], whole["curves"]["scores"]
    assert low["x"] == high["x"] == line["x"] == curve["predicted"]
    assert (low["y"], high["y"], line["y"]) == (curve["low"], curve["high"], curve["observed"])
    assert high["fill"] == "tonexty"
    clicks, others = data[-2:]
    assert (clicks["y"], others["y"]) == (scores["clicks"], scores["others"])
    assert clicks["x"] == scores["edges"][:-1]
    ends = [start + width for start, width in zip(clicks["x"], clicks["width"], strict=True)]
    assert ends == pytest.approx(scores["edges"][1:])


def test_hour_figure_has_intervals(whole):
    figure = figures(whole)["hours"]
    hours = whole["evaluation"]["hours"]
    for key, axis in (("auc", "y"), ("logloss", "y2")):
        trace = named(figure, "this model", axis)
        assert trace["x"] == [hour["utc"] for hour in hours]
        assert trace["y"] == [hour[key] for hour in hours]
        for hour, above, below in zip(
            hours, trace["error_y"]["array"], trace["error_y"]["arrayminus"], strict=True
        ):
            low, high = hour[f"{key}_interval"]
            assert (hour[key] + above, hour[key] - below) == pytest.approx((high, low))


def test_no_line_crosses_missing_hours():
    found = long()
    hours = found["evaluation"]["hours"]
    hours.insert(0, {**hours[0], "hour": -1, "utc": None})
    trace = named(figures(found)["hours"], "this model")
    assert len(trace["x"]) == 476 + 1
    gap = trace["y"].index(None)
    assert trace["x"][gap - 1 : gap + 2] == ["2026-05-18T15", "2026-05-18T16", "2026-05-19T16"]
    known = [y for n, y in enumerate(trace["y"]) if n != gap]
    assert known == [hour["auc"] for hour in hours[1:]]
    assert "progressive" in figures(found)


def test_learning_curve_has_eval_metrics(whole):
    figure = figures(whole)["learning"]
    for key, axis in (("loss", "y"), ("auc", "y2"), ("rows_per_second", "y3")):
        trace = next(t for t in figure["data"] if t["name"] == "this model" and t["yaxis"] == axis)
        assert (trace["x"], trace["y"]) == (whole["learning"]["step"], whole["learning"][key])
    after = named(figure, "this model, eval after", "y2")
    assert list(zip(after["x"], after["y"], strict=True)) == [(e["step"], e["auc"]) for e in whole["epochs"]]


def test_fields_are_sorted_and_limited():
    found = long()
    all_figures = figures(found)
    lost = {one["name"]: one["lost"] for one in found["importance"]}
    (bars,) = all_figures["importance"]["data"]
    assert len(bars["y"]) == MAX_FIELDS
    assert bars["x"] == sorted(lost.values(), reverse=True)[:MAX_FIELDS]
    assert [lost[name] for name in bars["y"]] == bars["x"]
    (bars,) = all_figures["drift"]["data"]
    psi = {one["name"]: one["psi"] for one in found["drift"]["fields"]}
    assert bars["x"] == [psi[name] for name in bars["y"]] == sorted(psi.values(), reverse=True)[:MAX_FIELDS]
    assert [shape["x0"] for shape in all_figures["drift"]["layout"]["shapes"]] == [0.1, 0.25]
    colours = bars["marker"]["color"]
    levels = [(value >= 0.1) + (value >= 0.25) for value in bars["x"]]
    assert len(set(zip(levels, colours, strict=True))) == len(set(levels)) == len(set(colours))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (bare, {"learning"}),
        (one_class, {"calibration", "hours", "learning", "drift"}),
        (old, {"hours", "learning"}),
        (dict, set()),
    ],
)
def test_missing_data_has_no_figure(make, expected):
    assert figures(make()).keys() == expected


def test_single_class_has_only_a_loss_by_hour():
    (trace,) = figures(one_class())["hours"]["data"]
    assert trace["yaxis"] == "y"
    assert trace["y"] == [hour["logloss"] for hour in one_class()["evaluation"]["hours"]]


def test_user_text_is_escaped_for_plotly():
    figure = figures(hostile())["importance"]
    (bars,) = figure["data"]
    place = bars["y"].index(HOSTILE)
    for text in (bars["customdata"][place], figure["layout"]["yaxis"]["ticktext"][place]):
        assert "<" not in text and text.startswith("&lt;/script&gt;")
    all_figures = overlay_figures([(HOSTILE, document()), ("b", document(seed=2))])
    assert not any("<" in trace["name"] for figure in all_figures.values() for trace in figure["data"])
    assert not any(
        HOSTILE[-9:] in t.get("hovertemplate", "") for f in all_figures.values() for t in f["data"]
    )


def test_every_figure_colour_has_a_dark_one(whole):
    colours = set()

    def walk(tree, key=""):
        if isinstance(tree, dict):
            for name, value in tree.items():
                walk(value, name)
        elif isinstance(tree, list):
            for value in tree:
                walk(value, key)
        elif isinstance(tree, str) and "color" in key:
            colours.add(tree)

    walk(figures(whole))
    assert len(colours) > 8
    assert colours - DARK.keys() == {"rgba(0,0,0,0)"}
