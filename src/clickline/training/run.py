"""The train stage: dataset to checkpoint, then evaluation and the gate."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from clickline.artifacts.checkpoint import Checkpoint, open_checkpoint_folder
from clickline.artifacts.dataset import Dataset
from clickline.artifacts.from_config import registry_of
from clickline.artifacts.manifest import fingerprint
from clickline.artifacts.registry import Move
from clickline.artifacts.runs import make_newest
from clickline.config import Config
from clickline.config.loader import resolved
from clickline.config.sections import TrainSection
from clickline.errors import ConfigError, DataError, GateRefused, Mistake
from clickline.evaluation.baseline import worse_than_base_rate
from clickline.evaluation.evaluator import Evaluation, evaluate_rows
from clickline.evaluation.gate import Thresholds, Verdict, check_gate
from clickline.evaluation.live_version import check_fields, with_live_version
from clickline.evaluation.report.page import page_of
from clickline.evaluation.report.report_document import (
    LiveEvaluation,
    ReportInputs,
    build_document,
    dataset_id_names,
    drift_between,
    lineage,
    slot_table,
    write_page_of,
    write_report,
)
from clickline.machine import cores
from clickline.models.from_config import batch_size_of, expected_train_rows, holdout_share, plan_of
from clickline.models.model import Model
from clickline.models.onnx_export import check_export
from clickline.progress import Progress, default_progress
from clickline.storage.log_files import overlap_warning
from clickline.storage.storage import Storage
from clickline.training.batches import Batches
from clickline.training.tracker_from_config import tracker_of
from clickline.training.tracking import RunStatus, Tracker
from clickline.training.train_step import TrainStep
from clickline.training.trainer import Trainer
from clickline.training.training_run import TrainedModel, TrainingRun
from clickline.training.warm_start import open_warm_start

_REPORT = "report.json"


@dataclass(frozen=True)
class TrainResult:
    """A checkpoint that passed its gate."""

    checkpoint: Checkpoint
    evaluation: Evaluation | None  # None without eval rows
    verdict: Verdict
    report: Path
    reused: bool  # nothing was trained or evaluated: the run was already finished
    seconds: float


def train(config: Config, progress: Progress | None = None) -> TrainResult:
    """Train, evaluate, check the gate; train extra epochs while the gate refuses. Raises GateRefused.

    A run that was finished with the same dataset and config is reused with its metrics and verdict: what passed
    `gate.vs_current` stays passed. If only the gate was changed, the stored metrics are checked again.
    """
    began = time.monotonic()
    progress = progress or default_progress()
    check_supported(config)
    dataset = Dataset.current(Storage(), config.home)
    if not dataset.splits["train"].rows:
        raise DataError(f"dataset {dataset.id} has no training rows. Check data.train.")
    _check_eval_rows(config, dataset, progress)
    train, threads = config.train, cores()
    held_out = holdout_share(train)
    split = dataset.splits["train"]
    if not split.report["clicks"]:
        raise DataError(
            f"none of the {split.rows:,} training rows of dataset {dataset.id} was clicked: there is nothing to "
            "train on. Check the label field in data.fields."
        )
    expected = expected_train_rows(train, split.rows, split.report["clicks"])
    batch_size = batch_size_of(train, expected)
    plan = plan_of(config, dataset.features, expected)
    start = (
        None
        if train.warm_start is None
        else open_warm_start(Path(train.warm_start), dataset.features, progress)
    )
    on_cluster = train.mode == "cluster"
    identity = {
        "dataset": dataset.id,
        "plan": plan.to_json(),
        "batch_size": batch_size,
        "train": train.model_dump(mode="json", include={"order", "eviction", "calibration"}),
        # On one machine the number of threads decides the last bits; on a cluster the number of workers may change.
        **({"cluster": _cluster_identity(train)} if on_cluster else {"threads": threads}),
        "warm_start": None if start is None else start.manifest.tables_sha256,
    }
    run = Path(config.home, "runs", fingerprint(identity))
    Storage().put(str(run / "resolved.yaml"), resolved(config).encode())
    done = _finished_result(config, run, identity, progress)
    if done is not None:
        checkpoint, evaluation, verdict = done
        make_newest(checkpoint)
        return TrainResult(checkpoint, evaluation, verdict, run / _REPORT, True, time.monotonic() - began)
    file = None if config.model.file is None else Path(config.model.file)
    train_step = TrainStep(Model.build(dataset.features, plan, threads, file))
    # A model that cannot be published is not worth training.
    check_export(train_step.model.network, train_step.model.spec)
    settings: dict[str, Any] = {
        "batch_size": batch_size,
        "seed": train.seed,
        "time_ordered": train.order == "time",
        "held_out": held_out,
        "negative_sampling": train.negative_sampling,
    }
    batches = Batches(dataset, Path(dataset.folder), **settings)
    tracker = tracker_of(config, run, progress)
    status: RunStatus = "FAILED"
    with ExitStack() as stack:
        stack.callback(lambda: tracker.close(status))
        trainer: TrainingRun
        if on_cluster:
            from clickline.training.cluster_trainer import cluster_trainer  # only a cluster needs Ray

            trainer = stack.enter_context(
                cluster_trainer(config, dataset, train_step, settings, run, identity, tracker, progress)
            )
        else:
            trainer = Trainer(train, dataset, train_step, batches, run, identity, tracker, progress)
        try:
            tracker.params(config.model_dump(mode="json", include={"name", "data", "model", "train", "gate"}))
            trainer.resume(start)
            result = _train_until_accepted(config, dataset, trainer, run, progress, began)
            tracker.metrics(result.checkpoint.step, _metrics(result.evaluation))
            _send_report(tracker, run)
            status = "FINISHED"
        except GateRefused:
            _send_report(tracker, run)
            raise
        except KeyboardInterrupt:
            status = "KILLED"
            raise
    return result


def _cluster_identity(train: TrainSection) -> dict[str, Any]:
    """The settings that a cluster run's result depends on: not the number of workers and embedding servers."""
    asynchronous = {"max_staleness", "scale_lr_by_staleness"} if not train.sync else set()
    return train.model_dump(mode="json", include={"sync", *asynchronous})


