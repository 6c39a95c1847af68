"""The train stage: dataset to checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from clickline.config import Config
from clickline.errors import GateRefused
from clickline.evaluation.report.page import page_of
from clickline.progress import Progress
from clickline.training.batches import Batches
from clickline.training.local_trainer import LocalTrainer
from clickline.training.metrics_reporter import MetricsReporter
from clickline.training.run_spec import RunSpec
from clickline.training.tracking import RunStatus, Tracker, tracker_of
from clickline.training.train_step import build_train_step
from clickline.training.training_run import Trainer, TrainingRun


@contextmanager
def open_training(config: Config, spec: RunSpec, progress: Progress) -> Iterator[TrainingRun]:
    """The model of a run, to be trained on this machine or on a cluster. At the end its report is sent to the tracker,
    and the processes of a cluster stop."""
    build_step = partial(build_train_step, config, spec.dataset.features, spec.plan, spec.threads)
    batches = Batches(spec.dataset, **spec.batches)
    tracker = tracker_of(config, spec.folder, progress)
    reporter = MetricsReporter(spec.folder, tracker, progress)
    status: RunStatus = "FAILED"
    with ExitStack() as stack:
        stack.callback(lambda: tracker.close(status))
        trainer: Trainer
        if config.train.mode == "cluster":
            from clickline.training.cluster_trainer import cluster_trainer  # only a cluster needs Ray

            trainer = stack.enter_context(cluster_trainer(config, spec, build_step(), reporter))
        else:
            trainer = LocalTrainer(build_step, batches, spec.folder, spec.threads, reporter)
        try:
            tracker.params(config.model_dump(mode="json", include={"name", "data", "model", "train", "gate"}))
            yield TrainingRun(config.train, spec, trainer, batches, reporter)
            status = "FINISHED"
            _send_report(tracker, spec)
        except GateRefused:
            _send_report(tracker, spec)
            raise
        except KeyboardInterrupt:
            status = "KILLED"
            raise


def _send_report(tracker: Tracker, spec: RunSpec) -> None:
    for path in (spec.report, Path(page_of(str(spec.report)))):
        if path.exists():
            tracker.artifact(path)
