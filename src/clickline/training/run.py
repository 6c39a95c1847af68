"""The train stage on one machine: dataset to checkpoint, then evaluation and the gate."""

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
from clickline.evaluation.evaluator import Evaluation, measure
from clickline.evaluation.gate import Thresholds, Verdict, judge
from clickline.evaluation.live_version import check_fields, with_current
from clickline.evaluation.report.page import page_of
from clickline.evaluation.report.report_document import (
    Current,
    Told,
    document,
    drift_between,
    lineage,
    names_in,
    slot_table,
    write,
    write_page_of,
)
from clickline.machine import cores
from clickline.models.from_config import batch_size_of, held_out_of, learned_rows, plan_of
from clickline.models.model import Model
from clickline.models.onnx_export import check_export
from clickline.progress import Progress, usual
from clickline.storage.log_files import in_both
from clickline.storage.storage import Storage
from clickline.training.batches import Batches
from clickline.training.tracker_from_config import tracker_of
from clickline.training.tracking import Status, Tracker
from clickline.training.train_step import Learner
from clickline.training.trainer import Trainer
from clickline.training.training_run import Epochs, Result
from clickline.training.warm_start import earlier

_REPORT = "report.json"


@dataclass(frozen=True)
class TrainResult:
    """A checkpoint that passed its gate."""

    checkpoint: Checkpoint
    evaluation: Evaluation | None  # None without eval rows
    verdict: Verdict
    report: Path
    reused: bool  # nothing was learned or measured: the run was finished before
    seconds: float


def train(config: Config, progress: Progress | None = None) -> TrainResult:
    """Train, evaluate, judge; train on while the gate refuses and retries are left. Raises GateRefused.

    A run that was finished with the same dataset and config is taken as it is, figures and verdict too: what passed
    `gate.vs_current` stays passed. If only the gate was changed, the figures of then are judged anew.
    """
    began = time.monotonic()
    progress = progress or usual()
    check_supported(config)
    dataset = Dataset.current(Storage(), config.home)
    if not dataset.splits["train"].rows:
        raise DataError(f"dataset {dataset.id} has no training rows. Check data.train.")
    _check_eval_rows(config, dataset, progress)
    train, threads = config.train, cores()
    held_out = held_out_of(train)
    split = dataset.splits["train"]
    if not split.report["clicks"]:
        raise DataError(
            f"none of the {split.rows:,} training rows of dataset {dataset.id} was clicked: there is nothing to learn. "
            "Check the label field in data.fields."
        )
    expected = learned_rows(train, split.rows, split.report["clicks"])
    batch_size = batch_size_of(train, expected)
    plan = plan_of(config, dataset.features, expected)
    start = None if train.warm_start is None else earlier(Path(train.warm_start), dataset.features, progress)
    clustered = train.mode == "cluster"
    identity = {
        "dataset": dataset.id,
        "plan": plan.to_json(),
        "batch_size": batch_size,
        "train": train.model_dump(mode="json", include={"order", "eviction", "calibration"}),
        # One machine's threads decide the last bits; on a cluster it is free how many work.
        **({"cluster": _of_cluster(train)} if clustered else {"threads": threads}),
        "warm_start": None if start is None else start.body["tables_sha256"],
    }
    run = Path(config.home, "runs", fingerprint(identity))
    Storage().put(str(run / "resolved.yaml"), resolved(config).encode())
    done = _finished(config, run, identity, progress)
    if done is not None:
        checkpoint, evaluation, verdict = done
        make_newest(checkpoint)
        return TrainResult(checkpoint, evaluation, verdict, run / _REPORT, True, time.monotonic() - began)
    file = None if config.model.file is None else Path(config.model.file)
    learner = Learner(Model.build(dataset.features, plan, threads, file))
    check_export(learner.model.network, learner.model.spec)  # what cannot be published is not worth training
    settings: dict[str, Any] = {
        "batch_size": batch_size,
        "seed": train.seed,
        "in_time": train.order == "time",
        "held_out": held_out,
        "negative_sampling": train.negative_sampling,
    }
    batches = Batches(dataset, Path(dataset.folder), **settings)
    tracker = tracker_of(config, run, progress)
    status: Status = "FAILED"
    with ExitStack() as stack:
        stack.callback(lambda: tracker.close(status))
        trainer: Epochs
        if clustered:
            from clickline.training.cluster_trainer import cluster_trainer  # only a cluster needs Ray

            trainer = stack.enter_context(
                cluster_trainer(config, dataset, learner, settings, run, identity, tracker, progress)
            )
        else:
            trainer = Trainer(train, dataset, learner, batches, run, identity, tracker, progress)
        try:
            tracker.params(config.model_dump(mode="json", include={"name", "data", "model", "train", "gate"}))
            trainer.resume(start)
            result = _train_and_judge(config, dataset, trainer, run, progress, began)
            tracker.metrics(result.checkpoint.step, _figures(result.evaluation))
            _send_report(tracker, run)
            status = "FINISHED"
        except GateRefused:
            _send_report(tracker, run)
            raise
        except KeyboardInterrupt:
            status = "KILLED"
            raise
    return result


