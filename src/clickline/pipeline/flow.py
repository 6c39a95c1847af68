"""The stages from logs to a published version, in order. A stage whose input has not changed is skipped.

prepare ──▶ train ──▶ evaluate ──▶ gate ──▶ publish
              ▲───── train more ─────┘
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from clickline.artifacts.checkpoint import Checkpoint, make_newest
from clickline.config import Config
from clickline.data.prepare.run import prepare
from clickline.errors import GateRefused
from clickline.evaluation.baseline import worse_than_base_rate
from clickline.evaluation.evaluator import Evaluation
from clickline.evaluation.gate import Thresholds, Verdict, check_gate
from clickline.evaluation.live_version import evaluate_live
from clickline.evaluation.report.report_document import LiveEvaluation
from clickline.progress import Progress, StageState, default_progress, pluralize
from clickline.training.run import open_training
from clickline.training.run_report import AcceptedModel, finished_run, write_run_report
from clickline.training.run_spec import RunSpec, check_supported, open_run
from clickline.training.training_run import TrainingRun


@dataclass(frozen=True)
class TrainResult:
    """A checkpoint that passed its gate."""

    checkpoint: Checkpoint
    evaluation: Evaluation | None  # None without eval rows
    verdict: Verdict
    report: Path
    reused: bool  # nothing was trained or evaluated: the run was already finished
    seconds: float


def run_flow(config: Config, progress: Progress) -> TrainResult:
    """Run all stages from logs to the current version; returns its model. Raises GateRefused if that does not pass the
    gate."""
    check_supported(config)  # before hours of preparation
    progress.stage("prepare", "running")
    prepared = prepare(config, progress)
    facts = {
        "dataset": prepared.dataset.folder,
        "train_rows": prepared.train_rows,
        "eval_rows": prepared.eval_rows,
        "bad_rows": prepared.bad_rows,
        "seconds": prepared.seconds,
    }
    progress.stage("prepare", _state(prepared.reused), facts)

    trained = train(config, progress)

    from clickline.publishing.run import publish  # the stages before need no package of the endpoint

    progress.stage("publish", "running")
    published = publish(config, progress, model=str(trained.checkpoint.folder))
    version = published.version
    facts = {
        "version": version.number,
        "folder": version.folder,
        "table": version.manifest.table,
        "rows": version.manifest.rows,
        "current": published.move is not None,
        "seconds": published.seconds,
    }
    progress.stage("publish", _state(published.reused), facts)
    return trained


def train(config: Config, progress: Progress | None = None) -> TrainResult:
    """Train, evaluate, check the gate; train extra epochs while the gate refuses. Raises GateRefused.

    A run that was finished with the same dataset and config is reused with its metrics and verdict."""
    began = time.monotonic()
    progress = progress or default_progress()
    progress.stage("train", "running")
    spec = open_run(config, progress)
    finished = finished_run(config, spec, progress)
    if finished is not None:
        accepted = finished
        _report_checkpoint(accepted.checkpoint, began, progress, reused=True)
        _report_evaluation(accepted.evaluation, spec, progress, reused=True)
    else:
        with open_training(config, spec, progress) as training:
            accepted = _train_until_accepted(config, spec, training, progress)
    progress.stage("gate", "done", {"passed": True, "warnings": list(accepted.verdict.warnings)})
    make_newest(accepted.checkpoint)  # also one that an earlier start wrote
    return TrainResult(
        accepted.checkpoint,
        accepted.evaluation,
        accepted.verdict,
        spec.report,
        finished is not None,
        time.monotonic() - began,
    )


def _train_until_accepted(
    config: Config, spec: RunSpec, training: TrainingRun, progress: Progress
) -> AcceptedModel:
    """Train, evaluate and check the gate, with one more epoch each time that the gate refuses."""
    began = time.monotonic()
    current: LiveEvaluation | None = None
    why = ""
    for extra in range(config.gate.extra_epochs + 1):
        if extra:
            progress.stage("train", "running")
            progress.log(
                f"training extra epoch {extra} of at most {config.gate.extra_epochs} (gate.extra_epochs)"
            )
        checkpoint = training.train_to(config.train.epochs + extra)
        _report_checkpoint(checkpoint, began, progress)

        progress.stage("evaluate", "running")
        evaluated = training.evaluate()
        evaluation = evaluated.evaluation
        if not extra and evaluation is not None:
            current, why = evaluate_live(
                config, spec.dataset.features, training.evaluator.eval_rows(), training.evaluator.sliced_slots
            )
        verdict = _check_gate(config, training, evaluation, current, why)
        write_run_report(config, spec, training, checkpoint, evaluated, (current, why), verdict, progress)
        _report_evaluation(evaluation, spec, progress)

        for warning in verdict.warnings:
            progress.log(warning)
        if verdict.passed:
            return AcceptedModel(checkpoint, evaluation, verdict)
        for reason in verdict.reasons:
            progress.log(f"the gate refused after {pluralize(training.epoch, 'epoch')}: {reason}")
        if evaluation is None or evaluation.total.auc is None or training.stopped_early:
            break  # more epochs could not help
    progress.stage("gate", "refused", {"passed": False, "reasons": list(verdict.reasons)})
    raise GateRefused(
        f"the gate refused the model: {' '.join(verdict.reasons)} Nothing was published; the metrics are in "
        f"{spec.report}.",
        verdict.reasons,
        spec.report,
    )


def _check_gate(
    config: Config,
    training: TrainingRun,
    evaluation: Evaluation | None,
    current: LiveEvaluation | None,
    why_no_current: str,
) -> Verdict:
    thresholds = Thresholds.of(config.gate)
    if evaluation is None:
        return check_gate(None, thresholds)
    live = None if current is None else current.evaluation.total
    verdict = check_gate(evaluation.total, thresholds, live, why_no_current)
    evaluator = training.evaluator
    return verdict.warned(
        worse_than_base_rate(evaluation.total, evaluator.features, evaluator.sample("eval"))
    )


def _state(reused: bool) -> StageState:
    return "skipped" if reused else "done"


def _report_checkpoint(
    checkpoint: Checkpoint, began: float, progress: Progress, *, reused: bool = False
) -> None:
    seconds = time.monotonic() - began
    facts = {"checkpoint": str(checkpoint.folder), "steps": checkpoint.step, "seconds": seconds}
    progress.stage("train", _state(reused), facts)


def _report_evaluation(
    evaluation: Evaluation | None, spec: RunSpec, progress: Progress, *, reused: bool = False
) -> None:
    total = None if evaluation is None else evaluation.total
    metrics = {name: getattr(total, name, None) for name in ("auc", "logloss", "calibration")}
    progress.stage("evaluate", _state(reused), {**metrics, "report": str(spec.report)})
