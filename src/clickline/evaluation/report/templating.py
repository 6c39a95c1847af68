"""Renders a report page from its template: numbers as text, and everything that makes the page one offline file."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Mapping, Sequence
from functools import cache, partial
from html import unescape
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from clickline.errors import ClicklineError
from clickline.evaluation.report.plots import DARK, DRIFT_LARGE, DRIFT_SOME, MAX_FIELDS, Figure

if TYPE_CHECKING:
    from jinja2 import Environment


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


def _interval(interval: Sequence[float] | None) -> str:
    return "–" if interval is None else f"{number(interval[0])} to {number(interval[1])}"


def _signed_interval(interval: Sequence[float] | None) -> str:
    return "–" if interval is None else f"{signed(interval[0])} to {signed(interval[1])}"


def _curve_value(value: float | None) -> str:
    return count(value) if isinstance(value, int) or (value or 0) >= 1000 else number(value)


def _coordinate(value: object) -> str:
    return number(value) if isinstance(value, float) else _text(value)


def _hour(utc: str | None) -> str:
    return f"{utc.replace('T', ' ')} h" if utc else "unknown"


def _text(value: object) -> str:
    return "–" if value is None else str(value)


def _short(value: object) -> str:
    text = "missing" if value is None else str(value)
    return text if len(text) <= 40 else f"{text[:39]}…"


def _plural(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"


def value_at(x: Sequence[float] | None, y: Sequence[float | None] | None, place: float) -> float | None:
    """The value of a curve at `place`, taken from the nearest point."""
    if not x or not y:
        return None
    known = [(abs(a - place), b) for a, b in zip(x, y, strict=False) if a is not None and b is not None]
    return min(known)[1] if known else None


def last_known(values: Sequence[Any] | None) -> Any:
    """The last value that is not None."""
    return next((value for value in reversed(values or ()) if value is not None), None)


def render(
    template: str, title: str, documents: Mapping[str, Any], figures: Mapping[str, Figure], **values: Any
) -> str:
    """Render a page with the documents embedded as JSON. Raises ClicklineError if the extra is not installed.

    The content security policy allows no requests and only the two scripts, by their SHA-256.
    """
    try:
        from markupsafe import Markup

        environment = _environment()
        plotly = files("plotly").joinpath("package_data", "plotly.min.js").read_text("utf-8")
    except ModuleNotFoundError as error:
        raise ClicklineError(
            f"report pages need the package {error.name}: pip install 'clickline[report]'"
        ) from error
    scripts = [plotly.replace("</script", "<\\/script"), _asset("page.js")]
    allowed = " ".join(f"'sha256-{_sha256(script)}'" for script in scripts)
    return environment.get_template(template).render(
        title=title,
        policy=f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'",
        style=Markup(_asset("page.css")),
        scripts=[Markup(script) for script in scripts],
        embedded=_replace_nan({**documents, "figures": figures, "dark": DARK}),
        figures=figures,
        **values,
    )


@cache
def _environment() -> Environment:
    """The templates' environment. Every value is escaped; a name that is not defined is an error."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("clickline.evaluation.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    formats = {
        "number": number,
        "signed": signed,
        "signed_5": partial(signed, digits=5),
        "percent": percent,
        "count": count,
        "ratio": partial(number, digits=3),
        "interval": _interval,
        "signed_interval": _signed_interval,
        "curve_value": _curve_value,
        "coordinate": _coordinate,
        "unescape": unescape,
        "hour": _hour,
        "text": _text,
        "short": _short,
        "plural": _plural,
        "duration": _duration,
        "last_known": last_known,
    }
    environment.filters.update(formats)
    environment.globals.update(
        formats,
        value_at=value_at,
        zip=zip,
        MAX_FIELDS=MAX_FIELDS,
        DRIFT_SOME=DRIFT_SOME,
        DRIFT_LARGE=DRIFT_LARGE,
    )
    return environment


def _replace_nan(tree: Any) -> Any:
    """Replace NaN and infinities, which JSON does not have, by null."""
    if isinstance(tree, float):
        return tree if math.isfinite(tree) else None
    if isinstance(tree, Mapping):
        return {key: _replace_nan(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_replace_nan(value) for value in tree]
    return tree


def _asset(name: str) -> str:
    return files("clickline.evaluation.report").joinpath("templates", name).read_text("utf-8")


def _sha256(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
