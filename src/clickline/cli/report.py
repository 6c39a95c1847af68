"""clickline report: the page of a run or an evaluation, or of two side by side."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clickline.cli.console import emit, facts, note, say, table
from clickline.cli.options import ConfigFile, Json, Overrides
from clickline.errors import ArtifactError, StorageError

if TYPE_CHECKING:
    from clickline.storage.storage import Storage

_REPORT = "report.json"
_SHOWN_NAMES = 20
_WHICH = "A run's name or folder, an evaluation's name, or a report's JSON file."


def report(
    first: Annotated[
        str | None, typer.Argument(metavar="A", help=_WHICH, show_default="the newest run")
    ] = None,
    second: Annotated[
        str | None, typer.Argument(metavar="B", help="Another one, to compare with A.", show_default=False)
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            "-o",
            "--out",
            metavar="FILE",
            help="Where the page goes.",
            show_default="beside the JSON file; of two: comparisons/ in home",
        ),
    ] = None,
    config_file: ConfigFile = Path("clickline.yaml"),
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Make the page of a run or an evaluation, or one that compares two, and tell the key figures."""
    from clickline.artifacts.from_config import storage_of
    from clickline.config import load_config

    config = load_config(config_file, overrides or ())
    storage = storage_of(config)
    a = _find(first, config.home, storage)
    if second is None:
        _one(a, out, storage, as_json=as_json)
    else:
        _two(a, _find(second, config.home, storage), config.home, out, storage, as_json=as_json)


@dataclass(frozen=True)
class _Found:
    """A document, and where it was."""

    name: str
    uri: str
    document: Mapping[str, Any]


def _one(found: _Found, out: str | None, storage: Storage, *, as_json: bool) -> None:
    from clickline.evaluation.report.page import page_of, write_page

    place = out or page_of(found.uri)
    write_page(found.document, place, storage)
    document = found.document
    measured, gate, current = document["evaluation"], document["gate"], document.get("current") or {}
    total = None if measured is None else {k: v for k, v in measured.items() if k not in ("hours", "slices")}
    if as_json:
        emit({"name": found.name, "document": found.uri, "page": place, "evaluation": total, "gate": gate})
        return
    named: dict[str, object] = {"report of": found.name}
    for key, words in (("auc", "AUC"), ("logloss", "log loss"), ("calibration", "calibration")):
        if total is not None and total.get(key) is not None:
            interval = total.get(f"{key}_interval")
            between = "" if interval is None else f" (95 %: {interval[0]:.4f} to {interval[1]:.4f})"
            before = (current.get("evaluation") or {}).get(key)
            change = (
                "" if before is None else f", {total[key] - before:+.4f} against version {current['version']}"
            )
            named[words] = f"{total[key]:.4f}{between}{change}"
    if gate is not None:
        named["gate"] = "passed" if gate["passed"] else "refused"
    facts({**named, "page": place})
    for line in [] if gate is None else [*gate["reasons"], *gate["warnings"]]:
        say(f"note: {line}")


def _two(old: _Found, new: _Found, home: str, out: str | None, storage: Storage, *, as_json: bool) -> None:
    from clickline.evaluation.report.comparison import MEASURES
    from clickline.evaluation.report.comparison_page import comparison, write_comparison
    from clickline.storage.storage import Storage as Places

    place = out or Places.join(home, "comparisons", f"{old.name}-{new.name}.html")
    write_comparison((old.name, old.document), (new.name, new.document), place, storage)
    found = comparison(old.document, new.document)
    if as_json:
        emit({"names": [old.name, new.name], "documents": [old.uri, new.uri], "page": place, **found})
        return
    names = {measure.key: measure.name for measure in MEASURES}
    rows = []
    for key, change in found["measures"].items():
        interval = change["interval"]
        between = "" if interval is None else f"{interval[0]:+.4f} to {interval[1]:+.4f}"
        rows.append(
            (
                names.get(key, key),
                f"{change['old']:.4f}",
                f"{change['new']:.4f}",
                f"{change['change']:+.4f}",
                between,
            )
        )
    if rows:
        table(("MEASURE", old.name, new.name, "CHANGE", "95 %"), rows)
        typer.echo()
    if found["same_rows"] is False:
        note("they were measured on different rows, so part of the change may come of the rows")
    facts({"page": place})


# ── which one is meant ─────────────────────────────────────────────────────────────────────────


def _find(text: str | None, home: str, storage: Storage) -> _Found:
    """The document that a text names; None: that of the run which wrote something last."""
    from clickline.storage.storage import Storage as Places

    if text is None:
        runs = _runs(home)
        if not runs:
            raise ArtifactError(
                f"{home} holds no run with a {_REPORT} yet. Run `clickline train` first, or name a file."
            )
        return _read(runs[0], str(Path(home, "runs", runs[0], _REPORT)), storage)
    places = {
        Places.join(home, "runs", text, _REPORT): text,
        Places.join(home, "evaluations", f"{text.removesuffix('.json')}.json"): text.removesuffix(".json"),
        Places.join(text, _REPORT): Path(text).name,
        text: Path(text).stem if Path(text).name != _REPORT else Path(text).resolve().parent.name,
    }
    for uri, name in places.items():
        if storage.describe(uri) is not None:
            return _read(name, uri, storage)
    runs, evaluations = _runs(home), _evaluations(home, storage)
    near = get_close_matches(text, [*runs, *evaluations], n=1)
    raise ArtifactError(
        f"{text} is no run, no evaluation and no report file{f'; did you mean {near[0]}?' if near else '.'} "
        f"Runs in {home}, newest first: {_listed(runs)}. Evaluations: {_listed(evaluations)}."
    )


def _read(name: str, uri: str, storage: Storage) -> _Found:
    try:
        document = json.loads(storage.read(uri))
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{uri} is no JSON document: {error}. Name a report.json.") from error
    if not isinstance(document, dict) or not ({"evaluation", "gate"} <= document.keys()):
        raise ArtifactError(f"{uri} is not the report of an evaluation: it has no keys evaluation and gate.")
    return _Found(name, uri, document)


def _runs(home: str) -> list[str]:
    """The runs with a report, the one that wrote something last first. Training has its home on local disk."""
    written: dict[str, int] = {}
    for path in Path(home, "runs").glob(f"*/{_REPORT}"):
        # A run that was up to date has only touched the manifest of its checkpoint.
        marks = [path, *path.parent.glob("step-*/manifest.json")]
        written[path.parent.name] = max(mark.stat().st_mtime_ns for mark in marks)
    return sorted(written, key=lambda run: (-written[run], run))


def _evaluations(home: str, storage: Storage) -> list[str]:
    from clickline.storage.storage import Storage as Places

    try:
        names = storage.names(Places.join(home, "evaluations"))
    except StorageError:  # the list is only there to help
        return []
    return [name.removesuffix(".json") for name in names if name.endswith(".json")]


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN_NAMES:,} more" if len(names) > _SHOWN_NAMES else ""
    return ", ".join(names[:_SHOWN_NAMES]) + more if names else "none"
