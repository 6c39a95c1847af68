"""The plots of a report as Plotly figures: plain dicts with the values of the document.

Each figure overlays one or several models. A figure whose data a document lacks is omitted. Colours are those of the
light page; `DARK` maps them to those of the dark page.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from clickline.evaluation.binary_metrics import hour_to_utc

Document = Mapping[str, Any]
Figure = dict[str, Any]
Series = Sequence[tuple[str, Document]]
"""Names and documents of models; the first is the one that the page is about."""

MAX_FIELDS = 30
"""Maximum number of bars in a plot by field; the table has all fields."""

DRIFT_SOME, DRIFT_LARGE = 0.1, 0.25
"""The usual PSI thresholds: below the first there is little drift, above the second strong drift."""

_TEXT, _GRID, _MUTED = "#1f2a37", "#e4e8ee", "#6b7686"
_LINES = ("#2563a8", "#c05717")
_BANDS = ("rgba(37,99,168,0.16)", "rgba(192,87,23,0.16)")
_CLICKS, _OTHERS = "#2563a8", "#c3ccd8"
_LITTLE, _SOME, _LARGE = "#7d93ad", "#d29a1c", "#c0392b"
_CARD = "#ffffff"

DARK = {
    _TEXT: "#e5eaf1",
    _GRID: "#2b3440",
    _MUTED: "#9aa6b5",
    _LINES[0]: "#74b0f0",
    _LINES[1]: "#f3a064",
    _BANDS[0]: "rgba(116,176,240,0.22)",
    _BANDS[1]: "rgba(243,160,100,0.22)",
    _OTHERS: "#4a5666",
    _LITTLE: "#7f93ab",
    _SOME: "#e2b04a",
    _LARGE: "#ef7d70",
    _CARD: "#1a212a",
}

_CLEAR = "rgba(0,0,0,0)"


def figures(document: Document) -> dict[str, Figure]:
    """The figures of one document, overlaid with those of the current version."""
    current = document.get("current")
    series: list[tuple[str, Document]] = [("this model", document)]
    if current:
        series.append((f"current version {current.get('version')}", current))
    return overlay_figures(series)


def overlay_figures(series: Series) -> dict[str, Figure]:
    """The figures of several documents, overlaid."""
    figures_by_name = {name: draw(series) for name, draw in _FIGURES.items()}
    return {name: figure for name, figure in figures_by_name.items() if figure is not None}


# ── curves over all rows ───────────────────────────────────────────────────────────────────────


def _roc(series: Series) -> Figure | None:
    def label(name: str, document: Document) -> str:
        auc = _metric(document, "auc")
        return name if auc is None else f"{name}, AUC {auc:.4f}"

    hover = "%{x:.1%} of non-clicks and %{y:.1%} of clicks score higher"
    return _figure(
        _curve_lines(
            [(label(name, document), document) for name, document in series],
            "roc", "false_positive_rate", "true_positive_rate", hover,
        ),
        _share_axis("false positive rate: non-clicks above the threshold"),
        _share_axis("true positive rate: clicks above the threshold", range=[0, 1.005]),
        shapes=[_reference_line(x0=0, y0=0, x1=1, y1=1)],
    )  # fmt: skip


def _precision_recall(series: Series) -> Figure | None:
    rate = _metric(series[0][1], "base_rate")
    marks: dict[str, Any] = {"shapes": [], "annotations": []}
    if rate is not None:
        marks["shapes"] = [_reference_line(xref="paper", x0=0, x1=1, y0=rate, y1=rate)]
        marks["annotations"] = [_annotation("base rate", xref="paper", x=0.01, xanchor="left", y=rate)]
    return _figure(
        _curve_lines(
            series, "precision_recall", "recall", "precision", "recall %{x:.1%}, precision %{y:.1%}"
        ),
        _share_axis("recall: share of clicks found"),
        _axis("precision: share of clicks among them", rangemode="tozero", tickformat=".0%"),
        **marks,
    )


def _calibration(series: Series) -> Figure | None:
    data: list[dict[str, Any]] = []
    largest = 0.0
    for n, name, curve in _curves(series, "calibration"):
        predicted = curve["predicted"]
        edge = {
            "x": predicted,
            "mode": "lines",
            "line": {"width": 0},
            "hoverinfo": "skip",
            "showlegend": False,
        }
        data += [
            {"type": "scatter", "name": _escaped(f"{name}, low"), "y": curve["low"], **edge},
            {"type": "scatter", "name": _escaped(f"{name}, high"), "y": curve["high"], **edge, "fill": "tonexty",
             "fillcolor": _BANDS[n]},
            {**_line(n, name, predicted, curve["observed"], "predicted %{x:.2%}, observed %{y:.2%}"),
             "mode": "lines+markers", "marker": {"size": 6, "color": _LINES[n]}},
        ]  # fmt: skip
        largest = max([largest, *_not_none(predicted), *_not_none(curve["high"])])
    if not data:
        return None
    scores = (series[0][1].get("curves") or {}).get("scores")
    axes: dict[str, Any] = {}
    if scores and scores.get("edges"):
        edges = scores["edges"]
        widths = [high - low for low, high in pairwise(edges)]
        bar = {"type": "bar", "x": edges[:-1], "width": widths, "offset": 0, "yaxis": "y2"}
        data += [
            {**bar, "name": "clicks", "y": scores["clicks"], "marker": {"color": _CLICKS, "line": {"width": 0}},
             "hovertemplate": "from %{x:.3f}: %{y:,.0f} clicks<extra></extra>"},
            {**bar, "name": "non-clicks", "y": scores["others"], "marker": {"color": _OTHERS, "line": {"width": 0}},
             "hovertemplate": "from %{x:.3f}: %{y:,.0f} non-clicks<extra></extra>"},
        ]  # fmt: skip
        filled = [
            high
            for high, clicks, others in zip(edges[1:], scores["clicks"], scores["others"], strict=True)
            if clicks or others
        ]
        largest = max([largest, *filled])
        axes["yaxis2"] = _axis("impressions", domain=[0, 0.24], rangemode="tozero", tickformat="~s", nticks=4)
    panel = {"domain": [0.32, 1]} if axes else {}
    return _figure(
        data,
        _axis(
            "predicted click probability",
            range=[0, min(1.0, largest * 1.04) or 1],
            tickformat=",.2~%",
            anchor="y2" if axes else "y",
        ),
        _axis("observed click rate", rangemode="tozero", tickformat=",.2~%", **panel),
        **axes,
        shapes=[_reference_line(x0=0, y0=0, x1=largest, y1=largest)],
        height=460 if axes else 380,
        barmode="stack",
        bargap=0,
    )


def _gain(series: Series) -> Figure | None:
    hover = "the top %{x:.1%} of impressions get %{y:.1%} of clicks"
    return _figure(
        _curve_lines(series, "gain", "share_of_impressions", "share_of_clicks", hover),
        _share_axis("share of impressions, highest scores first"),
        _share_axis("share of clicks", range=[0, 1.005]),
        shapes=[_reference_line(x0=0, y0=0, x1=1, y1=1)],
    )


def _lift(series: Series) -> Figure | None:
    hover = "the top %{x:.1%} of impressions: %{y:.2f} times the base rate"
    return _figure(
        _curve_lines(series, "gain", "share_of_impressions", "lift", hover),
        _share_axis("share of impressions, highest scores first"),
        _axis("lift: times the base rate", rangemode="tozero"),
        shapes=[_reference_line(x0=0, x1=1, y0=1, y1=1)],
    )


# ── over time ──────────────────────────────────────────────────────────────────────────────────


def _by_hour(series: Series, part: str) -> Figure | None:
    data = []
    for n, (name, document) in enumerate(series):
        hours = (document.get(part) or {}).get("hours") or ()
        points = _with_gaps([hour for hour in hours if hour.get("utc")])
        for key, axis, label in (("auc", "y", "AUC"), ("logloss", "y2", "log loss")):
            if any(point.get(key) is not None for point in points):
                data.append(
                    {
                        **_line(n, name, [p["utc"] for p in points], [p.get(key) for p in points],
                                f"%{{x|%Y-%m-%d %H}} h UTC: {label} %{{y:.4f}}"),
                        "mode": "lines+markers" if len(points) <= 72 else "lines",
                        "marker": {"size": 5, "color": _LINES[n]},
                        "line": {"width": 1.5, "color": _LINES[n]},
                        "yaxis": axis,
                        "legendgroup": name,
                        "showlegend": axis == "y",
                        "error_y": _errors(points, key, n),
                    }
                )  # fmt: skip
    if not any(
        trace["yaxis"] == "y" for trace in data
    ):  # all clicks or all non-clicks: there is only a log loss
        for trace in data:
            trace |= {"yaxis": "y", "showlegend": True}
        return _figure(data, _axis("hour (UTC)", type="date"), _axis("log loss"), height=280)
    return _figure(
        data,
        _axis("hour (UTC)", type="date", anchor="y2"),
        _axis("AUC", domain=[0.54, 1]),
        yaxis2=_axis("log loss", domain=[0, 0.46]),
        height=460,
    )


def _with_gaps(hours: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Insert an empty point where hours are missing, so that no line is drawn across the gap."""
    points: list[Mapping[str, Any]] = list(hours[:1])
    for before, after in pairwise(hours):
        if after["hour"] - before["hour"] > 1:
            points.append({"utc": hour_to_utc(before["hour"] + 1)})
        points.append(after)
    return points


