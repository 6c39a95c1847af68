"""The HTML page of a report: self-contained, and built from the document alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from clickline.evaluation.report.comparison import (
    METRICS,
    MetricDifference,
    SliceDifference,
    difference,
    slice_differences,
)
from clickline.evaluation.report.html import (
    Html,
    collapsible,
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
from clickline.evaluation.report.plots import DRIFT_LARGE, DRIFT_SOME, MAX_FIELDS, Document, Figure, figures
from clickline.storage.storage import Storage

_BY_KEY = {metric.key: metric for metric in METRICS}
_MAX_SLICES = 30
_POINTS = "at most 200 points of the curve"


def write_page(document: Mapping[str, Any], path: str, storage: Storage) -> None:
    """Write the page of a document atomically. Raises ClicklineError if plotly is not installed."""
    storage.put(path, page(document).encode("utf-8", "backslashreplace"))


def page_of(path: str) -> str:
    """The path of a document's page: next to it, with the same stem."""
    return f"{path.removesuffix('.json')}.html"


def page(document: Mapping[str, Any]) -> str:
    """The page of a document. Parts that the document lacks are omitted and listed at the end."""
    figures_by_id = figures(document)
    parts = [
        ("ranking", "Ranking", _ranking(document, figures_by_id)),
        ("calibration", "Calibration", _calibration(document, figures_by_id)),
        ("hours", "Hours", _hours(document, figures_by_id)),
        ("learning", "Training", _learning(document, figures_by_id)),
        ("fields", "Fields", _importance(document, figures_by_id)),
        ("slots", "Slots", _slots(document)),
        ("drift", "Drift", _drift(document, figures_by_id)),
        ("slices", "Slices", _slices(document)),
        ("lineage", "Lineage", _lineage(document)),
        ("config", "Config", _config(document)),
    ]
    missing_names = [_PART_NAMES[id] for id, _, content in parts if not content]
    parts.append(("left-out", "Not included", _missing_parts(missing_names)))
    top = joined([_heading(document), _verdict(document), _key_metrics(document)])
    return page_html(f"{name_of(document)} · report", parts, top, {"report": document}, figures_by_id)


_PART_NAMES = {
    "ranking": "ROC, precision-recall, gain and lift",
    "calibration": "the calibration curve and the scores",
    "hours": "metrics by hour",
    "learning": "the learning curve",
    "fields": "field importance",
    "slots": "the slot table",
    "drift": "drift between train and eval rows",
    "slices": "slices",
    "lineage": "the lineage",
    "config": "the config",
}


# ── the top ────────────────────────────────────────────────────────────────────────────────────


def name_of(document: Document) -> str:
    """A short name for the evaluated model."""
    run, model = document.get("run") or {}, document.get("model") or {}
    version = (document.get("lineage") or {}).get("version") or model.get("version")
    if version is not None:
        return f"version {version}"
    if run.get("name"):
        return f"run {run['name']}"
    return f"checkpoint {model.get('checkpoint') or document.get('checkpoint') or ''}".rstrip()


def _heading(document: Document) -> Html:
    run = document.get("run") or {}
    facts = [run.get("project"), _created_at(run.get("created")), run.get("home")]
    name = name_of(document)
    return joined(
        [
            tag("h1", f"Report of {name}"),
            tag("p", " · ".join(str(fact) for fact in facts if fact), class_="quiet"),
        ]
    )


def _created_at(created: object) -> str | None:
    return None if not created else f"{str(created)[:19].replace('T', ' ')} UTC"


def _verdict(document: Document) -> Html:
    gate = document.get("gate")
    if gate is None:
        state, text = "unknown", "Not checked against the gate"
    elif gate["passed"]:
        state, text = "passed", "✓ The gate passed the model"
    else:
        state, text = "refused", "✗ The gate refused the model"
    items = [("reason", "", reason) for reason in (gate or {}).get("reasons") or ()]
    items += [("warning", " some", warning) for warning in (gate or {}).get("warnings") or ()]
    items += [("note", "", note) for note in _notes(document)]
    lines = [tag("li", tag("span", kind, class_=f"note{colour}"), " ", text) for kind, colour, text in items]
    return tag(
        "section",
        tag("strong", text),
        tag("ul", *lines) if lines else None,
        class_=f"verdict {state}",
        aria_label="The gate's verdict",
    )


