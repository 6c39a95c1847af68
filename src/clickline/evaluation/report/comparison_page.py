"""The HTML page that compares two reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import unescape
from typing import Any

from clickline.evaluation.report.comparison import (
    METRICS,
    MetricDifference,
    MetricSpec,
    config_differences,
    difference,
    slice_differences,
)
from clickline.evaluation.report.html import (
    Html,
    count,
    figure,
    joined,
    number,
    page_html,
    percent,
    section,
    signed,
    table,
    tag,
)
from clickline.evaluation.report.page import change_cell, name_of, slice_table, value_at
from clickline.evaluation.report.plots import MAX_FIELDS, Document, Figure, overlay_figures
from clickline.storage.storage import Storage

NamedReport = tuple[str, Document]
"""A document and its name."""


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
    parts = [
        ("measures", "Metrics", _metrics_section(before, after)),
        ("curves", "Curves", _plots("curves", "Curves", _CURVE_PLOTS, (before, after), figures)),
        ("time", "Over time", _plots("time", "Over time", _TIME_PLOTS, (before, after), figures)),
        ("fields", "Fields", _fields(before, after, figures)),
        ("slices", "Slices", _slice_section(before, after)),
        ("config", "Config", _config(before, after)),
    ]
    top = joined(
        [
            tag("h1", "Comparison of two reports"),
            tag("dl", _report_card("A", a, before), _report_card("B", b, after), class_="keys"),
            _verdict(before, after),
        ]
    )
    return page_html(
        f"{a} and {b} · comparison", parts, top, {"report": after, "report-before": before}, figures
    )


def _report_card(letter: str, name: str, document: Document) -> Html:
    run, gate = document.get("run") or {}, document.get("gate")
    outcome = (
        "not checked against the gate"
        if gate is None
        else f"{'passed' if gate['passed'] else 'refused by'} the gate"
    )
    facts = [run.get("project"), str(run.get("created") or "")[:19].replace("T", " "), outcome]
    return tag(
        "div",
        tag("dt", f"{letter}: {name_of(document)}"),
        tag("dd", name, class_="value name"),
        tag("dd", " · ".join(str(fact) for fact in facts if fact)),
    )


def _verdict(old: Document, new: Document) -> Html:
    """B compared with A in one line, by AUC; and a warning if they cannot be compared."""
    changes = {change.metric.key: change for change in _changes(old, new)}
    auc = changes.get("auc")
    if auc is None:
        state, text = "unknown", "One of the reports has no AUC, so they cannot be ranked."
    elif auc.significant is False or auc.better is None:
        state, text = (
            "unknown",
            f"No significant difference in ranking: AUC {signed(auc.change)}{_range(auc)}.",
        )
    elif auc.better:
        state, text = "passed", f"B ranks better than A: AUC {signed(auc.change)}{_range(auc)}."
    else:
        state, text = "refused", f"B ranks worse than A: AUC {signed(auc.change)}{_range(auc)}."
    same = _same_rows(old, new)
    warning = (
        None
        if same is not False
        else tag(
            "p",
            "They were evaluated on different rows, which may explain part of the difference: ",
            f"A on {_rows(old)}, B on {_rows(new)}.",
        )
    )
    return tag(
        "section", tag("strong", text), warning, class_=f"verdict {state}", aria_label="The comparison"
    )


def _range(change: MetricDifference) -> str:
    low, high = change.interval or (None, None)
    return "" if low is None else f" (95 %: {signed(low)} to {signed(high)})"


def _rows(document: Document) -> str:
    metrics = document.get("evaluation") or {}
    return f"{count(metrics.get('rows'))} rows with {count(metrics.get('clicks'))} clicks"


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


def _metrics_section(old: Document, new: Document) -> Html:
    changes = _changes(old, new)
    if not changes:
        return section("measures", "Metrics", tag("p", "The reports have no metric in common."))
    rows = [
        (
            change.metric.name,
            _with_interval(change.old, (old["evaluation"] or {}).get(f"{change.metric.key}_interval")),
            _with_interval(change.new, (new["evaluation"] or {}).get(f"{change.metric.key}_interval")),
            change_cell(change),
            "–"
            if change.interval is None
            else f"{signed(change.interval[0])} to {signed(change.interval[1])}",
        )
        for change in changes
    ]
    caption = (
        "In parentheses and on the right: 95 % intervals. The interval of a difference assumes that A and B were "
        "evaluated on different rows; on the same rows it is usually narrower. A difference without an interval may be "
        "due to chance."
    )
    header = ("metric", "A", "B", "B − A", "95 %")
    return section("measures", "Metrics", tag("div", table(caption, header, rows), class_="card"))


def _with_interval(value: float, interval: Sequence[float] | None) -> str:
    between = "" if interval is None else f" ({number(interval[0])} to {number(interval[1])})"
    return f"{number(value)}{between}"


_CURVE_PLOTS = {
    "roc": "ROC",
    "precision_recall": "Precision and recall",
    "calibration": "Calibration",
    "gain": "Gain",
    "lift": "Lift",
}
_TIME_PLOTS = {
    "hours": "AUC and log loss by hour",
    "progressive": "Progressive validation by hour",
    "learning": "Loss, AUC and speed during training",
}


def _plots(
    id: str,
    title: str,
    names: Mapping[str, str],
    both: tuple[Document, Document],
    figures: Mapping[str, Figure],
) -> Html:
    plots = [
        figure(
            name,
            text,
            f"{_key_figure(name, *both)} A is the solid line, B the dashed one.",
            _points(figures[name]),
            figures,
        )
        for name, text in names.items()
        if name in figures
    ]
    return section(id, title, tag("div", *plots, class_="plots")) if plots else Html("")


def _key_figure(name: str, old: Document, new: Document) -> str:
    """The key figure of a plot, as text."""
    if name in ("hours", "progressive"):
        return _hours_better(_hours(old, name), _hours(new, name))

    def both(text: str, value: Callable[[Document], str]) -> str:
        return f"{text}: A {value(old)}, B {value(new)}."

    if name == "roc":
        return both("AUC", lambda d: number(_metric(d, "auc")))
    if name == "calibration":
        return both("Predicted / actual clicks", lambda d: number(_metric(d, "calibration"), 3))
    if name == "precision_recall":
        return both(
            "Precision at 50 % recall",
            lambda d: percent(value_at(_curve(d, name, "recall"), _curve(d, name, "precision"), 0.5)),
        )
    if name == "gain":
        return both(
            "Share of clicks in the top 10 % of impressions",
            lambda d: percent(
                value_at(_curve(d, name, "share_of_shows"), _curve(d, name, "share_of_clicks"), 0.1)
            ),
        )
    if name == "lift":
        return both(
            "Lift of the top 10 % of impressions",
            lambda d: number(
                value_at(_curve(d, "gain", "share_of_shows"), _curve(d, "gain", "lift"), 0.1), 2
            ),
        )
    return both("Last training loss", lambda d: number(_last((d.get("learning") or {}).get("loss"))))


def _metric(document: Document, key: str) -> float | None:
    value: float | None = (document.get("evaluation") or {}).get(key)
    return value


def _curve(document: Document, curve: str, key: str) -> list[float] | None:
    values: list[float] | None = ((document.get("curves") or {}).get(curve) or {}).get(key)
    return values


def _last(values: Sequence[float | None] | None) -> float | None:
    return next((value for value in reversed(values or ()) if value is not None), None)


def _hours(document: Document, name: str) -> dict[int, float]:
    """The AUC of each hour that has one."""
    hours = (document.get("evaluation" if name == "hours" else "progressive") or {}).get("hours") or ()
    return {hour["hour"]: hour["auc"] for hour in hours if hour.get("auc") is not None}


def _hours_better(old: Mapping[int, float], new: Mapping[int, float]) -> str:
    both = old.keys() & new.keys()
    better = sum(new[hour] > old[hour] for hour in both)
    return f"B has the higher AUC in {better:,} of {len(both):,} common hours."


def _points(plot: Figure) -> Html:
    """All points of a plot as a table."""
    rows = [
        (
            unescape(trace["name"]),
            *(number(v) if isinstance(v, float) else "–" if v is None else v for v in point),
        )
        for trace in plot["data"]
        for point in zip(trace["x"], trace["y"], strict=False)
    ]
    return table("All points", ("line", "x", "y"), rows)


def _fields(old: Document, new: Document, figures: Mapping[str, Figure]) -> Html:
    plots = []
    for id, title, header, values in (
        ("importance", "AUC lost when a field is shuffled", "AUC lost", _importance),
        ("drift", "Drift between train and eval rows (PSI)", "PSI", _drift),
    ):
        a, b = values(old), values(new)
        names = dict.fromkeys((*b, *a))
        changes_by_field = {name: b[name] - a[name] for name in names if name in a and name in b}
        largest = max(changes_by_field, key=lambda name: abs(changes_by_field[name]), default=None)
        text = (
            "Only one of the reports has it."
            if largest is None
            else f"Largest change: {largest}, {signed(changes_by_field[largest])}."
        )
        if len(names) > MAX_FIELDS:
            text += f" The plot shows the first {MAX_FIELDS} fields, the table all of them."
        rows = [
            (name, number(a.get(name)), number(b.get(name)), signed(changes_by_field.get(name)))
            for name in names
        ]
        shown = table("All fields", ("field", f"{header}, A", f"{header}, B", "B − A"), rows)
        plots.append(figure(id, title, text, shown, figures))
    present = [plot for plot in plots if plot]
    return section("fields", "Fields", tag("div", *present, class_="plots")) if present else Html("")


def _importance(document: Document) -> dict[str, float]:
    return {one["name"]: one["lost"] for one in document.get("importance") or ()}


def _drift(document: Document) -> dict[str, float]:
    fields = (document.get("drift") or {}).get("fields") or ()
    return {one["name"]: one["psi"] for one in fields if one.get("psi") is not None}


def _slice_section(old: Document, new: Document) -> Html:
    differences = slice_differences(_slices(old), _slices(new))
    return (
        section("slices", "Slices", tag("div", slice_table(differences, "A"), class_="card"))
        if differences
        else Html("")
    )


def _config(old: Document, new: Document) -> Html:
    found = config_differences(old.get("config"), new.get("config"))
    if found is None:
        return section("config", "Config", tag("p", "One of the documents has no config."))
    if not found:
        return section("config", "Config", tag("p", "Identical in both."))
    rows = [(key, *("–" if value is None else value for value in pair)) for key, pair in found.items()]
    caption = "1 setting differs" if len(found) == 1 else f"{len(found):,} settings differ"
    return section(
        "config",
        "Config",
        tag("div", table(caption, ("setting", "A", "B"), rows, text_columns=3), class_="card"),
    )