def _of_cluster(train: TrainSection) -> dict[str, Any]:
    """What a cluster run's result depends on: not how many workers and shards there are."""
    asynchronous = {"staleness", "staleness_rate"} if not train.sync else set()
    return train.model_dump(mode="json", include={"sync", *asynchronous})


def _train_and_judge(
    config: Config, dataset: Dataset, trainer: Epochs, run: Path, progress: Progress, began: float
) -> TrainResult:
    current: Current | None = None
    why = ""
    for attempt in range(config.gate.retries + 1):
        trained = trainer.train_to(config.train.epochs + attempt)
        if attempt == 0 and trained.evaluation is not None:
            current, why = _measure_current(config, trainer)
        verdict = _judge(config, trained.evaluation, current, why)
        if trained.evaluation is not None:
            total, some = trained.evaluation.total, trainer.sample("eval")
            verdict = verdict.warned(worse_than_base_rate(total, trainer.features, some))
        told = _told(config, dataset, trainer, run, trained, verdict, current, why)
        report = _write_report(config, run, trained, told, progress)
        for warning in verdict.warnings:
            progress.say(warning)
        if verdict.passed:
            make_newest(trained.checkpoint)  # a run that had learned all before has written none
            return TrainResult(
                trained.checkpoint, trained.evaluation, verdict, report, False, time.monotonic() - began
            )
        for reason in verdict.reasons:
            progress.say(f"the gate refused after {_epochs(trainer.epoch)}: {reason}")
        measured = trained.evaluation
        if (
            measured is None or measured.total.auc is None or trainer.stopped_early
        ):  # more epochs could not help
            break
    raise GateRefused(
        f"the gate refused the model: {' '.join(verdict.reasons)} Nothing was published; the figures are in {report}.",
        verdict.reasons,
        report,
    )


# ── a run that was finished before ─────────────────────────────────────────────────────────────


def _finished(
    config: Config, run: Path, identity: Mapping[str, Any], progress: Progress
) -> tuple[Checkpoint, Evaluation | None, Verdict] | None:
    """What the run came to, if it did all that the config asks for, and passes."""
    path = run / _REPORT
    report: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    before, asked = report.get("asked"), _asked(config)
    if before is None or {**before, "gate": None} != {**asked, "gate": None}:
        return None
    evaluation, told = _measured(report), report["gate"]
    same_gate = before["gate"] == asked["gate"]
    if same_gate:
        verdict = Verdict(told["passed"], tuple(told["reasons"]), tuple(told["warnings"]))
    elif config.gate.vs_current is None:
        verdict = _judge(config, evaluation, None)
    else:  # another version may be current since
        return None
    checkpoint = open_checkpoint_folder(run / report["checkpoint"]) if verdict.passed else None
    if checkpoint is None or checkpoint.body["identity"] != identity or not checkpoint.is_whole():
        return None
    if same_gate:
        progress.say(f"run {run.name} is up to date: same dataset, same config")
        if report.get("format") and not Path(page_of(str(path))).exists():
            write_page_of(report, str(path), Storage(), progress)
    else:
        write({**report, "asked": asked, "gate": verdict.to_json()}, str(path), Storage(), progress)
        progress.say(
            f"run {run.name} is up to date: only the gate was changed, and its figures pass that too"
        )
        for warning in verdict.warnings:
            progress.say(warning)
    return checkpoint, evaluation, verdict


def _asked(config: Config) -> dict[str, Any]:
    """What decides when a run is finished, beside its identity."""
    return {
        **config.train.model_dump(mode="json", include={"epochs", "early_stop"}),
        "gate": config.gate.model_dump(mode="json", exclude={"retries"}),
    }


def _measured(report: Mapping[str, Any]) -> Evaluation | None:
    """An evaluation as `_write_report` stored it; an earlier release stored no curves."""
    if report["evaluation"] is None:
        return None
    return Evaluation.from_json(report["evaluation"], report.get("curves") or {})


# ── around it ──────────────────────────────────────────────────────────────────────────────────


def check_supported(config: Config) -> None:
    """What this release does not do yet, or what would be trained in vain, is refused before anything is done."""
    wrong = []
    if not Storage.is_local(config.home):
        wrong.append(
            ("home", f"is {config.home}; this release trains with a home on local disk.", "Change it.")
        )
    if (problem := config.without_eval()) is not None:
        wrong.append(("data.eval", problem, "Give it, or remove what asks for it."))
    if wrong:
        raise ConfigError([Mistake("clickline.yaml", 0, *one) for one in wrong])