def _train_until_accepted(
    config: Config, dataset: Dataset, trainer: TrainingRun, run: Path, progress: Progress, began: float
) -> TrainResult:
    current: LiveEvaluation | None = None
    why = ""
    for attempt in range(config.gate.extra_epochs + 1):
        trained = trainer.train_to(config.train.epochs + attempt)
        if attempt == 0 and trained.evaluation is not None:
            current, why = _evaluate_live(config, trainer)
        verdict = _check_gate(config, trained.evaluation, current, why)
        if trained.evaluation is not None:
            total, sample = trained.evaluation.total, trainer.sample("eval")
            verdict = verdict.warned(worse_than_base_rate(total, trainer.features, sample))
        inputs = _report_inputs(config, dataset, trainer, run, trained, verdict, current, why)
        report = _write_report(config, run, trained, inputs, progress)
        for warning in verdict.warnings:
            progress.log(warning)
        if verdict.passed:
            make_newest(trained.checkpoint)  # also a checkpoint that an earlier start wrote
            return TrainResult(
                trained.checkpoint, trained.evaluation, verdict, report, False, time.monotonic() - began
            )
        for reason in verdict.reasons:
            progress.log(f"the gate refused after {_epoch_count(trainer.epoch)}: {reason}")
        measured = trained.evaluation
        if measured is None or measured.total.auc is None or trainer.stopped_early:
            break  # more epochs could not help
        if attempt < config.gate.extra_epochs:
            progress.log(
                f"training extra epoch {attempt + 1} of at most {config.gate.extra_epochs} (gate.extra_epochs)"
            )
    raise GateRefused(
        f"the gate refused the model: {' '.join(verdict.reasons)} Nothing was published; the metrics are in {report}.",
        verdict.reasons,
        report,
    )


# ── a run that was finished before ─────────────────────────────────────────────────────────────


