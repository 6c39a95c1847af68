"""clickline evaluate: evaluates any checkpoint or version on any data and writes a report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from clickline.cli.console import emit, facts, interval, number, requires_extra, say, table
from clickline.cli.options import ProgressOptions

if TYPE_CHECKING:
    from clickline.evaluation.binary_metrics import Metrics
    from clickline.evaluation.run import EvaluateResult

_METRICS = ("ROWS", "CLICKS", "AUC", "LOG LOSS", "CALIBRATION")


def evaluate(
    options: ProgressOptions,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="A checkpoint folder, a run (its result), a version number, or current.",
            show_default="the newest run",
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DATA",
            help="A dataset folder, or raw logs (a path, a quoted glob, a URI); may be repeated.",
            show_default="the current dataset",
        ),
    ] = None,
    split: Annotated[Literal["train", "eval"], typer.Option(help="The split of a dataset to use.")] = "eval",
    slices: Annotated[
        list[str] | None,
        typer.Option(
            "--slice",
            metavar="SLOT",
            help="Break the metrics down by the values of this slot; may be repeated.",
            show_default=False,
        ),
    ] = None,
    importance: Annotated[
        bool,
        typer.Option(
            "--importance",
            help="Report permutation importance: the AUC lost when a field is shuffled, one pass per field.",
        ),
    ] = False,
    seed: Annotated[int, typer.Option(help="Random seed of --importance.", min=0)] = 0,
    out: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Where to write the report.", show_default="evaluations/ in home"),
    ] = None,
) -> None:
    """Evaluate a model on any data and check it against the gate."""
    config = options.config()
    with requires_extra("train", "evaluating"):
        from clickline.evaluation.run import evaluate as run
    with options.progress() as progress:
        result = run(
            config,
            progress,
            model=model,
            data=data or (),
            split=split,
            slices=slices or (),
            importance=importance,
            seed=seed,
            out=out,
        )
    if options.as_json:
        emit({**result.to_json(), "report": result.report, "seconds": result.seconds})
    else:
        _show(result)


def _show(result: EvaluateResult) -> None:
    measured = result.evaluation.total
    bad = ", ".join(f"{count:,} {reason}" for reason, count in result.bad.items())
    own = {name: f"{value:.6g}" for name, value in result.evaluation.custom.items()}
    named: dict[str, object] = {
        "model": result.model.title,
        "rows": f"{measured.rows:,}" + (f"; skipped as bad: {bad}" if bad else ""),
        "clicks": f"{measured.clicks:,.10g} of {measured.shows:,.10g} impressions, rate {number(measured.base_rate)}",
        "AUC": _auc(measured),
        "log loss": number(measured.logloss) + interval(measured.logloss_interval),
        "normalised entropy": number(measured.normalised_entropy),
        "accuracy": number(measured.accuracy),
        "calibration": f"{number(measured.calibration)} predicted / actual clicks",
        "ECE": number(measured.ece),
        **own,
        "gate": "passed" if result.verdict.passed else "refused",
        "report": result.report if result.page is None else result.page,
        "time": f"{result.seconds:.1f} s",
    }
    facts(named)
    for line in (*measured.notes, *result.verdict.reasons, *result.verdict.warnings):
        say(f"note: {line}")
    if result.evaluation.hours:
        rows = [(hour.utc or "unknown", *_figures(hour.metrics)) for hour in result.evaluation.hours]
        _titled("By hour (UTC)", ("HOUR", *_METRICS), rows)
    for slot, values in result.evaluation.slices.items():
        rows = [(result.name_of(slot, one.id), *_figures(one.metrics)) for one in values]
        _titled(f"By {slot}, the values with most impressions", (slot, *_METRICS), rows)
    if result.importance is not None:
        fields = [(one.name, one.kind, f"{one.lost:+.5f}", number(one.auc)) for one in result.importance]
        _titled("AUC lost when a field is shuffled", ("FIELD", "KIND", "LOST", "AUC WITHOUT"), fields)


def _titled(title: str, header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    say(f"\n{title}")
    table(header, rows)


def _figures(metrics: Metrics) -> tuple[str, ...]:
    measures = (number(value) for value in (metrics.auc, metrics.logloss, metrics.calibration))
    return (f"{metrics.rows:,}", f"{metrics.clicks:,.10g}", *measures)


def _auc(measured: Metrics) -> str:
    if measured.auc is None or measured.auc_error is None:
        return "-"
    error = "exact" if measured.auc_error == 0 else f"error below {measured.auc_error:.1g}"
    return f"{measured.auc:.5f}{interval(measured.auc_interval)}, {error}"
