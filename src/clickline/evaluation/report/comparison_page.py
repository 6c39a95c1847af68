"""Two evaluations side by side as one page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import unescape
from typing import Any

from clickline.evaluation.report.comparison import (
    MEASURES,
    Difference,
    Measure,
    config_differences,
    difference,
    moved_slices,
)
from clickline.evaluation.report.html import (
    Html,
    count,
    figure,
    frame,
    joined,
    number,
    percent,
    section,
    signed,
    table,
    tag,
)
from clickline.evaluation.report.page import at, changed, moved_table, name_of
from clickline.evaluation.report.plots import SHOWN_FIELDS, Document, Figure, overlaid
from clickline.storage.storage import Storage

Named = tuple[str, Document]
"""A document and what it is called."""


def write_comparison(old: Named, new: Named, path: str, storage: Storage) -> None:
    """Write the page of two documents, whole or not at all. ClicklineError where plotly is not installed."""
    storage.put(path, comparison_page(old, new).encode("utf-8", "backslashreplace"))


def comparison(old: Document, new: Document) -> dict[str, Any]:
    """What differs, as figures."""
    config = config_differences(old.get("config"), new.get("config"))
    return {
        "same_rows": _same_rows(old, new),
        "measures": {change.measure.key: change.to_json() for change in _changes(old, new)},
        "config": None if config is None else {key: list(pair) for key, pair in config.items()},
        "slices": [one.to_json() for one in moved_slices(_slices(old), _slices(new))],
    }


def comparison_page(old: Named, new: Named) -> str:
    """The page: A is the old one, B the new; a difference is B less A."""
    (a, before), (b, after) = old, new
    drawn = overlaid([(f"A, {a}", before), (f"B, {b}", after)])
    parts = [
        ("measures", "Measures", _measures(before, after)),
        ("curves", "Curves", _plots("curves", "Curves", _CURVES, (before, after), drawn)),
        ("time", "Over time", _plots("time", "Over time", _TIMES, (before, after), drawn)),
        ("fields", "Fields", _fields(before, after, drawn)),
        ("slices", "Slices", _moved(before, after)),
        ("config", "Config", _config(before, after)),
    ]
    top = joined(
        [
            tag("h1", "Two reports side by side"),
            tag("dl", _about("A", a, before), _about("B", b, after), class_="keys"),
            _verdict(before, after),
        ]
    )
    return frame(f"{a} and {b} · comparison", parts, top, {"report": after, "report-before": before}, drawn)


def _about(letter: str, name: str, document: Document) -> Html:
    run, gate = document.get("run") or {}, document.get("gate")
    told = (
        "the gate was not asked"
        if gate is None
        else f"the gate {'passed' if gate['passed'] else 'refused'} it"
    )
    facts = [run.get("project"), str(run.get("created") or "")[:19].replace("T", " "), told]
    return tag(
        "div",
        tag("dt", f"{letter}: {name_of(document)}"),
        tag("dd", name, class_="value name"),
        tag("dd", " · ".join(str(fact) for fact in facts if fact)),
    )


def _verdict(old: Document, new: Document) -> Html:
    """B against A in one line, by the AUC; and whether they can be compared at all."""
    changes = {change.measure.key: change for change in _changes(old, new)}
    auc = changes.get("auc")
    if auc is None:
        state, words = "unknown", "One of the two has no AUC, so they cannot be ranked."
    elif auc.clear is False or auc.better is None:
        state, words = "unknown", f"Neither ranks clearly better: AUC {signed(auc.change)}{_range(auc)}."
    elif auc.better:
        state, words = "passed", f"B ranks better than A: AUC {signed(auc.change)}{_range(auc)}."
    else:
        state, words = "refused", f"B ranks worse than A: AUC {signed(auc.change)}{_range(auc)}."
    same = _same_rows(old, new)
    warning = (
        None
        if same is not False
        else tag(
            "p",
            "They were measured on different rows, so part of the difference may come of the rows: ",
            f"A on {_rows(old)}, B on {_rows(new)}.",
        )
    )
    return tag(
        "section", tag("strong", words), warning, class_=f"verdict {state}", aria_label="The comparison"
    )


def _range(change: Difference) -> str:
    low, high = change.interval or (None, None)
    return "" if low is None else f" (95 %: {signed(low)} to {signed(high)})"


def _rows(document: Document) -> str:
    measured = document.get("evaluation") or {}
    return f"{count(measured.get('rows'))} with {count(measured.get('clicks'))} clicks"


def _same_rows(old: Document, new: Document) -> bool | None:
    """Whether the figures come from the same rows, as far as their numbers tell."""
    a, b = old.get("evaluation"), new.get("evaluation")
    if not a or not b:
        return None
    return bool(a["rows"] == b["rows"] and abs(a["clicks"] - b["clicks"]) <= 1e-6 * max(1.0, a["clicks"]))


def _changes(old: Document, new: Document) -> list[Difference]:
    a, b = old.get("evaluation") or {}, new.get("evaluation") or {}
    own_a, own_b = a.get("own") or {}, b.get("own") or {}
    found = [difference(a, b, measure) for measure in MEASURES]
    found += [difference(own_a, own_b, Measure(name, name, "")) for name in own_a]
    return [change for change in found if change is not None]


def _slices(document: Document) -> Mapping[str, Any] | None:
    slices: Mapping[str, Any] | None = (document.get("evaluation") or {}).get("slices")
    return slices


def _measures(old: Document, new: Document) -> Html:
    changes = _changes(old, new)
    if not changes:
        return section("measures", "Measures", tag("p", "There is no measure that both have."))
    rows = [
        (
            change.measure.name,
            _with_interval(change.old, (old["evaluation"] or {}).get(f"{change.measure.key}_interval")),
            _with_interval(change.new, (new["evaluation"] or {}).get(f"{change.measure.key}_interval")),
            changed(change),
            "–"
            if change.interval is None
            else f"{signed(change.interval[0])} to {signed(change.interval[1])}",
        )
        for change in changes
    ]
    caption = (
        "In brackets and on the right: 95 % intervals. That of the difference is reckoned as if A and B had other "
        "rows; on the same rows the true one is as a rule narrower. Where there is none, it may be chance."
    )
    header = ("measure", "A", "B", "B − A", "95 %")
    return section("measures", "Measures", tag("div", table(caption, header, rows), class_="card"))


def _with_interval(value: float, interval: Sequence[float] | None) -> str:
    between = "" if interval is None else f" ({number(interval[0])} to {number(interval[1])})"
    return f"{number(value)}{between}"


_CURVES = {
    "roc": "ROC",
    "precision_recall": "Precision and recall",
    "calibration": "Calibration",
    "gain": "Gain",
    "lift": "Lift",
}
_TIMES = {
    "hours": "AUC and log loss by hour",
    "progressive": "Each hour before it was learned",
    "learning": "Loss, AUC and speed while learning",
}


def _plots(
    id: str,
    title: str,
    names: Mapping[str, str],
    both: tuple[Document, Document],
    drawn: Mapping[str, Figure],
) -> Html:
    plots = [
        figure(
            name,
            words,
            f"{_key_number(name, *both)} A is the full line, B the dashed one.",
            _points(drawn[name]),
            drawn,
        )
        for name, words in names.items()
        if name in drawn
    ]
    return section(id, title, tag("div", *plots, class_="plots")) if plots else Html("")


def _key_number(name: str, old: Document, new: Document) -> str:
    """What a plot says, in words."""
    if name in ("hours", "progressive"):
        return _hours_won(_hours(old, name), _hours(new, name))

    def told(words: str, value: Callable[[Document], str]) -> str:
        return f"{words}: A {value(old)}, B {value(new)}."

    if name == "roc":
        return told("AUC", lambda d: number(_measured(d, "auc")))
    if name == "calibration":
        return told("Predicted / real clicks", lambda d: number(_measured(d, "calibration"), 3))
    if name == "precision_recall":
        return told(
            "Clicks among the highest scores that hold half of them",
            lambda d: percent(at(_curve(d, name, "recall"), _curve(d, name, "precision"), 0.5)),
        )
    if name == "gain":
        return told(
            "Clicks in the best 10 % of shows",
            lambda d: percent(at(_curve(d, name, "share_of_shows"), _curve(d, name, "share_of_clicks"), 0.1)),
        )
    if name == "lift":
        return told(
            "Lift of the best 10 % of shows",
            lambda d: number(at(_curve(d, "gain", "share_of_shows"), _curve(d, "gain", "lift"), 0.1), 2),
        )
    return told(
        "Last loss of what was learned", lambda d: number(_last((d.get("learning") or {}).get("loss")))
    )


def _measured(document: Document, key: str) -> float | None:
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


def _hours_won(old: Mapping[int, float], new: Mapping[int, float]) -> str:
    both = old.keys() & new.keys()
    won = sum(new[hour] > old[hour] for hour in both)
    return f"Of {len(both):,} hours that both have, B ranks better in {won:,}."


def _points(drawn: Figure) -> Html:
    """The values of both, one after the other."""
    rows = [
        (
            unescape(trace["name"]),
            *(number(v) if isinstance(v, float) else "–" if v is None else v for v in point),
        )
        for trace in drawn["data"]
        for point in zip(trace["x"], trace["y"], strict=False)
    ]
    return table("All points", ("line", "x", "y"), rows)


def _fields(old: Document, new: Document, drawn: Mapping[str, Figure]) -> Html:
    plots = []
    for id, title, header, values in (
        ("importance", "AUC lost when a field is shuffled", "AUC lost", _importance),
        ("drift", "Drift between train and eval rows (PSI)", "PSI", _drift),
    ):
        a, b = values(old), values(new)
        names = dict.fromkeys((*b, *a))
        moves = {name: b[name] - a[name] for name in names if name in a and name in b}
        most = max(moves, key=lambda name: abs(moves[name]), default=None)
        words = (
            "Only one of the two has it." if most is None else f"Changed most: {most}, {signed(moves[most])}."
        )
        if len(names) > SHOWN_FIELDS:
            words += f" The plot shows the first {SHOWN_FIELDS}, the table all."
        rows = [(name, number(a.get(name)), number(b.get(name)), signed(moves.get(name))) for name in names]
        shown = table("All fields", ("field", f"{header}, A", f"{header}, B", "B − A"), rows)
        plots.append(figure(id, title, words, shown, drawn))
    there = [plot for plot in plots if plot]
    return section("fields", "Fields", tag("div", *there, class_="plots")) if there else Html("")


def _importance(document: Document) -> dict[str, float]:
    return {one["name"]: one["lost"] for one in document.get("importance") or ()}


def _drift(document: Document) -> dict[str, float]:
    fields = (document.get("drift") or {}).get("fields") or ()
    return {one["name"]: one["psi"] for one in fields if one.get("psi") is not None}


def _moved(old: Document, new: Document) -> Html:
    moved = moved_slices(_slices(old), _slices(new))
    return (
        section("slices", "Slices", tag("div", moved_table(moved, "A"), class_="card")) if moved else Html("")
    )


def _config(old: Document, new: Document) -> Html:
    found = config_differences(old.get("config"), new.get("config"))
    if found is None:
        return section("config", "Config", tag("p", "One of the two documents does not hold its config."))
    if not found:
        return section("config", "Config", tag("p", "The same in both."))
    rows = [(key, *("–" if value is None else value for value in pair)) for key, pair in found.items()]
    caption = "1 setting differs" if len(found) == 1 else f"{len(found):,} settings differ"
    return section(
        "config", "Config", tag("div", table(caption, ("setting", "A", "B"), rows, words=3), class_="card")
    )