def _finished_result(
    config: Config, run: Path, identity: Mapping[str, Any], progress: Progress
) -> tuple[Checkpoint, Evaluation | None, Verdict] | None:
    """The result of a finished run, if it did everything that the config requests and passes the gate."""
    path = run / _REPORT
    report: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    before, requested = report.get("asked"), _requested(config)
    if before is None or {**before, "gate": None} != {**requested, "gate": None}:
        return None
    evaluation, gate = _evaluation_from(report), report["gate"]
    same_gate = before["gate"] == requested["gate"]
    if same_gate:
        verdict = Verdict(gate["passed"], tuple(gate["reasons"]), tuple(gate["warnings"]))
    elif config.gate.vs_current is None:
        verdict = _check_gate(config, evaluation, None)
    else:  # another version may be current by now
        return None
    checkpoint = open_checkpoint_folder(run / report["checkpoint"]) if verdict.passed else None
    state = None if checkpoint is None else checkpoint.manifest.run
    if checkpoint is None or state is None or state.identity != identity or not checkpoint.is_intact():
        return None
    if same_gate:
        progress.log(f"run {run.name} is up to date: same dataset, same config")
        if report.get("format") and not Path(page_of(str(path))).exists():
            write_page_of(report, str(path), Storage(), progress)
    else:
        write_report(
            {**report, "asked": requested, "gate": verdict.to_json()}, str(path), Storage(), progress
        )
        progress.log(
            f"run {run.name} is up to date: only the gate was changed, and its metrics pass the new one"
        )
        for warning in verdict.warnings:
            progress.log(warning)
    return checkpoint, evaluation, verdict


def _requested(config: Config) -> dict[str, Any]:
    """The settings that decide, besides its identity, when a run is finished."""
    return {
        **config.train.model_dump(mode="json", include={"epochs", "early_stopping"}),
        "gate": config.gate.model_dump(mode="json", exclude={"extra_epochs"}),
    }


def _evaluation_from(report: Mapping[str, Any]) -> Evaluation | None:
    """An evaluation as `_write_report` stored it; an earlier release stored no curves."""
    if report["evaluation"] is None:
        return None
    return Evaluation.from_json(report["evaluation"], report.get("curves") or {})


# ── checks ─────────────────────────────────────────────────────────────────────────────────────


def check_supported(config: Config) -> None:
    """Refuse settings that this release does not support, or that would train in vain, before doing anything."""
    mistakes = []
    if not Storage.is_local(config.home):
        mistakes.append(
            ("home", f"is {config.home}; training needs a home on local disk.", "Set it to a local folder.")
        )
    if (problem := config.without_eval()) is not None:
        mistakes.append(("data.eval", problem, "Set it, or remove what needs it."))
    if mistakes:
        raise ConfigError([Mistake("clickline.yaml", 0, *mistake) for mistake in mistakes])


def _check_eval_rows(config: Config, dataset: Dataset, progress: Progress) -> None:
    """Check that there are eval rows, and warn if they overlap with the training rows."""
    evaluated = dataset.splits.get("eval")
    if config.data.eval is not None and (evaluated is None or not evaluated.rows):
        raise DataError(
            f"dataset {dataset.id} has no eval rows, although data.eval is set. Run `clickline prepare` and check "
            "the rows that it skipped."
        )
    if (leak := _leak(dataset)) is not None:
        progress.log(f"warning: {leak}")


def _leak(dataset: Dataset) -> str | None:
    """A warning about files that are in both train and eval."""
    files = {
        name: [file["uri"] for file in files_of_split]
        for name, files_of_split in dataset.identity["inputs"].items()
    }
    return overlap_warning(files["train"], files.get("eval", []))


def _epoch_count(count: int) -> str:
    return "1 epoch" if count == 1 else f"{count} epochs"


