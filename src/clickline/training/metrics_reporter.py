"""Reports the metrics of the newest rows while training: the progress line, the tracker and the learning curve."""

from __future__ import annotations

from pathlib import Path

from clickline.progress import Progress
from clickline.training.learning_curve import LearningCurve
from clickline.training.tracking import Tracker


class MetricsReporter:
    """Where the metrics of a run go."""

    def __init__(self, run: Path, tracker: Tracker, progress: Progress) -> None:
        self.tracker = tracker
        self.progress = progress
        self.curve = LearningCurve(run / "curve.json")

    def report(
        self,
        step: int,
        rows: int,
        loss: float | None,
        auc: float | None,
        metrics: dict[str, float],
        status: str,
    ) -> None:
        """`rows` is the number of rows trained so far; `metrics` has at least rows_per_second."""
        known = ""
        if loss is not None and auc is not None:
            known = f"loss {loss:.4f}, AUC {auc:.4f}, "
            metrics = {**metrics, "loss": loss, "auc": auc}
        self.progress.note(f"step {step:,}, {known}{status}")
        self.tracker.metrics(step, metrics)
        self.curve.add(step, rows, loss, auc, metrics["rows_per_second"])