def _errors(points: Sequence[Mapping[str, Any]], key: str, n: int) -> dict[str, Any]:
    """95 % intervals as bars around the points."""
    spans = [(point.get(key), point.get(f"{key}_interval")) for point in points]
    return {
        "type": "data",
        "symmetric": False,
        "array": [span[1] - value if value is not None and span else None for value, span in spans],
        "arrayminus": [value - span[0] if value is not None and span else None for value, span in spans],
        "color": _BANDS[n],
        "thickness": 2 if len(points) > 72 else 4,
        "width": 0,
    }


def _learning(series: Series) -> Figure | None:
    data = []
    speed = False
    for n, (name, document) in enumerate(series):
        learning = document.get("learning") or {}
        for key, axis, label in (
            ("loss", "y", "training loss %{y:.4f}"),
            ("auc", "y2", "training AUC %{y:.4f}"),
            ("rows_per_second", "y3", "%{y:,.0f} rows/s"),
        ):
            if _not_none(learning.get(key)):
                speed = speed or axis == "y3"
                data.append(
                    {
                        **_line(n, name, learning["step"], learning[key], f"step %{{x:,}}: {label}"),
                        "yaxis": axis,
                        "legendgroup": name,
                        "showlegend": axis == "y",
                    }
                )
        epochs = document.get("epochs") or []
        for key, axis, label in (("logloss", "y", "log loss"), ("auc", "y2", "AUC")):
            if _not_none([epoch.get(key) for epoch in epochs]) and (data or len(epochs) > 1):
                data.append(
                    {
                        **_line(n, f"{name}, eval after each epoch", [e["step"] for e in epochs],
                                [e.get(key) for e in epochs], f"step %{{x:,}}: eval {label} %{{y:.4f}}"),
                        "mode": "markers" if len(epochs) < 2 else "lines+markers",
                        "line": {"width": 1, "dash": "dot", "color": _LINES[n]},
                        "marker": {"size": 9, "symbol": "diamond", "color": _LINES[n],
                                   "line": {"width": 1, "color": _CARD}},
                        "yaxis": axis,
                        "legendgroup": f"{name}, eval",
                        "showlegend": axis == "y",
                    }
                )  # fmt: skip
    bottom = 3 if speed else 2
    axes = {"yaxis2": _axis("AUC", domain=[0.36, 0.64] if speed else [0, 0.46])}
    if speed:
        axes["yaxis3"] = _axis("rows/s", domain=[0, 0.27], rangemode="tozero", tickformat="~s")
    return _figure(
        data,
        _axis("step", tickformat=",", anchor=f"y{bottom}", rangemode="tozero"),
        _axis("loss", domain=[0.73, 1] if speed else [0.54, 1]),
        **axes,
        height=560 if speed else 420,
    )