def _check_eval_rows(config: Config, dataset: Dataset, progress: Progress) -> None:
    """Whether there is something to measure on, and whether it is worth measuring on."""
    evaluated = dataset.splits.get("eval")
    if config.data.eval is not None and (evaluated is None or not evaluated.rows):
        raise DataError(
            f"dataset {dataset.id} has no rows to measure on, though data.eval is given. Run `clickline prepare`, and "
            "look at the rows that it left out."
        )
    if (leak := _leak(dataset)) is not None:
        progress.say(f"warning: {leak}")


def _leak(dataset: Dataset) -> str | None:
    """What to say of files that are learned and measured on."""
    files = {name: [file["uri"] for file in found] for name, found in dataset.identity["inputs"].items()}
    return in_both(files["train"], files.get("eval", []))


def _epochs(count: int) -> str:
    return "1 epoch" if count == 1 else f"{count} epochs"


def _measure_current(config: Config, trainer: Epochs) -> tuple[Current | None, str]:
    """The live version on the same rows; without it, why not."""
    registry = registry_of(config)

    def score(move: Move) -> Current:
        from clickline.scoring.open_scorer import open_scorer  # only a comparison needs what serving needs

        scorer = open_scorer(registry, registry.version(move.version), Path(config.cache.dir), cores())
        try:
            check_fields(move.version, scorer.features, trainer.features)
            measured = measure(scorer.probabilities, trainer.eval_rows(), slots=trainer.sliced)
            return Current(move.version, measured)
        finally:
            scorer.close()

    return with_current(registry, score, asked=config.gate.vs_current is not None)


def _judge(config: Config, evaluation: Evaluation | None, current: Current | None, why: str = "") -> Verdict:
    asked = Thresholds(**config.gate.model_dump(exclude={"retries"}))
    if evaluation is not None:
        return judge(evaluation.total, asked, None if current is None else current.evaluation.total, why)
    if any(value is not None for value in asdict(asked).values()):
        return Verdict(False, ("the gate asks for figures, but data.eval gives no rows to measure them on.",))
    return Verdict(True, (), ("nothing was measured: data.eval is not given.",))


# ── the report ─────────────────────────────────────────────────────────────────────────────────


def _told(
    config: Config,
    dataset: Dataset,
    trainer: Epochs,
    run: Path,
    trained: Result,
    verdict: Verdict,
    current: Current | None,
    why: str,
) -> Told:
    """What the report tells."""
    features, closer = trainer.features, trained.closer
    learned, evaluated = trainer.sample("train"), trainer.sample("eval")
    names = names_in(dataset, features)
    notes = [leak] if (leak := _leak(dataset)) is not None else []
    drift = None
    if learned is not None and evaluated is not None:
        drift = drift_between(features, learned, evaluated, names)
    if trained.evaluation is None:
        notes.append("Nothing was measured, and train is compared with nothing: data.eval is not given.")
    elif current is None:
        notes.append(f"No other version was measured on these rows: {why}.")
    if closer is not None and closer.unseen is None:
        notes.append(
            "How many values of eval have no vector is not known: the tables are too large to be read."
        )
    if features.dense:
        notes.append("Missing numbers are 0 to the network: how many are missing is not known afterwards.")
    return Told(
        name=run.name,
        home=config.home,
        project=config.name,
        config=resolved(config),
        lineage=lineage(dataset, trained.checkpoint),
        evaluation=trained.evaluation,
        verdict=verdict,
        importance=None if closer is None else closer.importance,
        importance_rows=None if closer is None else closer.importance_rows,
        slot_table=slot_table(
            features,
            dataset.splits["train"],
            dataset.splits.get("eval"),
            trained.story["slots"],
            None if closer is None else closer.unseen,
        ),
        drift=drift,
        learning=trained.learning,
        epochs=trained.story["epochs"],
        current=current,
        names=names,
        notes=notes,
    )


def _write_report(config: Config, run: Path, trained: Result, told: Told, progress: Progress) -> Path:
    path = run / _REPORT
    whole = {
        "asked": _asked(config),
        "checkpoint": trained.checkpoint.folder.name,
        **document(told),
        **trained.story,
    }
    write(whole, str(path), Storage(), progress)
    return path


def _send_report(tracker: Tracker, run: Path) -> None:
    for path in (run / _REPORT, Path(page_of(str(run / _REPORT)))):
        if path.exists():
            tracker.artifact(path)


def _figures(evaluation: Evaluation | None) -> dict[str, float]:
    if evaluation is None:
        return {}
    total = evaluation.total
    found = {"eval_auc": total.auc, "eval_logloss": total.logloss, "eval_calibration": total.calibration}
    return {name: value for name, value in found.items() if value is not None}
