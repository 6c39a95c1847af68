"""The HTML page of a report: self-contained, and built from the document alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from clickline.evaluation.report.comparison import METRICS, difference, slice_differences
from clickline.evaluation.report.plots import Document, figures
from clickline.evaluation.report.templating import last_known, render
from clickline.storage.storage import Storage

# The sections in order: their names in the navigation, and in the list of what the document lacks.
_SECTIONS = {
    "ranking": ("Ranking", "ROC, precision-recall, gain and lift"),
    "calibration": ("Calibration", "the calibration curve and the scores"),
    "hours": ("Hours", "metrics by hour"),
    "learning": ("Training", "the learning curve"),
    "fields": ("Fields", "field importance"),
    "slots": ("Slots", "the slot table"),
    "drift": ("Drift", "drift between train and eval rows"),
    "slices": ("Slices", "slices"),
    "lineage": ("Lineage", "the lineage"),
    "config": ("Config", "the config"),
}


def write_page(document: Mapping[str, Any], path: str, storage: Storage) -> None:
    """Write the page of a document atomically. Raises ClicklineError if Jinja or plotly is not installed."""
    storage.put(path, page(document).encode("utf-8", "backslashreplace"))


def page_of(path: str) -> str:
    """The path of a document's page: next to it, with the same stem."""
    return f"{path.removesuffix('.json')}.html"


def page(document: Mapping[str, Any]) -> str:
    """The page of a document. Sections that the document lacks are omitted and listed at the end."""
    plots = figures(document)
    run, metrics, curves, current, lineage = (
        document.get(key) or {} for key in ("run", "evaluation", "curves", "current", "lineage")
    )
    drift = [one for one in (document.get("drift") or {}).get("fields") or () if one.get("psi") is not None]
    present = {
        "ranking": {"roc", "precision_recall", "gain", "lift"} & plots.keys(),
        "calibration": "calibration" in plots,
        "hours": {"hours", "progressive"} & plots.keys(),
        "learning": "learning" in plots,
        "fields": document.get("importance"),
        "slots": document.get("slot_table") or document.get("slots"),
        "drift": drift,
        "slices": metrics.get("slices"),
        "lineage": lineage.get("dataset") or lineage.get("checkpoint"),
        "config": document.get("config"),
    }
    sections = {id: name for id, (name, _) in _SECTIONS.items() if present[id]}
    missing = [name for id, (_, name) in _SECTIONS.items() if not present[id]]
    before = current.get("evaluation") or {}
    created = run.get("created")
    return render(
        "report.html.j2",
        f"{name_of(document)} · report",
        {"report": document},
        plots,
        sections=sections | ({"left-out": "Not included"} if missing else {}),
        missing=missing,
        name=name_of(document),
        created=created and f"{str(created)[:19].replace('T', ' ')} UTC",
        document=document,
        run=run,
        gate=document.get("gate"),
        notes=list(dict.fromkeys([*(metrics.get("notes") or ()), *(document.get("notes") or ())])),
        metrics=metrics,
        curves=curves,
        current=current,
        changes={metric.key: difference(before, metrics, metric) for metric in METRICS},
        drift=sorted(drift, key=lambda one: -one["psi"]),
        slice_differences=slice_differences(current.get("slices"), metrics.get("slices")),
        lineage=lineage,
        auc_range=_auc_range,
        evaluated_epoch=last_known([e for e in document.get("epochs") or () if e.get("auc") is not None]),
    )


def _auc_range(
    hours: Sequence[Mapping[str, Any]],
) -> tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]:
    """The hours with the lowest and the highest AUC."""
    timed = [hour for hour in hours if hour.get("utc") and hour.get("auc") is not None]
    low, high = (pick(timed, key=lambda hour: float(hour["auc"]), default=None) for pick in (min, max))
    return low, high


def name_of(document: Document) -> str:
    """A short name for the evaluated model."""
    run, model = document.get("run") or {}, document.get("model") or {}
    version = (document.get("lineage") or {}).get("version") or model.get("version")
    if version is not None:
        return f"version {version}"
    if run.get("name"):
        return f"run {run['name']}"
    return f"checkpoint {model.get('checkpoint') or document.get('checkpoint') or ''}".rstrip()