# ── by field ───────────────────────────────────────────────────────────────────────────────────


def _importance(series: Series) -> Figure | None:
    return _by_field(
        [name for name, _ in series],
        [{one["name"]: one["lost"] for one in d.get("importance") or ()} for _, d in series],
        "AUC lost when the field is shuffled",
        "%{customdata}: %{x:+.5f} AUC",
    )


def _drift(series: Series) -> Figure | None:
    values_by_model = [
        {one["name"]: one["psi"] for one in (document.get("drift") or {}).get("fields") or ()}
        for _, document in series
    ]
    figure = _by_field(
        [name for name, _ in series],
        values_by_model,
        "PSI between train and eval rows",
        "%{customdata}: PSI %{x:.4f}",
    )
    if figure is None:
        return None
    if sum(map(bool, values_by_model)) == 1:  # with two models, colours distinguish the models
        for trace in figure["data"]:
            trace["marker"] = {"color": [_drift_colour(psi) for psi in trace["x"]]}
    figure["layout"]["shapes"] = [
        _reference_line(x0=threshold, x1=threshold, yref="paper", y0=0, y1=1)
        for threshold in (DRIFT_SOME, DRIFT_LARGE)
    ]
    figure["layout"]["annotations"] = [
        _annotation(label, x=threshold, yref="paper", y=0, xanchor="left")
        for threshold, label in ((DRIFT_SOME, "0.1: some"), (DRIFT_LARGE, "0.25: strong"))
    ]
    largest = max(psi for values in values_by_model for psi in _not_none(values.values()))
    figure["layout"]["xaxis"]["range"] = [0, max(0.32, largest * 1.05)]
    return figure