def _notes(document: Document) -> list[str]:
    metrics = (document.get("evaluation") or {}).get("notes") or ()
    return list(dict.fromkeys([*metrics, *(document.get("notes") or ())]))


def _key_metrics(document: Document) -> Html:
    metrics = document.get("evaluation")
    if not metrics:
        return tag("p", "Not evaluated: there were no eval rows.", class_="quiet")
    current = document.get("current") or {}
    before = current.get("evaluation") or {}

    def card(key: str, name: str, *more: object) -> Html:
        interval = metrics.get(f"{key}_interval")
        between = None if interval is None else f"95 %: {number(interval[0])} to {number(interval[1])}"
        change = difference(before, metrics, _BY_KEY[key])
        against = None
        if change is not None:
            baseline = "than" if change.better is not None else "against"
            against = tag(
                "dd",
                change_cell(change),
                f" {baseline} version {current.get('version')} ({number(change.old)})",
            )
        return tag(
            "div",
            tag("dt", name),
            tag("dd", number(metrics.get(key)), class_="value"),
            None if between is None else tag("dd", between),
            *(tag("dd", text) for text in more),
            against,
        )

    rows = tag(
        "div",
        tag("dt", "Rows evaluated"),
        tag("dd", count(metrics.get("rows")), class_="value"),
        tag("dd", f"{count(metrics.get('clicks'))} clicks in {count(metrics.get('shows'))} impressions"),
        tag("dd", f"base rate {percent(metrics.get('base_rate'))}"),
    )
    own = [
        tag("div", tag("dt", name), tag("dd", f"{value:.6g}", class_="value"), tag("dd", "custom metric"))
        for name, value in (metrics.get("own") or {}).items()
    ]
    return tag(
        "dl",
        card("auc", "AUC"),
        card("logloss", "Log loss"),
        card("calibration", "Calibration", "predicted / actual clicks; ideal: 1"),
        card("normalised_entropy", "Normalised entropy", "below 1 beats the base rate"),
        rows,
        *own,
        class_="keys",
    )


def change_cell(change: MetricDifference) -> Html:
    """The change and its direction, such as `+0.0077 better`. Only significant changes are coloured."""
    if change.better is None:
        return tag("span", signed(change.change))
    text = "better" if change.better else "worse"
    if change.significant is False:
        return tag("span", f"{signed(change.change)} ({text}, not significant)")
    return tag("span", f"{signed(change.change)} {text}", class_=text if change.significant else None)


# ── the plots ──────────────────────────────────────────────────────────────────────────────────


def _ranking(document: Document, figures_by_id: Mapping[str, Figure]) -> Html:
    metrics, curves = document.get("evaluation") or {}, document.get("curves") or {}
    roc, pr, gain = (curves.get(key) or {} for key in ("roc", "precision_recall", "gain"))
    auc, rate = metrics.get("auc"), metrics.get("base_rate")
    current = document.get("current") or {}
    live = (current.get("evaluation") or {}).get("auc")
    beside = "" if live is None else f" Version {current.get('version')} on the same rows: {number(live)}."
    pairs = (
        "" if auc is None else f"AUC {number(auc)}: in {percent(auc)} of all pairs, the click scores higher than the "
        f"non-click. Dotted: chance.{beside}"
    )  # fmt: skip
    half = value_at(pr.get("recall"), pr.get("precision"), 0.5)
    found = "" if half is None else f"Precision at 50 % recall: {percent(half)}. "
    tenth = value_at(gain.get("share_of_shows"), gain.get("share_of_clicks"), 0.1)
    lift = value_at(gain.get("share_of_shows"), gain.get("lift"), 0.1)
    plots = [
        figure("roc", "ROC", pairs, _curve_table(_POINTS, roc), figures_by_id),
        figure(
            "precision_recall",
            "Precision and recall",
            f"{found}Base rate (dotted): {percent(rate)}.",
            _curve_table(_POINTS, pr),
            figures_by_id,
        ),
        figure(
            "gain",
            "Gain",
            ""
            if tenth is None
            else f"The top 10 % of impressions by score get {percent(tenth)} of the clicks.",
            _curve_table(_POINTS, {k: gain[k] for k in ("share_of_shows", "share_of_clicks") if k in gain}),
            figures_by_id,
        ),
        figure(
            "lift",
            "Lift",
            ""
            if lift is None
            else f"Clicks are {lift:.2f} times as frequent in the top 10 % of impressions as overall.",
            _curve_table(_POINTS, {k: gain[k] for k in ("share_of_shows", "lift") if k in gain}),
            figures_by_id,
        ),
    ]
    return _part("ranking", "Ranking quality", plots)


