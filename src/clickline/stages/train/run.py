"""The train stage on one machine: dataset to checkpoint, then evaluation and the gate."""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

from clickline.artifacts.checkpoint import Checkpoint
from clickline.artifacts.dataset import Dataset, Split
from clickline.artifacts.manifest import as_json, fingerprint
from clickline.config import Config
from clickline.config.loader import resolved
from clickline.errors import ConfigError, DataError, GateRefused, Mistake
from clickline.intake.stores import registry_of
from clickline.learner import Learner, Model
from clickline.metrics.binary import Metrics
from clickline.metrics.evaluation import Evaluation
from clickline.metrics.gate import Thresholds, Verdict, judge
from clickline.models import check_export
from clickline.progress import Progress
from clickline.stages.train.batches import Batches
from clickline.stages.train.plan import batch_size_of, plan_of
from clickline.stages.train.trainer import Result, Trainer
from clickline.stages.train.warm import earlier
from clickline.storage.stores import Storage
from clickline.tracking import Status, Tracker, open_tracker

__all__ = ["TrainResult", "train"]


@dataclass(frozen=True)
class TrainResult:
    """A checkpoint that passed its gate."""

    checkpoint: Checkpoint
    evaluation: Evaluation | None  # None without eval rows
    verdict: Verdict
    report: Path
    seconds: float


def train(config: Config, progress: Progress | None = None) -> TrainResult:
    """Train, evaluate, judge; train on while the gate refuses and retries are left. Raises GateRefused."""
    began = time.monotonic()
    progress = progress or Progress()
    _check_supported(config)
    dataset = Dataset.current(Storage(), config.home)
    if not dataset.splits["train"].rows:
        raise DataError(f"dataset {dataset.id} has no training rows. Check data.train.")
    train, threads = config.train, _threads()
    held_out = 0.0 if train.calibration is None else train.calibration.share
    expected = _learned_rows(dataset.splits["train"], train.negative_sampling, held_out)
    batch_size = batch_size_of(train, expected)
    plan = plan_of(config, dataset.features, expected)
    file = None if config.model.file is None else Path(config.model.file)
    learner = Learner(Model.build(dataset.features, plan, threads, file))
    check_export(learner.model.network, learner.model.spec)  # what cannot be published is not worth training
    start = None if train.warm_start is None else earlier(Path(train.warm_start), dataset.features, progress)
    identity = {
        "dataset": dataset.id,
        "plan": plan.to_json(),
        "batch_size": batch_size,
        "train": train.model_dump(mode="json", include={"order", "eviction", "calibration"}),
        "threads": threads,
        "warm_start": None if start is None else start.body["tables_sha256"],
    }
    run = Path(config.home, "runs", fingerprint(identity))
    Storage().put(str(run / "resolved.yaml"), resolved(config).encode())
    batches = Batches(
        dataset,
        Path(dataset.folder),
        batch_size,
        train.seed,
        in_time=train.order == "time",
        held_out=held_out,
        negative_sampling=train.negative_sampling,
    )
    tracker = _tracker(config, run, progress)
    trainer = Trainer(train, dataset, learner, batches, run, identity, tracker, progress)
    status: Status = "FAILED"
    try:
        tracker.params(config.model_dump(mode="json", include={"name", "data", "model", "train", "gate"}))
        trainer.resume(start)
        result = _train_and_judge(config, trainer, run, progress, began)
        tracker.metrics(result.checkpoint.step, _figures(result.evaluation))
        tracker.artifact(result.report)
        status = "FINISHED"
    except GateRefused:
        tracker.artifact(run / "report.json")
        raise
    except KeyboardInterrupt:
        status = "KILLED"
        raise
    finally:
        tracker.close(status)
    return result