def _drift_colour(psi: float | None) -> str:
    if psi is None or psi < DRIFT_SOME:
        return _LITTLE
    return _SOME if psi < DRIFT_LARGE else _LARGE


def _by_field(
    names: Sequence[str], values_by_model: Sequence[Mapping[str, float | None]], title: str, hover: str
) -> Figure | None:
    """Bars in descending order."""

    def height(field: str) -> float:
        return max(_not_none(values.get(field) for values in values_by_model), default=float("-inf"))

    fields = sorted(
        dict.fromkeys(field for values in values_by_model for field in values), key=lambda f: (-height(f), f)
    )
    fields = fields[:MAX_FIELDS]
    data: list[dict[str, Any]] = []
    for n, (name, values) in enumerate(zip(names, values_by_model, strict=True)):
        if values:
            data.append(
                {
                    "type": "bar",
                    "orientation": "h",
                    "name": _escaped(name),
                    "y": fields,
                    "x": [values.get(field) for field in fields],
                    "customdata": [_escaped(field) for field in fields],
                    "marker": {"color": _LINES[n]},
                    "hovertemplate": f"{hover}<extra>%{{fullData.name}}</extra>",
                }
            )
    return _figure(
        data,
        _axis(title, zeroline=True),
        _axis(
            "",
            type="category",
            categoryorder="array",
            categoryarray=fields,
            autorange="reversed",
            tickvals=list(range(len(fields))),
            ticktext=[_escaped(_short(field)) for field in fields],
            automargin=True,
            showgrid=False,
        ),
        height=90 + (19 + 9 * len(data)) * len(fields),
        bargap=0.3,
    )


# ── parts of figures ───────────────────────────────────────────────────────────────────────────