def _calibration(document: Document, figures_by_id: Mapping[str, Figure]) -> Html:
    metrics, curves = document.get("evaluation") or {}, document.get("curves") or {}
    curve, scores = curves.get("calibration") or {}, curves.get("scores") or {}
    text = (
        f"Predicted / actual clicks: {number(metrics.get('calibration'), 3)}. Mean distance between predicted "
        f"and observed rate in 20 bins of equal weight (ECE): {percent(metrics.get('ece'))}. Shaded: 95 % interval "
        "of the observed rate; dotted: perfect calibration; below: histogram of scores."
    )
    values = [_curve_table("Bins of equal weight", curve)]
    if scores.get("edges"):
        edges = scores["edges"]
        rows = zip(edges, edges[1:], scores["clicks"], scores["others"], strict=False)
        values.append(
            table(
                "Impressions by score",
                ("from", "to", "clicks", "non-clicks"),
                [
                    (number(low), number(high), count(clicks), count(others))
                    for low, high, clicks, others in rows
                ],
            )
        )
    return _part(
        "calibration",
        "Calibration",
        [figure("calibration", "Calibration curve and scores", text, joined(values), figures_by_id)],
    )


_HOUR_HEADER = ("hour (UTC)", "rows", "clicks", "AUC", "95 %", "log loss", "95 %", "calibration")


def _hours(document: Document, figures_by_id: Mapping[str, Figure]) -> Html:
    plots = []
    for id, title, hours, more in (
        ("hours", "AUC and log loss by hour", (document.get("evaluation") or {}).get("hours"), ""),
        (
            "progressive",
            "Progressive validation by hour",
            (document.get("progressive") or {}).get("hours"),
            " Each hour was scored before the model was trained on it.",
        ),
    ):
        timed = [hour for hour in hours or () if hour.get("utc") and hour.get("auc") is not None]
        text = f"{_plural(len(hours or ()), 'hour')}, none with an AUC."
        if timed:
            low, high = (pick(timed, key=lambda hour: float(hour["auc"])) for pick in (min, max))
            text = (
                f"{_plural(len(hours or ()), 'hour')}; AUC from {number(low['auc'])} ({_hour(low)}) to "
                f"{number(high['auc'])} ({_hour(high)}). Bars: 95 % intervals."
            )
        rows = [
            (
                _hour(hour),
                count(hour.get("rows")),
                count(hour.get("clicks")),
                number(hour.get("auc")),
                _interval(hour.get("auc_interval")),
                number(hour.get("logloss")),
                _interval(hour.get("logloss_interval")),
                number(hour.get("calibration"), 3),
            )
            for hour in hours or ()
        ]
        plots.append(figure(id, title, text + more, table("All hours", _HOUR_HEADER, rows), figures_by_id))
    return _part("hours", "Over time", plots, wide=True)


def _hour(hour: Mapping[str, Any]) -> str:
    return f"{hour['utc'].replace('T', ' ')} h" if hour.get("utc") else "unknown"


