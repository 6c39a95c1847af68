"""The stages from logs to a published version, in order. A stage whose input has not changed is skipped."""

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
class FlowResult:
    """The results of the stages, whether new or reused."""

    prepared: PrepareResult
    trained: TrainResult
    published: PublishResult


def run_flow(config: Config, progress: Progress) -> FlowResult:
    """Run all stages from logs to the current version. Raises GateRefused if the model does not pass the gate."""
    check_supported(config)  # before hours of preparation
    progress.stage("prepare", "running")
    prepared = prepare(config, progress)
    progress.stage("prepare", _stage_state(prepared.reused), _dataset_facts(prepared))

    # `train` also evaluates and checks the gate, and trains further epochs while the gate refuses.
    progress.stage("train", "running")
    try:
        trained = train(config, progress)
    except GateRefused as refused:
        progress.stage("train", "done")
        progress.stage("gate", "refused", {"passed": False, "reasons": list(refused.reasons)})
        raise
    progress.stage("train", _stage_state(trained.reused), _checkpoint_facts(trained))
    progress.stage("evaluate", _stage_state(trained.reused), _evaluation_facts(trained))
    verdict = trained.verdict
    progress.stage("gate", "done", {"passed": verdict.passed, "warnings": list(verdict.warnings)})

    progress.stage("publish", "running")
    published = publish(config, progress, model=str(trained.checkpoint.folder))
    progress.stage("publish", _stage_state(published.reused), _version_facts(published))
    return FlowResult(prepared, trained, published)


def _stage_state(reused: bool) -> StageState:
    return "skipped" if reused else "done"


def _dataset_facts(prepared: PrepareResult) -> Mapping[str, Any]:
    return {
        "dataset": prepared.dataset.folder,
        "train_rows": prepared.train_rows,
        "eval_rows": prepared.eval_rows,
        "bad_rows": prepared.bad_rows,
        "seconds": prepared.seconds,
    }


def _checkpoint_facts(trained: TrainResult) -> Mapping[str, Any]:
    return {
        "checkpoint": str(trained.checkpoint.folder),
        "steps": trained.checkpoint.step,
        "seconds": trained.seconds,
    }


def _evaluation_facts(trained: TrainResult) -> Mapping[str, Any]:
    total = None if trained.evaluation is None else trained.evaluation.total
    metrics = {
        name: None if total is None else getattr(total, name) for name in ("auc", "logloss", "calibration")
    }
    return {**metrics, "report": str(trained.report)}


def _version_facts(published: PublishResult) -> Mapping[str, Any]:
    manifest = published.version.manifest
    return {
        "version": published.version.number,
        "folder": published.version.folder,
        "table": manifest.table,
        "rows": manifest.rows,
        "current": published.move is not None,
        "seconds": published.seconds,
    }
