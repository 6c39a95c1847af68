"""The HTML page that compares two reports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clickline.evaluation.report.comparison import (
    METRICS,
    MetricDifference,
    MetricSpec,
    config_differences,
    difference,
    slice_differences,
)
from clickline.evaluation.report.page import name_of
from clickline.evaluation.report.plots import Document, overlay_figures
from clickline.evaluation.report.templating import last_known, number, percent, render, value_at
from clickline.storage.storage import Storage

NamedReport = tuple[str, Document]
"""A document and its name."""

# The overlaid plots of each section: their titles and key figures.
_OVERLAYS = {
    "curves": {
        "roc": ("ROC", "AUC"),
        "precision_recall": ("Precision and recall", "Precision at 50 % recall"),
        "calibration": ("Calibration", "Predicted / actual clicks"),
        "gain": ("Gain", "Share of clicks in the top 10 % of impressions"),
        "lift": ("Lift", "Lift of the top 10 % of impressions"),
    },
    "time": {
        "hours": ("AUC and log loss by hour", ""),
        "progressive": ("Progressive validation by hour", ""),
        "learning": ("Loss, AUC and speed during training", "Last training loss"),
    },
}


def write_comparison(old: NamedReport, new: NamedReport, path: str, storage: Storage) -> None:
    """Write the comparison page atomically. Raises ClicklineError if plotly is not installed."""
    storage.put(path, comparison_page(old, new).encode("utf-8", "backslashreplace"))


def comparison(old: Document, new: Document) -> dict[str, Any]:
    """The differences between two documents as JSON."""
    config = config_differences(old.get("config"), new.get("config"))
    return {
        "same_rows": _same_rows(old, new),
        "measures": {change.metric.key: change.to_json() for change in _changes(old, new)},
        "config": None if config is None else {key: list(pair) for key, pair in config.items()},
        "slices": [one.to_json() for one in slice_differences(_slices(old), _slices(new))],
    }


def comparison_page(old: NamedReport, new: NamedReport) -> str:
    """The page: A is the old report, B the new one; differences are B minus A."""
    (a, before), (b, after) = old, new
    figures = overlay_figures([(f"A, {a}", before), (f"B, {b}", after)])
    changes = _changes(before, after)
    slices = slice_differences(_slices(before), _slices(after))
    sections = {
        "measures": ("Metrics", True),
        "curves": ("Curves", _OVERLAYS["curves"].keys() & figures.keys()),
        "time": ("Over time", _OVERLAYS["time"].keys() & figures.keys()),
        "fields": ("Fields", {"importance", "drift"} & figures.keys()),
        "slices": ("Slices", slices),
        "config": ("Config", True),
    }
    return render(
        "comparison.html.j2",
        f"{a} and {b} · comparison",
        {"report": after, "report-before": before},
        figures,
        sections={id: name for id, (name, present) in sections.items() if present},
        a=_side(a, before),
        b=_side(b, after),
        changes=changes,
        auc=next((change for change in changes if change.metric.key == "auc"), None),
        same_rows=_same_rows(before, after),
        overlays=_OVERLAYS,
        common_hours={
            id: _hours_better(_hour_aucs(before, part), _hour_aucs(after, part))
            for id, part in (("hours", "evaluation"), ("progressive", "progressive"))
        },
        changed_fields={
            id: _changed_fields(values(before), values(after))
            for id, values in (("importance", _importance), ("drift", _drift))
        },
        slice_differences=slices,
        settings=config_differences(before.get("config"), after.get("config")),
    )


def _side(name: str, document: Document) -> dict[str, Any]:
    """What the page shows of one of the two reports."""
    metrics, curves = document.get("evaluation") or {}, document.get("curves") or {}
    pr, gain = curves.get("precision_recall") or {}, curves.get("gain") or {}
    shares = gain.get("share_of_impressions")
    return {
        "name": name,
        "model": name_of(document),
        "document": document,
        "metrics": metrics,
        "key_figures": {
            "roc": number(metrics.get("auc")),
            "precision_recall": percent(value_at(pr.get("recall"), pr.get("precision"), 0.5)),
            "calibration": number(metrics.get("calibration"), 3),
            "gain": percent(value_at(shares, gain.get("share_of_clicks"), 0.1)),
            "lift": number(value_at(shares, gain.get("lift"), 0.1), 2),
            "learning": number(last_known((document.get("learning") or {}).get("loss"))),
        },
    }


def _same_rows(old: Document, new: Document) -> bool | None:
    """Whether both were evaluated on the same rows, judging by the counts."""
    a, b = old.get("evaluation"), new.get("evaluation")
    if not a or not b:
        return None
    return bool(a["rows"] == b["rows"] and abs(a["clicks"] - b["clicks"]) <= 1e-6 * max(1.0, a["clicks"]))


def _changes(old: Document, new: Document) -> list[MetricDifference]:
    a, b = old.get("evaluation") or {}, new.get("evaluation") or {}
    own_a, own_b = a.get("own") or {}, b.get("own") or {}
    found = [difference(a, b, metric) for metric in METRICS]
    found += [difference(own_a, own_b, MetricSpec(name, name, "")) for name in own_a]
    return [change for change in found if change is not None]


def _slices(document: Document) -> Mapping[str, Any] | None:
    slices: Mapping[str, Any] | None = (document.get("evaluation") or {}).get("slices")
    return slices


def _hour_aucs(document: Document, part: str) -> dict[int, float]:
    """The AUC of each hour that has one."""
    hours = (document.get(part) or {}).get("hours") or ()
    return {hour["hour"]: hour["auc"] for hour in hours if hour.get("auc") is not None}


def _hours_better(old: Mapping[int, float], new: Mapping[int, float]) -> tuple[int, int]:
    """The number of hours in which the new AUC is higher, and of all hours that both have."""
    both = old.keys() & new.keys()
    return sum(new[hour] > old[hour] for hour in both), len(both)


def _importance(document: Document) -> dict[str, float]:
    return {one["name"]: one["lost"] for one in document.get("importance") or ()}


def _drift(document: Document) -> dict[str, float]:
    fields = (document.get("drift") or {}).get("fields") or ()
    return {one["name"]: one["psi"] for one in fields if one.get("psi") is not None}


def _changed_fields(
    old: Mapping[str, float], new: Mapping[str, float]
) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """The values of each field, and the field that changed most; None if no field is in both."""
    fields: list[dict[str, Any]] = [
        {
            "name": name,
            "a": old.get(name),
            "b": new.get(name),
            "change": new[name] - old[name] if name in old and name in new else None,
        }
        for name in dict.fromkeys((*new, *old))
    ]
    changed = [field for field in fields if field["change"] is not None]
    return fields, max(changed, key=lambda field: abs(field["change"]), default=None)
