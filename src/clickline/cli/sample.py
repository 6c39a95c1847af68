"""clickline sample: generates synthetic logs whose true click probabilities are known."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from clickline.cli.console import emit, facts, show_progress
from clickline.cli.options import Json, Quiet


def sample(
    format_name: Annotated[
        Literal["criteo", "slots", "paddlerec", "csv"], typer.Option("--format", help="Format of the logs.")
    ] = "criteo",
    rows: Annotated[int, typer.Option(help="Total number of rows.")] = 100_000,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Output folder.")] = Path("data"),
    hours: Annotated[
        int | None, typer.Option(help="Write this many hourly folders YYYYMMDD/HH with donefiles instead.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed; the same seed gives the same logs.")] = 0,
    slots: Annotated[int, typer.Option(help="Number of categorical fields.")] = 26,
    dense: Annotated[int, typer.Option(help="Number of numeric fields.")] = 13,
    cardinality: Annotated[int, typer.Option(help="Distinct ids of the largest slot.")] = 100_000,
    eval_share: Annotated[float, typer.Option(help="Fraction of the rows that goes to eval.*.")] = 0.2,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Generate synthetic logs train.* and eval.* (later in time), whose best achievable AUC is known."""
    from clickline.data.sample.generate import SampleOptions, generate

    options = SampleOptions(format_name, rows, out, hours, seed, slots, dense, cardinality, eval_share)
    with show_progress(as_json=as_json, quiet=quiet) as progress:
        report = generate(options, progress)
    if as_json:
        emit(asdict(report))
        return
    auc = (
        "unknown (all eval rows have the same label)" if report.best_auc is None else f"{report.best_auc:.4f}"
    )
    facts(
        {
            "files": ", ".join(str(file) for file in _few(report.files)),
            "train rows": f"{report.train_rows:,}",
            "eval rows": f"{report.eval_rows:,}",
            "click rate": f"{report.click_rate:.4f}",
            "best achievable AUC": auc,
            "time": f"{report.seconds:.1f} s",
        }
    )


def _few(files: list[Path]) -> list[Path | str]:
    return [*files] if len(files) <= 4 else [*files[:2], f"… {len(files) - 3} more", files[-1]]
