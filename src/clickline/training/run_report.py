"""The report of a run: what was trained, evaluated and decided. By it a finished run is recognized and reused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clickline.artifacts.checkpoint import Checkpoint, open_checkpoint_folder
from clickline.config import Config
from clickline.config.loader import resolved
from clickline.evaluation.evaluator import Evaluation
from clickline.evaluation.gate import Thresholds, Verdict, check_gate
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
from clickline.progress import Progress
from clickline.storage.storage import Storage
from clickline.training.epoch_evaluator import ModelEvaluation
from clickline.training.run_spec import RunSpec
from clickline.training.training_run import TrainingRun


@dataclass(frozen=True)
class AcceptedModel:
    """The result of a run: a checkpoint that passed its gate."""

    checkpoint: Checkpoint
    evaluation: Evaluation | None
    verdict: Verdict


def write_run_report(
    config: Config,
    spec: RunSpec,
    training: TrainingRun,
    checkpoint: Checkpoint,
    evaluated: ModelEvaluation,
    live: tuple[LiveEvaluation | None, str],
    verdict: Verdict,
    progress: Progress,
) -> None:
    """Write the report of a run and its page. `live`: the live version's evaluation, or why there is none."""
    current, why = live
    dataset, features, fields = spec.dataset, spec.dataset.features, evaluated.fields
    train_rows, eval_rows = training.evaluator.sample("train"), training.evaluator.sample("eval")
    names, history = dataset_id_names(dataset, features), training.history()
    notes = [] if spec.overlap is None else [spec.overlap]
    drift = None
    if train_rows is not None and eval_rows is not None:
        drift = drift_between(features, train_rows, eval_rows, names)
    if evaluated.evaluation is None:
        notes.append("The model was not evaluated, and there is no drift analysis: data.eval is not set.")
    elif current is None:
        notes.append(f"No other version was evaluated on these rows: {why}.")
    if fields is not None and fields.unseen is None:
        notes.append(
            "The share of eval values without a vector is unknown: the tables are too large to be read."
        )
    if features.dense:
        notes.append("Missing numbers are 0 for the network, so their share is unknown.")
    inputs = ReportInputs(
        name=spec.folder.name,
        home=config.home,
        project=config.name,
        config=resolved(config),
        lineage=lineage(dataset, checkpoint),
        evaluation=evaluated.evaluation,
        verdict=verdict,
        importance=None if fields is None else fields.importance,
        importance_rows=None if fields is None else fields.importance_rows,
        slot_table=slot_table(
            features,
            dataset.splits["train"],
            dataset.splits.get("eval"),
            evaluated.slots,
            None if fields is None else fields.unseen,
        ),
        drift=drift,
        learning=training.learning_curve,
        epochs=history["epochs"],
        current=current,
        names=names,
        notes=notes,
    )
    document = {
        "requested": _requested(config),
        "checkpoint": checkpoint.folder.name,
        **build_document(inputs),
        **history,
        "slots": evaluated.slots,
    }
    write_report(document, str(spec.report), Storage(), progress)


def finished_run(config: Config, spec: RunSpec, progress: Progress) -> AcceptedModel | None:
    """The result of a finished run, if it did everything that the config requests and passes the gate.

    What passed `gate.vs_current` stays passed. If only the gate was changed, the stored metrics are checked again."""
    report: dict[str, Any] = json.loads(spec.report.read_text()) if spec.report.exists() else {}
    before, requested = report.get("requested"), _requested(config)
    if before is None or {**before, "gate": None} != {**requested, "gate": None}:
        return None
    evaluation, gate = evaluation_from(report), report["gate"]
    same_gate = before["gate"] == requested["gate"]
    if same_gate:
        verdict = Verdict(gate["passed"], tuple(gate["reasons"]), tuple(gate["warnings"]))
    elif config.gate.vs_current is None:
        verdict = check_gate(None if evaluation is None else evaluation.total, Thresholds.of(config.gate))
    else:  # another version may be current by now
        return None
    checkpoint = open_checkpoint_folder(spec.folder / report["checkpoint"]) if verdict.passed else None
    if checkpoint is None or checkpoint.identity != spec.identity or not checkpoint.is_intact():
        return None
    path, run = str(spec.report), spec.folder.name
    if same_gate:
        progress.log(f"run {run} is up to date: same dataset, same config")
        if report.get("format") and not Path(page_of(path)).exists():
            write_page_of(report, path, Storage(), progress)
    else:
        write_report({**report, "requested": requested, "gate": verdict.to_json()}, path, Storage(), progress)
        progress.log(f"run {run} is up to date: only the gate was changed, and its metrics pass the new one")
        for warning in verdict.warnings:
            progress.log(warning)
    return AcceptedModel(checkpoint, evaluation, verdict)


def evaluation_from(report: Mapping[str, Any]) -> Evaluation | None:
    """The evaluation in a report; an earlier release stored no curves."""
    if report["evaluation"] is None:
        return None
    return Evaluation.from_json(report["evaluation"], report.get("curves") or {})


def _requested(config: Config) -> dict[str, Any]:
    """The settings that decide, besides its identity, when a run is finished."""
    return {
        **config.train.model_dump(mode="json", include={"epochs", "early_stopping"}),
        "gate": config.gate.model_dump(mode="json", exclude={"extra_epochs"}),
    }