def _learning(document: Document, figures_by_id: Mapping[str, Figure]) -> Html:
    learning, epochs = document.get("learning") or {}, document.get("epochs") or []
    text = []
    if learning.get("step"):
        seconds = learning.get("seconds") or [None]
        rows = learning.get("rows") or [None]
        took = "" if seconds[-1] is None else f" in {_duration(seconds[-1])}"
        text.append(f"{_plural(learning['step'][-1], 'step')}, {count(rows[-1])} rows trained{took}.")
        for key, name in (("loss", "loss"), ("auc", "AUC"), ("rows_per_second", "rows/s")):
            values = [value for value in learning.get(key) or () if value is not None]
            if values:
                shown = count(round(values[-1])) if key == "rows_per_second" else number(values[-1])
                text.append(f"Last {name}: {shown}.")
    metrics = [epoch for epoch in epochs if epoch.get("auc") is not None]
    if metrics:
        text.append(f"Eval AUC after epoch {metrics[-1].get('epoch')}: {number(metrics[-1]['auc'])}.")
    values = [_curve_table("At most 500 points of the run", learning)] if learning.get("step") else []
    if epochs:
        header = ("epoch", "step", "AUC", "log loss", "calibration")
        rows_of_epochs = [
            (
                count(epoch.get("epoch")),
                count(epoch.get("step")),
                number(epoch.get("auc")),
                number(epoch.get("logloss")),
                number(epoch.get("calibration")),
            )
            for epoch in epochs
        ]
        values.append(table("Evaluation after each epoch", header, rows_of_epochs))
    title = "Loss, AUC and speed" if learning.get("step") else "Evaluation after each epoch"
    return _part(
        "learning",
        "Training",
        [figure("learning", title, " ".join(text), joined(values), figures_by_id)],
        wide=True,
    )


# ── fields ─────────────────────────────────────────────────────────────────────────────────────


def _importance(document: Document, figures_by_id: Mapping[str, Figure]) -> Html:
    found = document.get("importance") or []
    if not found:
        return Html("")
    first, idle = found[0], sum(one["lost"] < 0.0005 for one in found)
    measured_on = document.get("importance_rows")
    text = (
        f"{first['name']} is the most important field: AUC drops by {number(first['lost'])} when it is "
        f"shuffled. {idle} of {_plural(len(found), 'field')} cost less than 0.0005."
        + ("" if measured_on is None else f" Measured on {count(measured_on)} rows.")
        + _partial_note(len(found), len(document.get("slot_table") or ()))
        + _truncation_note(len(found))
    )
    rows = [(one["name"], one["kind"], signed(one["lost"], 5), number(one.get("auc"))) for one in found]
    values = table("All fields", ("field", "kind", "AUC lost", "AUC without"), rows, text_columns=2)
    return _part(
        "fields",
        "Field importance",
        [figure("importance", "AUC lost when a field is shuffled", text, values, figures_by_id)],
        wide=True,
    )


def _partial_note(metrics: int, fields: int) -> str:
    if metrics >= fields:
        return ""
    return (
        f" These are the first {count(metrics)} of {count(fields)} fields; `clickline evaluate --importance` measures "
        "all of them."
    )


def _slots(document: Document) -> Html:
    full = document.get("slot_table")
    if full:
        header = ("field", "kind", "values, train", "values, eval", "missing, train", "missing, eval", "ids",
                  "candidates", "evicted", "unseen in eval")  # fmt: skip
        rows = [
            (
                one["slot"],
                one.get("kind") or "–",
                count(one.get("distinct_train")),
                count(one.get("distinct_eval")),
                percent(one.get("missing_train")),
                percent(one.get("missing_eval")),
                count(one.get("ids")),
                count(one.get("candidates")),
                count(one.get("evicted")),
                percent(one.get("unseen_eval")),
            )
            for one in full
        ]
        unseen = [one for one in full if one.get("unseen_eval") is not None]
        worst = max(unseen, key=lambda one: float(one["unseen_eval"]), default=None)
        text = "" if worst is None else (
            f" Most unseen values in the eval rows: {worst['slot']}, where {percent(worst['unseen_eval'])} of the "
            "values have no embedding."
        )  # fmt: skip
        caption = f"{_plural(len(full), 'field')}.{text}"
        shown = table(caption, header, rows, text_columns=2)
    elif document.get("slots"):  # reports of earlier releases
        old = document["slots"]
        rows_old = [
            (s["name"], count(s.get("ids")), count(s.get("candidates")), count(s.get("evicted"))) for s in old
        ]
        shown = table(_plural(len(old), "slot"), ("slot", "ids", "candidates", "evicted"), rows_old)
    else:
        return Html("")
    return section("slots", "Slots", tag("div", shown, class_="card"))


