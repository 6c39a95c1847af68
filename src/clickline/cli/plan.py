"""clickline plan: estimates memory, disk, time and shard counts before anything is spent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from clickline.cli.console import emit, facts, requires_extra, table, wrong_argument
from clickline.cli.options import ProgressOptions
from clickline.pipeline.status_text import duration
from clickline.progress import human_size

if TYPE_CHECKING:
    from clickline.pipeline.planning.plan_result import Plan

_MAX_SLOTS = 8


def plan(
    options: ProgressOptions,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Memory of one machine, such as 16GiB.", show_default="this machine's"
        ),
    ] = None,
    probe: Annotated[
        bool, typer.Option("--probe/--no-probe", help="Train on a few batches to measure time and memory.")
    ] = True,
) -> None:
    """Estimate the memory, disk and time that this config needs, and what fits on one machine."""
    config = options.config()
    machine = None if memory is None else _bytes(memory)
    with requires_extra("train", "planning"):
        from clickline.pipeline.planning.run import plan as run
    with options.progress() as progress:
        estimate = run(config, progress, memory=machine, probe=probe)
    if options.as_json:
        emit(estimate.to_json())
    else:
        _show(estimate)


def _bytes(text: str) -> int:
    from pydantic import TypeAdapter, ValidationError

    from clickline.config.value_types import Size

    try:
        size: int = TypeAdapter(Size).validate_python(text)
    except ValidationError as error:
        problem = f"is {text!r}. Allowed: at least 1MiB, as a number with KiB, MiB, GiB or TiB."
        raise wrong_argument("--memory", problem, "Write it as 16GiB.") from error
    return size


def _show(plan: Plan) -> None:
    rows, ids, disk = plan.rows, plan.ids, plan.disk
    about = "" if rows.exact else "about "
    between = "" if ids.low == ids.high else f" (between {ids.low:,} and {ids.high:,})"
    largest = sorted(ids.slots, key=lambda slot: -slot.distinct)[:_MAX_SLOTS]
    facts(
        {
            "from": plan.basis,
            "rows": f"{about}{rows.train:,} train, {rows.eval:,} eval",
            "epoch": f"{rows.learned:,} rows in {rows.steps:,} steps of {rows.batch_size:,}",
            "ids": f"{about}{ids.distinct:,}{between} in {len(ids.slots)} slots; {ids.admitted:,} get an embedding",
            "largest slots": ", ".join(f"{slot.name} {slot.distinct:,}" for slot in largest) or "-",
            "checkpoint": f"{human_size(disk.checkpoint)}; {human_size(disk.checkpoints)} for all that a run keeps",
            "version": f"{human_size(disk.version)}, of which {human_size(disk.version_table)} is the table",
        }
    )
    _show_memory(plan)
    _show_time(plan)
    _show_fit(plan)
    typer.echo("\nassumptions")
    for assumption in plan.assumptions:
        typer.echo(f"  {assumption}")


def _show_memory(plan: Plan) -> None:
    memory, serving = plan.memory, plan.serving
    tables, dense = memory.tables, memory.dense
    row_bytes = " and ".join(f"{size} bytes" for size in tables.row_bytes)
    typer.echo("\ntraining memory")
    facts(
        {
            "  embedding rows": f"{human_size(tables.rows)}, {row_bytes} each with optimizer state",
            "  ids not admitted": human_size(tables.candidates),
            "  index": human_size(tables.index),
            "  growth reserve": human_size(tables.slack),
            "  process": f"{human_size(memory.process)}: Python, PyTorch, the model",
            "  working": f"{human_size(memory.working)}: rows read ahead, a batch and its activations",
            "  snapshot": f"{human_size(memory.snapshot)}: rows kept while a checkpoint is written",
            "  peak": human_size(memory.peak),
            "  network": f"weights {human_size(dense.weights)}, optimizer {human_size(dense.optimizer)}, activations "
            f"about {human_size(dense.activations)}; part of process and working",
        }
    )
    typer.echo("\nserving memory")
    facts(
        {
            "  table": f"2 x {human_size(serving.table)}: two versions while one replaces the other",
            "  processes": f"{serving.processes} x {human_size(serving.process)}",
            "  shared": human_size(serving.server),
            "  peak": human_size(serving.peak),
        }
    )


def _show_time(plan: Plan) -> None:
    time = plan.time
    if time is None:
        return
    typer.echo("\ntime on this machine")
    named = {
        "  start": duration(time.start),
        "  epoch": f"{duration(time.learn)}, {time.rows_per_second:,.0f} rows/s",
        "  evaluate": duration(time.evaluate),
        "  checkpoint": duration(time.checkpoint),
        "  train": f"{duration(time.total)} in total",
    }
    if time.prepare is not None:
        named = {"  prepare": duration(time.prepare), **named}
    facts(named)


def _show_fit(plan: Plan) -> None:
    fit = plan.fit
    typer.echo(f"\nmachines with {human_size(fit.memory)}")
    for line in fit.arithmetic:
        typer.echo(f"  {line}")
    serve = _machines(fit.serve_shards, fit.serve_fits, "serve")
    if fit.serve_processes:
        serve += f"; beside the complete table there is room for {fit.serve_processes} processes"
    typer.echo(f"  to train, {_machines(fit.train_shards, fit.train_fits, 'train')}")
    typer.echo(f"  to serve, {serve}")
    if fit.remedies:
        typer.echo("\neffect of changes")
        table(
            ("  --set", "TRAIN", "VERSION", "SERVE", "FITS"),
            [
                (
                    f"  {remedy.change}",
                    human_size(remedy.train_peak),
                    human_size(remedy.version),
                    human_size(remedy.serve_peak),
                    "yes" if remedy.fits else "no",
                )
                for remedy in fit.remedies
            ],
        )


def _machines(shards: int | None, fits: bool, work: str) -> str:
    if fits:
        return "one is enough"
    if shards is None:
        return "no number is enough: everything besides the tables needs too much"
    if work == "train":
        return f"one is too small; {shards} would each hold a part of the tables (this release trains on one)"
    return f"one is too small; use publish.shards={shards} with a lookup server for each"
