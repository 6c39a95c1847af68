"""clickline train: trains on the dataset, evaluates the model and checks it against the gate."""

from __future__ import annotations

from clickline.cli.console import emit, facts, number, requires_extra
from clickline.cli.options import ProgressOptions


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
