"""clickline prepare, train, evaluate, publish: the stages of the pipeline, one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from clickline.cli.console import emit, facts, interval, number, requires_extra, say, table
from clickline.cli.options import ProgressOptions
from clickline.progress import human_size, pluralize

if TYPE_CHECKING:
    from clickline.evaluation.binary_metrics import Metrics
    from clickline.evaluation.run import EvaluateResult


def prepare(options: ProgressOptions) -> None:
    """Convert the logs to a dataset: Parquet shards, statistics, quarantined bad rows."""
    from clickline.data.prepare.run import prepare as run

    config = options.config()
    with options.progress() as progress:
        result = run(config, progress)
    dataset = result.dataset
    if options.as_json:
        emit(
            {
                "dataset": dataset.folder,
                "train_rows": result.train_rows,
                "eval_rows": result.eval_rows,
                "bad_rows": result.bad_rows,
                "reused": result.reused,
                "seconds": result.seconds,
                "report": {name: dict(split.report) for name, split in dataset.splits.items()},
            }
        )
        return
    named: dict[str, object] = {"dataset": dataset.folder + (" (up to date)" if result.reused else "")}
    for name, split in dataset.splits.items():
        report = split.report
        shards = pluralize(len(split.shards), "shard")
        named[name] = f"{report['rows']:,} rows in {shards}, click rate {report['click_rate']:.4f}"
        if report["bad"]:
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in report["bad"].items())
            named[f"{name}, skipped"] = f"{reasons}: see {dataset.folder}/quarantine"
    features = dataset.features
    distinct = sum(slot["distinct"] for slot in dataset.splits["train"].report["slots"])
    named["features"] = (
        f"{len(features.dense)} dense, {len(features.slots)} slots with about {distinct:,} ids"
    )
    named["time"] = f"{result.seconds:.1f} s"
    facts(named)


def train(options: ProgressOptions) -> None:
    """Train on the prepared dataset, evaluate, and check the gate. Exit 3 if it rejects the model."""
    config = options.config()
    with requires_extra("train", "training"):
        from clickline.pipeline.flow import train as run
    with options.progress() as progress:
        result = run(config, progress)
    measured = result.evaluation.total if result.evaluation else None
    if options.as_json:
        emit(
            {
                "checkpoint": str(result.checkpoint.folder),
                "step": result.checkpoint.step,
                "evaluation": None if result.evaluation is None else result.evaluation.to_json(),
                "gate": result.verdict.to_json(),
                "report": str(result.report),
                "reused": result.reused,
                "seconds": result.seconds,
            }
        )
        return
    named: dict[str, object] = {
        "checkpoint": f"{result.checkpoint.folder}{' (up to date)' if result.reused else ''}",
        "steps": f"{result.checkpoint.step:,}",
    }
    if measured is not None:
        named["AUC"] = number(measured.auc)
        named["log loss"] = number(measured.logloss)
        named["calibration"] = number(measured.calibration) + " predicted / actual clicks"
    named["gate"] = "passed"
    page = result.report.with_suffix(".html")
    named["report"] = page if page.exists() else result.report
    named["time"] = f"{result.seconds:.1f} s"
    facts(named)


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
        "clicks": f"{measured.clicks:,.10g} of {measured.impressions:,.10g} impressions, "
        f"rate {number(measured.base_rate)}",
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


def publish(
    options: ProgressOptions,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="A checkpoint folder, or a run (its result).",
            show_default="the newest run",
        ),
    ] = None,
    base: Annotated[bool, typer.Option("--base", help="Write a full version instead of a delta.")] = False,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Recorded in the history.")] = "published",
) -> None:
    """Package a checkpoint that passed the gate, verify the files, and make it the current version."""
    config = options.config()
    with requires_extra("train,serve", "publishing"):
        from clickline.publishing.run import publish as run
    with options.progress() as progress:
        result = run(config, progress, model=model, base=base, reason=reason)
    version = result.version
    manifest = version.manifest
    if options.as_json:
        emit(
            {
                "version": version.number,
                "folder": version.folder,
                "table": manifest.table,
                "parent": version.parent,
                "rows": manifest.rows,
                "tombstones": manifest.tombstones,
                "bytes": result.version.size,
                "current": result.move is not None,
                "reused": result.reused,
                "difference": manifest.sample.difference,
                "cost": vars(manifest.cost),
                "seconds": result.seconds,
            }
        )
        return
    kind = "base" if version.parent is None else f"delta of version {version.parent}"
    removed = f", {manifest.tombstones:,} ids removed" if manifest.tombstones else ""
    state = (", up to date" if result.reused else "") + (
        ", current" if result.move else ", not current: see above"
    )
    named: dict[str, object] = {
        "version": f"{version.number}, {kind}{state}",
        "table": f"{manifest.rows:,} rows{removed}, {manifest.table_precision}, {manifest.shards} shards",
        "size": human_size(version.size),
        "verified": f"{manifest.sample.rows} rows scored again, largest difference "
        f"{manifest.sample.difference:.1g}",
    }
    cost = manifest.cost
    if cost.rows:
        named["quantization"] = (
            f"AUC {_signed(cost.auc)}, log loss {_signed(cost.logloss)} on {cost.rows:,} rows"
        )
    named["folder"] = version.folder
    named["time"] = f"{result.seconds:.1f} s"
    facts(named)


def _signed(value: float | None) -> str:
    return "not measured" if value is None else f"{value:+.5f}"