def _evaluate_live(config: Config, trainer: TrainingRun) -> tuple[LiveEvaluation | None, str]:
    """The live version's evaluation on the same rows; if there is none, the reason."""
    registry = registry_of(config)

    def score(move: Move) -> LiveEvaluation:
        from clickline.scoring.open_scorer import open_scorer  # only a comparison needs what serving needs

        scorer = open_scorer(registry, registry.version(move.version), Path(config.cache.dir), cores())
        try:
            check_fields(move.version, scorer.features, trainer.features)
            measured = evaluate_rows(scorer.probabilities, trainer.eval_rows(), slots=trainer.sliced_slots)
            return LiveEvaluation(move.version, measured)
        finally:
            scorer.close()

    return with_live_version(registry, score, requested=config.gate.vs_current is not None)


def _check_gate(
    config: Config, evaluation: Evaluation | None, current: LiveEvaluation | None, why: str = ""
) -> Verdict:
    requested = Thresholds(**config.gate.model_dump(exclude={"extra_epochs"}))
    if evaluation is not None:
        return check_gate(
            evaluation.total, requested, None if current is None else current.evaluation.total, why
        )
    if any(value is not None for value in asdict(requested).values()):
        return Verdict(
            False, ("the gate has thresholds, but without data.eval there are no rows to evaluate on.",)
        )
    return Verdict(True, (), ("not evaluated: data.eval is not set.",))


# ── the report ─────────────────────────────────────────────────────────────────────────────────


def _report_inputs(
    config: Config,
    dataset: Dataset,
    trainer: TrainingRun,
    run: Path,
    trained: TrainedModel,
    verdict: Verdict,
    current: LiveEvaluation | None,
    why: str,
) -> ReportInputs:
    """Everything that the report shows."""
    features, field_analysis = trainer.features, trained.field_analysis
    train_sample, evaluated = trainer.sample("train"), trainer.sample("eval")
    names = dataset_id_names(dataset, features)
    notes = [leak] if (leak := _leak(dataset)) is not None else []
    drift = None
    if train_sample is not None and evaluated is not None:
        drift = drift_between(features, train_sample, evaluated, names)
    if trained.evaluation is None:
        notes.append("The model was not evaluated, and there is no drift analysis: data.eval is not set.")
    elif current is None:
        notes.append(f"No other version was evaluated on these rows: {why}.")
    if field_analysis is not None and field_analysis.unseen is None:
        notes.append(
            "The share of eval values without a vector is unknown: the tables are too large to be read."
        )
    if features.dense:
        notes.append("Missing numbers are 0 for the network, so their share is unknown.")
    return ReportInputs(
        name=run.name,
        home=config.home,
        project=config.name,
        config=resolved(config),
        lineage=lineage(dataset, trained.checkpoint),
        evaluation=trained.evaluation,
        verdict=verdict,
        importance=None if field_analysis is None else field_analysis.importance,
        importance_rows=None if field_analysis is None else field_analysis.importance_rows,
        slot_table=slot_table(
            features,
            dataset.splits["train"],
            dataset.splits.get("eval"),
            trained.history["slots"],
            None if field_analysis is None else field_analysis.unseen,
        ),
        drift=drift,
        learning=trained.curve,
        epochs=trained.history["epochs"],
        current=current,
        names=names,
        notes=notes,
    )


def _write_report(
    config: Config, run: Path, trained: TrainedModel, inputs: ReportInputs, progress: Progress
) -> Path:
    path = run / _REPORT
    document = {
        "asked": _requested(config),
        "checkpoint": trained.checkpoint.folder.name,
        **build_document(inputs),
        **trained.history,
    }
    write_report(document, str(path), Storage(), progress)
    return path


def _send_report(tracker: Tracker, run: Path) -> None:
    for path in (run / _REPORT, Path(page_of(str(run / _REPORT)))):
        if path.exists():
            tracker.artifact(path)


def _metrics(evaluation: Evaluation | None) -> dict[str, float]:
    if evaluation is None:
        return {}
    total = evaluation.total
    files_of_split = {
        "eval_auc": total.auc,
        "eval_logloss": total.logloss,
        "eval_calibration": total.calibration,
    }
    return {name: value for name, value in files_of_split.items() if value is not None}