def _drift(document: Document, figures_by_id: Mapping[str, Figure]) -> Html:
    drift = document.get("drift") or {}
    fields = [one for one in drift.get("fields") or () if one.get("psi") is not None]
    if not fields:
        return Html("")
    fields.sort(key=lambda one: -one["psi"])
    large = sum(one["psi"] >= DRIFT_LARGE for one in fields)
    some = sum(DRIFT_SOME <= one["psi"] < DRIFT_LARGE for one in fields)
    levels = (
        f"{large} with strong drift (PSI ≥ 0.25), "
        f"{some} with some (≥ 0.1), {len(fields) - large - some} with little"
    )
    text = (
        f"{_plural(len(fields), 'field')}: {levels}. Largest: {fields[0]['name']}, {number(fields[0]['psi'])}. "
        f"Samples: {count(drift.get('rows_train'))} train and {count(drift.get('rows_eval'))} eval rows."
        + _truncation_note(len(fields))
    )
    rows = [
        (
            one["name"],
            one.get("kind") or "–",
            _drift_level(one["psi"]),
            _top_shifts(one.get("top")),
            number(one["psi"]),
        )
        for one in fields
    ]
    header = ("field", "kind", "drift", "largest shifts: share in train → in eval", "PSI")
    return _part(
        "drift",
        "Drift between train and eval rows",
        [
            figure(
                "drift",
                "Population stability index",
                text,
                table("All fields", header, rows, text_columns=4),
                figures_by_id,
            )
        ],
        wide=True,
    )


def _drift_level(psi: float) -> Html:
    name = "large" if psi >= DRIFT_LARGE else "some" if psi >= DRIFT_SOME else "calm"
    return tag("span", {"large": "strong", "some": "some", "calm": "little"}[name], class_=f"mark {name}")


def _top_shifts(differences: Sequence[Mapping[str, Any]] | None) -> str:
    return "; ".join(
        f"{_short(one['value'] if one.get('value') is not None else one.get('range'))} "
        f"{percent(one.get('train'))} → {percent(one.get('eval'))}"
        for one in differences or ()
    )


def _short(value: object) -> str:
    text = "missing" if value is None else str(value)
    return text if len(text) <= 40 else f"{text[:39]}…"


# ── slices ─────────────────────────────────────────────────────────────────────────────────────


def _slices(document: Document) -> Html:
    slices = (document.get("evaluation") or {}).get("slices") or {}
    if not slices:
        return Html("")
    current = document.get("current") or {}
    parts = []
    differences = slice_differences(current.get("slices"), slices)
    if differences:
        parts.append(tag("div", slice_table(differences, f"version {current.get('version')}"), class_="card"))
    folded = []
    header = ("value", "rows", "clicks", "AUC", "95 %", "log loss", "calibration")
    for slot, found in slices.items():
        rows = [
            (
                _short(one["id"] if one.get("value") is None else one["value"]),
                count(one.get("rows")),
                count(one.get("clicks")),
                number(one.get("auc")),
                _interval(one.get("auc_interval")),
                number(one.get("logloss")),
                number(one.get("calibration"), 3),
            )
            for one in found
        ]
        shown = table(f"By {slot}, the values with the most impressions", header, rows)
        folded.append(collapsible(f"By {slot}: {_plural(len(rows), 'value')}", shown))
    return section("slices", "Slices", *parts, tag("div", *folded, class_="card"))


def slice_table(differences: Sequence[SliceDifference], baseline: str) -> Html:
    """The slices that changed most compared with another model."""
    clear = sum(one.significant for one in differences)

    def cells(one: SliceDifference, key: str) -> tuple[object, object]:
        change = one.differences.get(key)
        if change is None:
            return "–", "–"
        return number(change.new), change_cell(change) if change.significant else signed(change.change)

    rows = [
        (
            f"{one.slot} = {_short(one.value)}",
            count(one.impressions),
            *cells(one, "auc"),
            *cells(one, "logloss"),
        )
        for one in differences[:_MAX_SLICES]
    ]
    caption = (
        f"Compared with {baseline}: {clear} of {_plural(len(differences), 'slice')} changed significantly (95 %). "
        "Ordered by their effect on the total log loss."
        + (f" The first {_MAX_SLICES} are shown." if len(differences) > _MAX_SLICES else "")
    )
    return table(caption, ("slice", "impressions", "AUC", "change", "log loss", "change"), rows)