def _train_and_judge(
    config: Config, trainer: Trainer, run: Path, progress: Progress, began: float
) -> TrainResult:
    current: Metrics | None = None
    for attempt in range(config.gate.retries + 1):
        trained = trainer.train_to(config.train.epochs + attempt)
        if attempt == 0 and config.gate.vs_current is not None and trained.evaluation is not None:
            current = _measure_current(config, trainer, progress)
        verdict = _judge(config, trained.evaluation, current)
        report = _write_report(run, trained, verdict)
        for warning in verdict.warnings:
            progress.say(warning)
        if verdict.passed:
            return TrainResult(
                trained.checkpoint, trained.evaluation, verdict, report, time.monotonic() - began
            )
        for reason in verdict.reasons:
            progress.say(f"the gate refused after {_epochs(trainer.epoch)}: {reason}")
        if trained.evaluation is None or trainer.stopped_early:  # more epochs could not help
            break
    raise GateRefused(
        f"the gate refused the model: {' '.join(verdict.reasons)} Nothing was published; the figures are in {report}."
    )


def _check_supported(config: Config) -> None:
    """What this release does not do yet is refused, never quietly done otherwise."""
    wrong = []
    if config.train.mode != "local":
        wrong.append(("train.mode", f"is {config.train.mode}; this release trains on one machine."))
    if not Storage.is_local(config.home):
        wrong.append(("home", f"is {config.home}; this release trains with a home on local disk."))
    if config.train.early_stop is not None and config.data.eval is None:
        wrong.append(("train.early_stop", "is given, but data.eval gives no rows to measure on."))
    if wrong:
        raise ConfigError(
            [Mistake("clickline.yaml", 0, key, problem, "Change it.") for key, problem in wrong]
        )


def _tracker(config: Config, run: Path, progress: Progress) -> Tracker:
    tracking = config.tracking
    if tracking.enabled is False or (tracking.enabled is None and find_spec("mlflow") is None):
        return Tracker()
    experiment = tracking.experiment or config.name
    return open_tracker(
        tracking.uri, experiment, run.name, home=Path(config.home), folder=run, warn=progress.say
    )


def _learned_rows(split: Split, negative_sampling: float, held_out: float) -> int:
    """How many rows an epoch is expected to learn: the schedules end with the last of them."""
    clicked = min(split.rows, split.report["clicks"])
    return int((clicked + (split.rows - clicked) * negative_sampling) * (1 - held_out))


def _threads() -> int:
    return len(os.sched_getaffinity(0))


def _epochs(count: int) -> str:
    return "1 epoch" if count == 1 else f"{count} epochs"


def _measure_current(config: Config, trainer: Trainer, progress: Progress) -> Metrics | None:
    """The live version on the same rows."""
    from clickline.scoring.versions import (
        measure_current,  # only a gate that compares needs what serving needs
    )

    measured, why = measure_current(
        registry_of(config), trainer.features, trainer.eval_rows(), Path(config.cache.dir), _threads()
    )
    if why:
        progress.say(f"gate.vs_current was not checked: {why}.")
    return measured


def _judge(config: Config, evaluation: Evaluation | None, current: Metrics | None) -> Verdict:
    asked = Thresholds(**config.gate.model_dump(exclude={"retries"}))
    if evaluation is not None:
        return judge(evaluation.total, asked, current)
    if any(value is not None for value in asdict(asked).values()):
        return Verdict(False, ("the gate asks for figures, but data.eval gives no rows to measure them on.",))
    return Verdict(True, (), ("nothing was measured: data.eval is not given.",))


def _write_report(run: Path, trained: Result, verdict: Verdict) -> Path:
    path = run / "report.json"
    document = {
        "checkpoint": trained.checkpoint.folder.name,
        "evaluation": None if trained.evaluation is None else trained.evaluation.to_json(),
        "gate": verdict.to_json(),
        **trained.story,
    }
    Storage().put(str(path), as_json(document, indent=1))
    return path


def _figures(evaluation: Evaluation | None) -> dict[str, float]:
    if evaluation is None:
        return {}
    total = evaluation.total
    found = {"eval_auc": total.auc, "eval_logloss": total.logloss, "eval_calibration": total.calibration}
    return {name: value for name, value in found.items() if value is not None}
