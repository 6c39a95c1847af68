"""One evaluation as one page: HTML that needs nothing else, made from the document alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from clickline.evaluation.report.comparison import MEASURES, Difference, MovedSlice, difference, moved_slices
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
    unfolding,
)
from clickline.evaluation.report.plots import DRIFT_LARGE, DRIFT_SOME, SHOWN_FIELDS, Document, Figure, figures
from clickline.storage.storage import Storage

_BY_KEY = {measure.key: measure for measure in MEASURES}
_MOVED_SHOWN = 30
_POINTS = "at most 200 points of the curve"


def write_page(document: Mapping[str, Any], path: str, storage: Storage) -> None:
    """Write the page of a document, whole or not at all. ClicklineError where plotly is not installed."""
    storage.put(path, page(document).encode("utf-8", "backslashreplace"))


def page_of(path: str) -> str:
    """Where the page of a document is: beside it, with the same stem."""
    return f"{path.removesuffix('.json')}.html"


def page(document: Mapping[str, Any]) -> str:
    """The page of a document. What the document does not hold is left out, and the page says so."""
    drawn = figures(document)
    parts = [
        ("ranking", "Ranking", _ranking(document, drawn)),
        ("calibration", "Calibration", _calibration(document, drawn)),
        ("hours", "Hours", _hours(document, drawn)),
        ("learning", "Learning", _learning(document, drawn)),
        ("fields", "Fields", _importance(document, drawn)),
        ("slots", "Slots", _slots(document)),
        ("drift", "Drift", _drift(document, drawn)),
        ("slices", "Slices", _slices(document)),
        ("lineage", "Lineage", _lineage(document)),
        ("config", "Config", _config(document)),
    ]
    left_out = [_MISSING[id] for id, _, content in parts if not content]
    parts.append(("left-out", "Left out", _left_out(left_out)))
    top = joined([_heading(document), _verdict(document), _keys(document)])
    return frame(f"{name_of(document)} · report", parts, top, {"report": document}, drawn)


_MISSING = {
    "ranking": "ROC, precision-recall, gain and lift",
    "calibration": "the calibration curve and the scores",
    "hours": "figures by hour",
    "learning": "the learning curve",
    "fields": "the importance of fields",
    "slots": "the table of slots",
    "drift": "drift between train and eval rows",
    "slices": "slices",
    "lineage": "the lineage",
    "config": "the config",
}


# ── the top ────────────────────────────────────────────────────────────────────────────────────


def name_of(document: Document) -> str:
    """What was measured, in a few words."""
    run, model = document.get("run") or {}, document.get("model") or {}
    version = (document.get("lineage") or {}).get("version") or model.get("version")
    if version is not None:
        return f"version {version}"
    if run.get("name"):
        return f"run {run['name']}"
    return f"checkpoint {model.get('checkpoint') or document.get('checkpoint') or ''}".rstrip()


def _heading(document: Document) -> Html:
    run = document.get("run") or {}
    facts = [run.get("project"), _when(run.get("created")), run.get("home")]
    name = name_of(document)
    return joined(
        [
            tag("h1", f"Report of {name}"),
            tag("p", " · ".join(str(fact) for fact in facts if fact), class_="quiet"),
        ]
    )


def _when(created: object) -> str | None:
    return None if not created else f"{str(created)[:19].replace('T', ' ')} UTC"


def _verdict(document: Document) -> Html:
    gate = document.get("gate")
    if gate is None:
        state, words = "unknown", "The gate was not asked"
    elif gate["passed"]:
        state, words = "passed", "✓ The gate passed the model"
    else:
        state, words = "refused", "✗ The gate refused the model"
    told = [("reason", "", reason) for reason in (gate or {}).get("reasons") or ()]
    told += [("warning", " some", warning) for warning in (gate or {}).get("warnings") or ()]
    told += [("note", "", note) for note in _notes(document)]
    lines = [tag("li", tag("span", kind, class_=f"note{colour}"), " ", text) for kind, colour, text in told]
    return tag(
        "section",
        tag("strong", words),
        tag("ul", *lines) if lines else None,
        class_=f"verdict {state}",
        aria_label="The gate's verdict",
    )


def _notes(document: Document) -> list[str]:
    measured = (document.get("evaluation") or {}).get("notes") or ()
    return list(dict.fromkeys([*measured, *(document.get("notes") or ())]))


def _keys(document: Document) -> Html:
    measured = document.get("evaluation")
    if not measured:
        return tag("p", "Nothing was measured: there were no eval rows.", class_="quiet")
    current = document.get("current") or {}
    before = current.get("evaluation") or {}

    def card(key: str, name: str, *more: object) -> Html:
        interval = measured.get(f"{key}_interval")
        between = None if interval is None else f"95 %: {number(interval[0])} to {number(interval[1])}"
        change = difference(before, measured, _BY_KEY[key])
        against = None
        if change is not None:
            than = "than" if change.better is not None else "against"
            against = tag(
                "dd", changed(change), f" {than} version {current.get('version')} ({number(change.old)})"
            )
        return tag(
            "div",
            tag("dt", name),
            tag("dd", number(measured.get(key)), class_="value"),
            None if between is None else tag("dd", between),
            *(tag("dd", words) for words in more),
            against,
        )

    rows = tag(
        "div",
        tag("dt", "Rows measured"),
        tag("dd", count(measured.get("rows")), class_="value"),
        tag("dd", f"{count(measured.get('clicks'))} clicks of {count(measured.get('shows'))} shows"),
        tag("dd", f"base rate {percent(measured.get('base_rate'))}"),
    )
    own = [
        tag("div", tag("dt", name), tag("dd", f"{value:.6g}", class_="value"), tag("dd", "your own measure"))
        for name, value in (measured.get("own") or {}).items()
    ]
    return tag(
        "dl",
        card("auc", "AUC"),
        card("logloss", "Log loss"),
        card("calibration", "Calibration", "predicted / real clicks; 1 is right"),
        card("normalised_entropy", "Normalised entropy", "below 1 is worth something"),
        rows,
        *own,
        class_="keys",
    )


def changed(change: Difference) -> Html:
    """By how much, and whether that is good: `+0.0077 better`. Only what is more than chance has a colour."""
    if change.better is None:
        return tag("span", signed(change.change))
    words = "better" if change.better else "worse"
    if change.clear is False:
        return tag("span", f"{signed(change.change)}, not clearly {words}")
    return tag("span", f"{signed(change.change)} {words}", class_=words if change.clear else None)


# ── the plots ──────────────────────────────────────────────────────────────────────────────────


def _ranking(document: Document, drawn: Mapping[str, Figure]) -> Html:
    measured, curves = document.get("evaluation") or {}, document.get("curves") or {}
    roc, pr, gain = (curves.get(key) or {} for key in ("roc", "precision_recall", "gain"))
    auc, rate = measured.get("auc"), measured.get("base_rate")
    current = document.get("current") or {}
    live = (current.get("evaluation") or {}).get("auc")
    beside = "" if live is None else f" Version {current.get('version')} on the same rows: {number(live)}."
    pairs = (
        "" if auc is None else f"AUC {number(auc)}: in {percent(auc)} of all pairs the click scores higher than the "
        f"show without one. Dotted: chance.{beside}"
    )  # fmt: skip
    half = at(pr.get("recall"), pr.get("precision"), 0.5)
    found = (
        ""
        if half is None
        else f"The highest scores that hold half of the clicks are clicks in {percent(half)}; "
    )
    tenth = at(gain.get("share_of_shows"), gain.get("share_of_clicks"), 0.1)
    lift = at(gain.get("share_of_shows"), gain.get("lift"), 0.1)
    plots = [
        figure("roc", "ROC", pairs, _values(_POINTS, roc), drawn),
        figure(
            "precision_recall",
            "Precision and recall",
            f"{found}of all shows {percent(rate)} are (dotted).",
            _values(_POINTS, pr),
            drawn,
        ),
        figure(
            "gain",
            "Gain",
            ""
            if tenth is None
            else f"The 10 % of shows with the highest scores hold {percent(tenth)} of the clicks.",
            _values(_POINTS, {k: gain[k] for k in ("share_of_shows", "share_of_clicks") if k in gain}),
            drawn,
        ),
        figure(
            "lift",
            "Lift",
            ""
            if lift is None
            else f"Among the best 10 % of shows, clicks are {lift:.2f} times as frequent as in all.",
            _values(_POINTS, {k: gain[k] for k in ("share_of_shows", "lift") if k in gain}),
            drawn,
        ),
    ]
    return _part("ranking", "How well it ranks", plots)


def _calibration(document: Document, drawn: Mapping[str, Figure]) -> Html:
    measured, curves = document.get("evaluation") or {}, document.get("curves") or {}
    curve, scores = curves.get("calibration") or {}, curves.get("scores") or {}
    words = (
        f"Predicted / real clicks is {number(measured.get('calibration'), 3)}; in 20 bins of equal weight the "
        f"predicted rate is {percent(measured.get('ece'))} away from the observed one on average (ECE). Shaded: 95 % "
        "band of what was observed; dotted: right; below: how many shows have which score."
    )
    values = [_values("Bins of equal weight", curve)]
    if scores.get("edges"):
        edges = scores["edges"]
        rows = zip(edges, edges[1:], scores["clicks"], scores["others"], strict=False)
        values.append(
            table(
                "Shows by score",
                ("from", "to", "clicks", "other shows"),
                [
                    (number(low), number(high), count(clicks), count(others))
                    for low, high, clicks, others in rows
                ],
            )
        )
    return _part(
        "calibration",
        "Whether probabilities are right",
        [figure("calibration", "Calibration curve and scores", words, joined(values), drawn)],
    )


_HOUR_HEADER = ("hour (UTC)", "rows", "clicks", "AUC", "95 %", "log loss", "95 %", "calibration")


def _hours(document: Document, drawn: Mapping[str, Figure]) -> Html:
    plots = []
    for id, title, hours, more in (
        ("hours", "AUC and log loss by hour", (document.get("evaluation") or {}).get("hours"), ""),
        (
            "progressive",
            "Each hour before it was learned",
            (document.get("progressive") or {}).get("hours"),
            " Progressive validation: what the model said of an hour's rows before it learned them.",
        ),
    ):
        timed = [hour for hour in hours or () if hour.get("utc") and hour.get("auc") is not None]
        words = f"{_times(len(hours or ()), 'hour')}, none of them with an AUC."
        if timed:
            low, high = (pick(timed, key=lambda hour: float(hour["auc"])) for pick in (min, max))
            words = (
                f"{_times(len(hours or ()), 'hour')}; AUC from {number(low['auc'])} ({_hour(low)}) to "
                f"{number(high['auc'])} ({_hour(high)}). Bars: 95 % intervals."
            )
        rows = [
            (
                _hour(hour),
                count(hour.get("rows")),
                count(hour.get("clicks")),
                number(hour.get("auc")),
                _between(hour.get("auc_interval")),
                number(hour.get("logloss")),
                _between(hour.get("logloss_interval")),
                number(hour.get("calibration"), 3),
            )
            for hour in hours or ()
        ]
        plots.append(figure(id, title, words + more, table("All hours", _HOUR_HEADER, rows), drawn))
    return _part("hours", "Over time", plots, wide=True)


def _hour(hour: Mapping[str, Any]) -> str:
    return f"{hour['utc'].replace('T', ' ')} h" if hour.get("utc") else "unknown"


def _learning(document: Document, drawn: Mapping[str, Figure]) -> Html:
    learned, epochs = document.get("learning") or {}, document.get("epochs") or []
    words = []
    if learned.get("step"):
        seconds = learned.get("seconds") or [None]
        rows = learned.get("rows") or [None]
        took = "" if seconds[-1] is None else f" in {_duration(seconds[-1])}"
        words.append(f"{_times(learned['step'][-1], 'step')}, {count(rows[-1])} rows learned{took}.")
        for key, name in (("loss", "loss"), ("auc", "AUC"), ("rows_per_second", "rows/s")):
            values = [value for value in learned.get(key) or () if value is not None]
            if values:
                shown = count(round(values[-1])) if key == "rows_per_second" else number(values[-1])
                words.append(f"Last {name}: {shown}.")
    measured = [epoch for epoch in epochs if epoch.get("auc") is not None]
    if measured:
        words.append(f"Eval rows after epoch {measured[-1].get('epoch')}: AUC {number(measured[-1]['auc'])}.")
    values = [_values("At most 500 points of the run", learned)] if learned.get("step") else []
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
        values.append(table("Eval rows after each epoch", header, rows_of_epochs))
    title = "Loss, AUC and speed" if learned.get("step") else "Eval rows after each epoch"
    return _part(
        "learning",
        "How it learned",
        [figure("learning", title, " ".join(words), joined(values), drawn)],
        wide=True,
    )


# ── fields ─────────────────────────────────────────────────────────────────────────────────────


def _importance(document: Document, drawn: Mapping[str, Figure]) -> Html:
    found = document.get("importance") or []
    if not found:
        return Html("")
    first, idle = found[0], sum(one["lost"] < 0.0005 for one in found)
    measured_on = document.get("importance_rows")
    words = (
        f"{first['name']} matters most: without it AUC falls by {number(first['lost'])}. {idle} of "
        f"{_times(len(found), 'field')} cost less than 0.0005."
        + ("" if measured_on is None else f" Measured on {count(measured_on)} rows.")
        + _not_all(len(found), len(document.get("slot_table") or ()))
        + _first_of(len(found))
    )
    rows = [(one["name"], one["kind"], signed(one["lost"], 5), number(one.get("auc"))) for one in found]
    values = table("All fields", ("field", "kind", "AUC lost", "AUC without"), rows, words=2)
    return _part(
        "fields",
        "What it leans on",
        [figure("importance", "AUC lost when a field is shuffled", words, values, drawn)],
        wide=True,
    )


def _not_all(measured: int, fields: int) -> str:
    if measured >= fields:
        return ""
    return (
        f" These are the first {count(measured)} of {count(fields)} fields; `clickline evaluate --importance` measures "
        "all of them."
    )


def _slots(document: Document) -> Html:
    full = document.get("slot_table")
    if full:
        header = ("field", "kind", "values, train", "values, eval", "missing, train", "missing, eval", "ids kept",
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
        words = "" if worst is None else (
            f" Most often new in the eval rows: {worst['slot']}, where {percent(worst['unseen_eval'])} of the values "
            "are not in the table."
        )  # fmt: skip
        caption = f"{_times(len(full), 'field')}.{words}"
        shown = table(caption, header, rows, words=2)
    elif document.get("slots"):  # what reports of earlier releases have
        old = document["slots"]
        rows_old = [
            (s["name"], count(s.get("ids")), count(s.get("candidates")), count(s.get("evicted"))) for s in old
        ]
        shown = table(_times(len(old), "slot"), ("slot", "ids kept", "candidates", "evicted"), rows_old)
    else:
        return Html("")
    return section("slots", "Slots", tag("div", shown, class_="card"))


def _drift(document: Document, drawn: Mapping[str, Figure]) -> Html:
    drift = document.get("drift") or {}
    fields = [one for one in drift.get("fields") or () if one.get("psi") is not None]
    if not fields:
        return Html("")
    fields.sort(key=lambda one: -one["psi"])
    large = sum(one["psi"] >= DRIFT_LARGE for one in fields)
    some = sum(DRIFT_SOME <= one["psi"] < DRIFT_LARGE for one in fields)
    moved = f"{large} moved a lot (PSI from 0.25 on), {some} some (from 0.1 on), {len(fields) - large - some} hardly"
    words = (
        f"Of {_times(len(fields), 'field')} {moved}. Most: {fields[0]['name']}, {number(fields[0]['psi'])}. Samples: "
        f"{count(drift.get('rows_train'))} train and {count(drift.get('rows_eval'))} eval rows."
        + _first_of(len(fields))
    )
    rows = [
        (
            one["name"],
            one.get("kind") or "–",
            _drift_mark(one["psi"]),
            _top(one.get("top")),
            number(one["psi"]),
        )
        for one in fields
    ]
    header = ("field", "kind", "moved", "values that moved most: share of train → of eval rows", "PSI")
    return _part(
        "drift",
        "Drift between train and eval rows",
        [
            figure(
                "drift",
                "Population stability index",
                words,
                table("All fields", header, rows, words=4),
                drawn,
            )
        ],
        wide=True,
    )


def _drift_mark(psi: float) -> Html:
    name = "large" if psi >= DRIFT_LARGE else "some" if psi >= DRIFT_SOME else "calm"
    return tag("span", {"large": "a lot", "some": "some", "calm": "hardly"}[name], class_=f"mark {name}")


def _top(moved: Sequence[Mapping[str, Any]] | None) -> str:
    return "; ".join(
        f"{_short(one['value'] if one.get('value') is not None else one.get('range'))} "
        f"{percent(one.get('train'))} → {percent(one.get('eval'))}"
        for one in moved or ()
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
    moved = moved_slices(current.get("slices"), slices)
    if moved:
        parts.append(tag("div", moved_table(moved, f"version {current.get('version')}"), class_="card"))
    folded = []
    header = ("value", "rows", "clicks", "AUC", "95 %", "log loss", "calibration")
    for slot, found in slices.items():
        rows = [
            (
                _short(one["id"] if one.get("value") is None else one["value"]),
                count(one.get("rows")),
                count(one.get("clicks")),
                number(one.get("auc")),
                _between(one.get("auc_interval")),
                number(one.get("logloss")),
                number(one.get("calibration"), 3),
            )
            for one in found
        ]
        shown = table(f"By {slot}, the values with most shows", header, rows)
        folded.append(unfolding(f"By {slot}: {_times(len(rows), 'value')}", shown))
    return section("slices", "Slices", *parts, tag("div", *folded, class_="card"))


def moved_table(moved: Sequence[MovedSlice], than: str) -> Html:
    """The slices that changed most against another model."""
    clear = sum(one.clear for one in moved)

    def cells(one: MovedSlice, key: str) -> tuple[object, object]:
        change = one.differences.get(key)
        if change is None:
            return "–", "–"
        return number(change.new), changed(change) if change.clear else signed(change.change)

    rows = [
        (f"{one.slot} = {_short(one.value)}", count(one.shows), *cells(one, "auc"), *cells(one, "logloss"))
        for one in moved[:_MOVED_SHOWN]
    ]
    caption = (
        f"What moved against {than}: of {_times(len(moved), 'slice')} {clear} changed beyond their 95 % intervals; "
        "first what weighs most in the log loss of all rows."
        + (f" The first {_MOVED_SHOWN}." if len(moved) > _MOVED_SHOWN else "")
    )
    return table(caption, ("slice", "shows", "AUC", "change", "log loss", "change"), rows)


# ── where it comes from ────────────────────────────────────────────────────────────────────────


def _lineage(document: Document) -> Html:
    lineage = document.get("lineage") or {}
    dataset, checkpoint, version = (lineage.get(key) for key in ("dataset", "checkpoint", "version"))
    steps: list[tuple[str, *tuple[Html | None, ...]]] = []
    if dataset:
        inputs = dataset.get("inputs") or []
        more = (dataset.get("files") or len(inputs)) - len(inputs)
        files = unfolding(
            _times(dataset.get("files") or len(inputs), "input file"),
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
        learned = checkpoint.get("learned_rows")
        steps.append(
            (
                f"Checkpoint at step {count(checkpoint.get('step'))}",
                None if learned is None else tag("p", f"{count(learned)} rows learned"),
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
            tag("p", "This page is of the checkpoint, before it was published.", class_="quiet"),
        )
    )
    boxes = [tag("li", tag("div", tag("h3", title), *facts, class_="card")) for title, *facts in steps]
    return section("lineage", "Data, checkpoint, version", tag("ol", *boxes, class_="lineage"))


def _config(document: Document) -> Html:
    text = document.get("config")
    if not text:
        return Html("")
    shown = tag("pre", text, tabindex="0", role="region", aria_label="The config")
    return section(
        "config", "Config", tag("div", unfolding("With every default filled in", shown), class_="card")
    )


def _left_out(names: Sequence[str]) -> Html:
    if not names:
        return Html("")
    return section(
        "left-out",
        "Left out",
        tag(
            "p",
            "The document does not hold: ",
            ", ".join(names),
            ". Notes at the top say why, where that is known.",
        ),
    )


# ── wording ────────────────────────────────────────────────────────────────────────────────────


def _part(id: str, title: str, plots: Sequence[Html], *, wide: bool = False) -> Html:
    there = [plot for plot in plots if plot]
    if not there:
        return Html("")
    return section(id, title, *there) if wide else section(id, title, tag("div", *there, class_="plots"))


def _values(caption: str, columns: Mapping[str, Sequence[float | None]]) -> Html:
    """The values of a curve, row by row."""
    header = [name.replace("_", " ") for name in columns]
    rows = zip(*columns.values(), strict=False)
    return table(caption, header, [[_value(value) for value in row] for row in rows])


def _value(value: float | None) -> str:
    return count(value) if isinstance(value, int) or (value or 0) >= 1000 else number(value)


def _between(interval: Sequence[float] | None) -> str:
    return "–" if interval is None else f"{number(interval[0])} to {number(interval[1])}"


def at(x: Sequence[float] | None, y: Sequence[float | None] | None, place: float) -> float | None:
    """The value of a curve at a place, from the point that is nearest."""
    if not x or not y:
        return None
    known = [(abs(a - place), b) for a, b in zip(x, y, strict=False) if a is not None and b is not None]
    return min(known)[1] if known else None


def _times(many: int, noun: str) -> str:
    return f"{many:,} {noun}{'' if many == 1 else 's'}"


def _first_of(many: int) -> str:
    return f" The plot shows the first {SHOWN_FIELDS}, the table all." if many > SHOWN_FIELDS else ""


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"