# ── lineage ────────────────────────────────────────────────────────────────────────────────────


def _lineage(document: Document) -> Html:
    lineage = document.get("lineage") or {}
    dataset, checkpoint, version = (lineage.get(key) for key in ("dataset", "checkpoint", "version"))
    steps: list[tuple[str, *tuple[Html | None, ...]]] = []
    if dataset:
        inputs = dataset.get("inputs") or []
        more = (dataset.get("files") or len(inputs)) - len(inputs)
        files = collapsible(
            _plural(dataset.get("files") or len(inputs), "input file"),
            *(tag("p", tag("code", name)) for name in inputs),
            tag("p", f"and {more:,} more") if more > 0 else None,
        )
        steps.append(
            (
                f"Dataset {dataset.get('id') or ''}",
                tag(
                    "p",
                    f"{count(dataset.get('train_rows'))} train rows, {count(dataset.get('eval_rows'))} eval rows",
                ),
                tag("p", tag("code", dataset["folder"]), class_="quiet") if dataset.get("folder") else None,
                files if inputs else None,
            )
        )
    if checkpoint:
        trained = checkpoint.get("trained_rows")
        steps.append(
            (
                f"Checkpoint at step {count(checkpoint.get('step'))}",
                None if trained is None else tag("p", f"{count(trained)} rows trained"),
                tag("p", tag("code", checkpoint["folder"]), class_="quiet")
                if checkpoint.get("folder")
                else None,
            )
        )
    if not steps:
        return Html("")
    steps.append(
        (f"Version {version}", tag("p", "published"))
        if version is not None
        else (
            "No version",
            tag("p", "This report is about the checkpoint, before it was published.", class_="quiet"),
        )
    )
    boxes = [tag("li", tag("div", tag("h3", title), *facts, class_="card")) for title, *facts in steps]
    return section("lineage", "Lineage", tag("ol", *boxes, class_="lineage"))


def _config(document: Document) -> Html:
    text = document.get("config")
    if not text:
        return Html("")
    shown = tag("pre", text, tabindex="0", role="region", aria_label="The config")
    return section(
        "config", "Config", tag("div", collapsible("Config with all defaults", shown), class_="card")
    )


def _missing_parts(names: Sequence[str]) -> Html:
    if not names:
        return Html("")
    return section(
        "left-out",
        "Not included",
        tag(
            "p",
            "The document has no data for: ",
            ", ".join(names),
            ". See the notes at the top for known reasons.",
        ),
    )


# ── helpers ────────────────────────────────────────────────────────────────────────────────────


def _part(id: str, title: str, plots: Sequence[Html], *, wide: bool = False) -> Html:
    present = [plot for plot in plots if plot]
    if not present:
        return Html("")
    return section(id, title, *present) if wide else section(id, title, tag("div", *present, class_="plots"))


def _curve_table(caption: str, columns: Mapping[str, Sequence[float | None]]) -> Html:
    """The points of a curve as a table."""
    header = [name.replace("_", " ").replace("shows", "impressions") for name in columns]
    rows = zip(*columns.values(), strict=False)
    return table(caption, header, [[_value(value) for value in row] for row in rows])


def _value(value: float | None) -> str:
    return count(value) if isinstance(value, int) or (value or 0) >= 1000 else number(value)


def _interval(interval: Sequence[float] | None) -> str:
    return "–" if interval is None else f"{number(interval[0])} to {number(interval[1])}"


def value_at(x: Sequence[float] | None, y: Sequence[float | None] | None, place: float) -> float | None:
    """The value of a curve at `place`, taken from the nearest point."""
    if not x or not y:
        return None
    known = [(abs(a - place), b) for a, b in zip(x, y, strict=False) if a is not None and b is not None]
    return min(known)[1] if known else None


def _plural(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def _truncation_note(n: int) -> str:
    return f" The plot shows the first {MAX_FIELDS} fields, the table all of them." if n > MAX_FIELDS else ""


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"
