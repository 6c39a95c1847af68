"""The story from logs to a version, read top to bottom. What has not changed is not done again, and says so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clickline.config import Config
from clickline.data.prepare.run import PrepareResult, prepare
from clickline.errors import GateRefused
from clickline.progress import Progress, StageState
from clickline.publishing.run import PublishResult, publish
from clickline.training.run import TrainResult, check_supported, train


@dataclass(frozen=True)
class Built:
    """What the stages made, or found already made."""

    prepared: PrepareResult
    trained: TrainResult
    published: PublishResult


def build(config: Config, progress: Progress) -> Built:
    """Logs to a version that is current. Raises GateRefused if the model is not good enough."""
    check_supported(config)  # before hours of preparing
    progress.stage("prepare", "running")
    prepared = prepare(config, progress)
    progress.stage("prepare", _ended(prepared.reused), _of_dataset(prepared))

    progress.stage(
        "train", "running"
    )  # it measures and judges by itself, and trains on while the gate refuses
    try:
        trained = train(config, progress)
    except GateRefused as refused:
        progress.stage("train", "done")
        progress.stage("gate", "refused", {"passed": False, "reasons": list(refused.reasons)})
        raise
    progress.stage("train", _ended(trained.reused), _of_checkpoint(trained))
    progress.stage("evaluate", _ended(trained.reused), _of_evaluation(trained))
    verdict = trained.verdict
    progress.stage("gate", "done", {"passed": verdict.passed, "warnings": list(verdict.warnings)})

    progress.stage("publish", "running")
    published = publish(config, progress, model=str(trained.checkpoint.folder))
    progress.stage("publish", _ended(published.reused), _of_version(published))
    return Built(prepared, trained, published)


def _ended(reused: bool) -> StageState:
    return "skipped" if reused else "done"


def _of_dataset(prepared: PrepareResult) -> Mapping[str, Any]:
    return {
        "dataset": prepared.dataset.folder,
        "train_rows": prepared.train_rows,
        "eval_rows": prepared.eval_rows,
        "bad_rows": prepared.bad_rows,
        "seconds": prepared.seconds,
    }


def _of_checkpoint(trained: TrainResult) -> Mapping[str, Any]:
    return {
        "checkpoint": str(trained.checkpoint.folder),
        "steps": trained.checkpoint.step,
        "seconds": trained.seconds,
    }


def _of_evaluation(trained: TrainResult) -> Mapping[str, Any]:
    total = None if trained.evaluation is None else trained.evaluation.total
    measured = {
        name: None if total is None else getattr(total, name) for name in ("auc", "logloss", "calibration")
    }
    return {**measured, "report": str(trained.report)}


def _of_version(published: PublishResult) -> Mapping[str, Any]:
    body = published.version.body
    return {
        "version": published.version.number,
        "folder": published.version.folder,
        "table": body["table"],
        "rows": body["rows"],
        "current": published.move is not None,
        "seconds": published.seconds,
    }
