"""The tracker that the config selects."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from clickline.config import Config
from clickline.progress import Progress
from clickline.training.tracking import Tracker, open_tracker


def tracker_of(config: Config, run: Path, progress: Progress) -> Tracker:
    """A tracker that records the run in MLflow, or nothing if that is off or not installed."""
    tracking = config.tracking
    if tracking.enabled is False or (tracking.enabled is None and find_spec("mlflow") is None):
        return Tracker()
    experiment = tracking.experiment or config.name
    return open_tracker(
        tracking.uri, experiment, run.name, home=Path(config.home), folder=run, warn=progress.log
    )
