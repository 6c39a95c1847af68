"""clickline report: renders the report page of a run or an evaluation, or compares two."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clickline.cli.console import emit, facts, interval, note, say, table
from clickline.cli.options import JsonOptions
from clickline.errors import ArtifactError, StorageError

if TYPE_CHECKING:
    from clickline.storage.storage import Storage

_REPORT = "report.json"
_MAX_NAMES = 20
_SOURCE_HELP = "A run (name or folder), the name of an evaluation, or the JSON file of a report."


def report(
    options: JsonOptions,
    first: Annotated[
        str | None, typer.Argument(metavar="A", help=_SOURCE_HELP, show_default="the newest run")
    ] = None,
    second: Annotated[
        str | None, typer.Argument(metavar="B", help="Another report, to compare with A.", show_default=False)
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            "-o",
            "--out",
            metavar="FILE",
            help="Where to write the page.",
            show_default="beside the JSON file; for a comparison: comparisons/ in home",
        ),
    ] = None,
) -> None:
    """Render the report page of a run or an evaluation, or compare two, and print the key metrics."""
    from clickline.artifacts.from_config import storage_of

    config = options.config()
    storage = storage_of(config)
    a = _find(first, config.home, storage)
    if second is None:
        _render(a, out, storage, as_json=options.as_json)
    else:
        _compare(a, _find(second, config.home, storage), config.home, out, storage, as_json=options.as_json)


@dataclass(frozen=True)
class _Report:
    """A report document, its name and its URI."""

    name: str
    uri: str
    document: Mapping[str, Any]


def _render(report: _Report, out: str | None, storage: Storage, *, as_json: bool) -> None:
    from clickline.evaluation.report.page import page_of, write_page

    page = out or page_of(report.uri)
    write_page(report.document, page, storage)
    document = report.document
    measured, gate, current = document["evaluation"], document["gate"], document.get("current") or {}
    total = None if measured is None else {k: v for k, v in measured.items() if k not in ("hours", "slices")}
    if as_json:
        emit({"name": report.name, "document": report.uri, "page": page, "evaluation": total, "gate": gate})
        return
    named: dict[str, object] = {"report of": report.name}
    for key, title in (("auc", "AUC"), ("logloss", "log loss"), ("calibration", "calibration")):
        if total is not None and total.get(key) is not None:
            between = interval(total.get(f"{key}_interval"))
            before = (current.get("evaluation") or {}).get(key)
            change = (
                "" if before is None else f", {total[key] - before:+.4f} against version {current['version']}"
            )
            named[title] = f"{total[key]:.4f}{between}{change}"
    if gate is not None:
        named["gate"] = "passed" if gate["passed"] else "refused"
    facts({**named, "page": page})
    for line in [] if gate is None else [*gate["reasons"], *gate["warnings"]]:
        say(f"note: {line}")


def _compare(
    old: _Report, new: _Report, home: str, out: str | None, storage: Storage, *, as_json: bool
) -> None:
    from clickline.evaluation.report.comparison import METRICS
    from clickline.evaluation.report.comparison_page import comparison, write_comparison

    page = out or storage.join(home, "comparisons", f"{old.name}-{new.name}.html")
    write_comparison((old.name, old.document), (new.name, new.document), page, storage)
    result = comparison(old.document, new.document)
    if as_json:
        emit({"names": [old.name, new.name], "documents": [old.uri, new.uri], "page": page, **result})
        return
    names = {measure.key: measure.name for measure in METRICS}
    rows = []
    for key, change in result["measures"].items():
        bounds = change["interval"]
        between = "" if bounds is None else f"{bounds[0]:+.4f} to {bounds[1]:+.4f}"
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
        table(("METRIC", old.name, new.name, "CHANGE", "95 %"), rows)
        typer.echo()
    if result["same_rows"] is False:
        note("they were evaluated on different rows, so part of the change may come from the rows")
    facts({"page": page})


# ── finding the report ─────────────────────────────────────────────────────────────────────────


def _find(text: str | None, home: str, storage: Storage) -> _Report:
    """The report that `text` names; by default that of the run that wrote something last."""
    if text is None:
        runs = _runs(home)
        if not runs:
            raise ArtifactError(
                f"{home} has no run with a {_REPORT} yet. Run `clickline train` first, or name a file."
            )
        return _read(runs[0], str(Path(home, "runs", runs[0], _REPORT)), storage)
    places = {
        storage.join(home, "runs", text, _REPORT): text,
        storage.join(home, "evaluations", f"{text.removesuffix('.json')}.json"): text.removesuffix(".json"),
        storage.join(text, _REPORT): Path(text).name,
        text: Path(text).stem if Path(text).name != _REPORT else Path(text).resolve().parent.name,
    }
    for uri, name in places.items():
        if storage.describe(uri) is not None:
            return _read(name, uri, storage)
    runs, evaluations = _runs(home), _evaluations(home, storage)
    near = get_close_matches(text, [*runs, *evaluations], n=1)
    raise ArtifactError(
        f"{text} is not a run, an evaluation or a report file{f'; did you mean {near[0]}?' if near else '.'} "
        f"Runs in {home}, newest first: {_listed(runs)}. Evaluations: {_listed(evaluations)}."
    )


def _read(name: str, uri: str, storage: Storage) -> _Report:
    try:
        document = json.loads(storage.read(uri))
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{uri} is not a JSON document: {error}. Name a report.json.") from error
    if not isinstance(document, dict) or not ({"evaluation", "gate"} <= document.keys()):
        raise ArtifactError(f"{uri} is not the report of an evaluation: it has no keys evaluation and gate.")
    return _Report(name, uri, document)


def _runs(home: str) -> list[str]:
    """The runs with a report, most recently written first. Training has its home on local disk."""
    written: dict[str, int] = {}
    for path in Path(home, "runs").glob(f"*/{_REPORT}"):
        # A run that was up to date only touches the manifest of its checkpoint.
        files = [path, *path.parent.glob("step-*/manifest.json")]
        written[path.parent.name] = max(file.stat().st_mtime_ns for file in files)
    return sorted(written, key=lambda run: (-written[run], run))


def _evaluations(home: str, storage: Storage) -> list[str]:
    try:
        names = storage.names(storage.join(home, "evaluations"))
    except StorageError:  # the list is only a hint
        return []
    return [name.removesuffix(".json") for name in names if name.endswith(".json")]


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES:,} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more if names else "none"
