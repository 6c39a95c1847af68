"""Building blocks of the report pages: HTML elements with escaped text, and the page around them."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any

from clickline.errors import ClicklineError
from clickline.evaluation.report.plots import DARK, Figure


class Html(str):
    """Text that is already HTML. Only `tag` and `joined` create it."""

    __slots__ = ()


_MAX_UNSCROLLED_ROWS = 40  # longer tables scroll
_VOID = ("meta", "br", "hr")


def tag(name: str, /, *children: object, **attributes: str | None) -> Html:
    """An element. Children that are not Html are escaped, None is skipped; attributes are named `class_`,
    `aria_label`."""
    attrs = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Html(f"<{name}{attrs}>")
    return Html(f"<{name}{attrs}>{joined(children)}</{name}>")


def joined(children: Iterable[object]) -> Html:
    return Html("".join(_escaped(child) for child in children if child is not None))


def _escaped(child: object) -> str:
    return child if isinstance(child, Html) else html.escape(str(child))


# ── numbers as text ────────────────────────────────────────────────────────────────────────────


def number(value: float | None, digits: int = 4) -> str:
    """Format a metric."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:.{digits}f}" if value == 0 or abs(value) >= 10**-digits else f"{value:.2g}"


def signed(value: float | None, digits: int = 4) -> str:
    """Format a change, with a true minus sign, which is as wide as the plus."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:+.{digits}f}".replace("-", "−")


def percent(value: float | None) -> str:
    """Format a share as a percentage."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{100 * value:.1f} %" if value == 0 or abs(value) >= 0.001 else f"{100 * value:.2g} %"


def count(value: float | None) -> str:
    """Format a count; that of weighted rows may have a fraction."""
    return "–" if value is None or not math.isfinite(value) else f"{value:,.10g}"


# ── blocks ─────────────────────────────────────────────────────────────────────────────────────


def section(id: str, title: str, *children: object) -> Html:
    return tag("section", tag("h2", title, id=f"{id}-title"), *children, id=id, aria_labelledby=f"{id}-title")


def table(
    caption: str, header: Sequence[str], rows: Iterable[Sequence[object]], *, text_columns: int = 1
) -> Html:
    """A table whose first `text_columns` columns are text, the others numbers."""

    def cell(n: int, value: object) -> Html:
        if n == 0:
            return tag("th", value, scope="row")
        return tag("td", value, class_=None if n < text_columns else "figure")

    head = [
        tag("th", name, scope="col", class_=None if n < text_columns else "figure")
        for n, name in enumerate(header)
    ]
    body = [tag("tr", *(cell(n, value) for n, value in enumerate(row))) for row in rows]
    element = tag("table", tag("caption", caption), tag("thead", tag("tr", *head)), tag("tbody", *body))
    scroll = " long" if len(body) > _MAX_UNSCROLLED_ROWS else ""
    return tag("div", element, class_=f"scroll{scroll}", tabindex="0", role="region", aria_label=caption)


def collapsible(title: str, *children: object) -> Html:
    return tag("details", tag("summary", title), *children)


def figure(id: str, title: str, caption: object, values: Html, figures: Mapping[str, Figure]) -> Html:
    """A plot with its caption and its values as a table; empty if there is no such plot."""
    if id not in figures:
        return Html("")
    height = f"min-height:{figures[id]['layout']['height']}px"
    return tag(
        "figure",
        tag("h3", title, id=f"{id}-name"),
        tag("figcaption", caption, id=f"{id}-words"),
        tag(
            "div",
            class_="plot",
            id=f"plot-{id}",
            data_figure=id,
            role="img",
            aria_labelledby=f"{id}-name",
            aria_describedby=f"{id}-words",
            style=height,
        ),
        collapsible(f"Values: {title}", values),
        class_="card",
    )


# ── the page ───────────────────────────────────────────────────────────────────────────────────


def page_html(
    title: str,
    parts: Sequence[tuple[str, str, Html]],
    top: Html,
    documents: Mapping[str, Any],
    figures: Mapping[str, Figure],
) -> str:
    """The whole page. `parts` are the id, short name and content of the sections; `documents` are embedded as JSON.

    The content security policy allows no requests and only the two scripts, by their SHA-256.
    """
    scripts = [_plotly(), _asset("page.js")]
    allowed = " ".join(f"'sha256-{_sha256(script)}'" for script in scripts)
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    present = [(id, name, content) for id, name, content in parts if content]
    links = [tag("li", tag("a", name, href=f"#{id}")) for id, name, _ in present]
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("title", title),
        tag("style", Html(_asset("page.css"))),
    )
    body = tag(
        "body",
        tag("a", "Skip to the report", class_="skip", href="#report-body"),
        tag("header", top),
        tag("nav", tag("ul", *links), aria_label="Sections of the report"),
        tag("main", *(content for _, _, content in present), id="report-body"),
        tag("footer", "Generated by Clickline from the JSON document embedded in this file."),
        *(_json(id, document) for id, document in documents.items()),
        _json("figures", figures),
        _json("dark", DARK),
        *(tag("script", Html(script)) for script in scripts),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _json(id: str, document: Any) -> Html:
    """A document in a script element that is not executed. No character in it can end the element."""
    text = json.dumps(_replace_nan(document), separators=(",", ":"))
    for char in "<>&":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return tag("script", Html(text), type="application/json", id=id)


def _replace_nan(tree: Any) -> Any:
    """Replace NaN and infinities, which JSON does not have, by null."""
    if isinstance(tree, float):
        return tree if math.isfinite(tree) else None
    if isinstance(tree, Mapping):
        return {key: _replace_nan(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_replace_nan(value) for value in tree]
    return tree


def _plotly() -> str:
    try:
        script = files("plotly").joinpath("package_data", "plotly.min.js").read_text("utf-8")
    except ModuleNotFoundError as error:
        raise ClicklineError(
            f"report pages need the package {error.name}: pip install 'clickline[report]'"
        ) from error
    return script.replace("</script", "<\\/script")


def _asset(name: str) -> str:
    return files("clickline.evaluation.report").joinpath(name).read_text("utf-8")


def _sha256(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