_FIGURES: dict[str, Callable[[Series], Figure | None]] = {
    "roc": _roc,
    "precision_recall": _precision_recall,
    "calibration": _calibration,
    "gain": _gain,
    "lift": _lift,
    "hours": partial(_by_hour, part="evaluation"),
    "progressive": partial(_by_hour, part="progressive"),
    "learning": _learning,
    "importance": _importance,
    "drift": _drift,
}


def _curves(series: Series, key: str) -> Iterator[tuple[int, str, Mapping[str, list[float]]]]:
    for n, (name, document) in enumerate(series):
        curve = (document.get("curves") or {}).get(key)
        if curve and any(curve.values()):
            yield n, name, curve


def _curve_lines(series: Series, key: str, x: str, y: str, hover: str) -> list[dict[str, Any]]:
    """A line for each model that has this curve."""
    return [
        _line(n, name, curve[x], curve[y], hover) for n, name, curve in _curves(series, key) if curve.get(y)
    ]


def _metric(document: Document, key: str) -> float | None:
    value: float | None = (document.get("evaluation") or {}).get(key)
    return value


def _not_none(values: Any) -> list[float]:
    return [value for value in values or () if value is not None]


def _line(n: int, name: str, x: Sequence[Any], y: Sequence[Any], hover: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": _escaped(name),
        "x": x,
        "y": y,
        "line": {"width": 2.2, "color": _LINES[n], "dash": "dash" if n else "solid"},
        "hovertemplate": f"{hover}<extra>%{{fullData.name}}</extra>",
    }


def _figure(data: list[dict[str, Any]], xaxis: Any, yaxis: Any, **layout: Any) -> Figure | None:
    if not data:
        return None
    legend_items = sum(trace.get("showlegend", True) for trace in data)
    return {
        "data": data,
        "layout": {
            "height": 380,
            "margin": {"l": 64, "r": 20, "t": 36 if legend_items > 1 else 14, "b": 50},
            "font": {"family": "system-ui, sans-serif", "size": 13, "color": _TEXT},
            "paper_bgcolor": _CLEAR,
            "plot_bgcolor": _CLEAR,
            "hovermode": "closest",
            "hoverlabel": {"bgcolor": _CARD, "bordercolor": _GRID, "font": {"color": _TEXT}},
            "showlegend": legend_items > 1,
            "legend": {
                "orientation": "h",
                "x": 0,
                "y": 1.01,
                "yanchor": "bottom",
                "bgcolor": _CLEAR,
                "traceorder": "normal",
            },
            "xaxis": xaxis,
            "yaxis": yaxis,
            **layout,
        },
    }


def _axis(title: str, **more: Any) -> dict[str, Any]:
    return {
        "title": {"text": title, "standoff": 8, "font": {"size": 12.5, "color": _MUTED}},
        "gridcolor": _GRID,
        "linecolor": _GRID,
        "zeroline": False,
        "zerolinecolor": _MUTED,
        "tickfont": {"color": _MUTED},
        "automargin": True,
        **more,
    }


def _share_axis(title: str, **more: Any) -> dict[str, Any]:
    return _axis(title, **{"range": [0, 1], "tickformat": ".0%", **more})


def _reference_line(**place: Any) -> dict[str, Any]:
    """A reference line: chance, the base rate, or a threshold."""
    return {"type": "line", "layer": "between", "line": {"width": 1, "dash": "dot", "color": _MUTED}, **place}


def _annotation(text: str, **place: Any) -> dict[str, Any]:
    return {
        "text": text,
        "showarrow": False,
        "yanchor": "bottom",
        "font": {"size": 12, "color": _MUTED},
        **place,
    }


def _escaped(text: str) -> str:
    """Escape a user's text for Plotly, which interprets some tags."""
    return html.escape(text, quote=False)


def _short(text: str) -> str:
    return text if len(text) <= 28 else f"{text[:27]}…"
