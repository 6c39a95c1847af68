"""clickline train: trains on the dataset, evaluates the model and checks it against the gate."""

from __future__ import annotations

from pathlib import Path

from clickline.cli.console import emit, facts, requires_extra, show_progress
from clickline.cli.options import ConfigFile, Json, Overrides, Quiet


def train(
    config_file: ConfigFile = Path("clickline.yaml"),
    overrides: Overrides = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train on the prepared dataset, evaluate, and check the gate. Exit 3 if it rejects the model."""
    from clickline.config import load_config

    config = load_config(config_file, overrides or ())
    with requires_extra("train", "training"):
        from clickline.pipeline.flow import train as run
    with show_progress(as_json=as_json, quiet=quiet) as progress:
        result = run(config, progress)
    measured = result.evaluation.total if result.evaluation else None
    if as_json:
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
        named["AUC"] = _number(measured.auc)
        named["log loss"] = _number(measured.logloss)
        named["calibration"] = _number(measured.calibration) + " predicted / actual clicks"
    named["gate"] = "passed"
    page = result.report.with_suffix(".html")
    named["report"] = page if page.exists() else result.report
    named["time"] = f"{result.seconds:.1f} s"
    facts(named)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
