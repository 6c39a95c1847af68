"""The train stage on one machine: dataset to checkpoint, then evaluation and the gate."""

from __future__ import annotations

import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from clickline.artifacts.checkpoint import Checkpoint, latest, prune, write_checkpoint
from clickline.artifacts.dataset import Dataset
from clickline.artifacts.manifest import as_json, fingerprint
from clickline.config import Config
from clickline.embedding import freeze, load
from clickline.errors import ArtifactError, ConfigError, GateRefused, Mistake
from clickline.metrics.evaluation import Evaluation, Evaluator
from clickline.metrics.gate import Thresholds, Verdict, judge
from clickline.metrics.window import Window
from clickline.models import check_export
from clickline.progress import Progress
from clickline.stages.train.batches import Batches, Position
from clickline.stages.train.learner import Learner
from clickline.storage.stores import Storage

__all__ = ["TrainResult", "train"]

_TOLD_SECONDS = 2.0


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
    threads = _threads()
    learner = Learner(
        dataset.features,
        network=str(config.model.name),
        dim=config.model.embedding_dim,
        hidden=config.model.hidden,
        learning_rate=config.train.learning_rate,
        embedding_learning_rate=config.train.embedding_learning_rate,
        seed=config.train.seed,
        threads=threads,
    )
    check_export(learner.network, learner.spec)  # what cannot be published is not worth training
    identity = {
        "dataset": dataset.id,
        "model": config.model.model_dump(mode="json"),
        "train": config.train.model_dump(mode="json", include={"batch_size", "seed", *_RATES}),
        "threads": threads,
    }
    run = Path(config.home, "runs", fingerprint(identity))
    trainer = _Trainer(config, dataset, learner, run, identity, progress)
    trainer.resume()
    for attempt in range(config.gate.retries + 1):
        checkpoint = trainer.train_to(config.train.epochs + attempt)
        evaluation = _evaluate(learner, dataset, progress)
        verdict = _judge(config, evaluation)
        report = _write_report(run, checkpoint, evaluation, verdict)
        for warning in verdict.warnings:
            progress.say(warning)
        if verdict.passed:
            return TrainResult(checkpoint, evaluation, verdict, report, time.monotonic() - began)
        for reason in verdict.reasons:
            progress.say(f"the gate refused after {config.train.epochs + attempt} epochs: {reason}")
        if evaluation is None:
            break
    raise GateRefused(
        f"the gate refused the model: {' '.join(verdict.reasons)} Nothing was published; the figures are in {report}."
    )


_RATES = ("learning_rate", "embedding_learning_rate")


def _check_supported(config: Config) -> None:
    """What this release does not do yet is refused, never quietly done otherwise."""
    wrong = []
    if config.train.mode != "local":
        wrong.append(("train.mode", f"is {config.train.mode}; this release trains on one machine."))
    if config.model.file is not None:
        wrong.append(("model.file", "is given; this release trains its built-in networks only."))
    if not Storage.is_local(config.home):
        wrong.append(("home", f"is {config.home}; this release trains with a home on local disk."))
    if wrong:
        raise ConfigError(
            [Mistake("clickline.yaml", 0, key, problem, "Change it.") for key, problem in wrong]
        )


def _threads() -> int:
    return len(os.sched_getaffinity(0))


class _Trainer:
    """Learns batch by batch and writes checkpoints in the background while it goes on."""

    def __init__(
        self,
        config: Config,
        dataset: Dataset,
        learner: Learner,
        run: Path,
        identity: dict[str, Any],
        progress: Progress,
    ) -> None:
        self._every = config.train.checkpoint_every
        self._keep = config.train.keep_checkpoints
        self._dataset = dataset
        self._learner = learner
        self._run = run
        self._identity = identity
        self._progress = progress
        self._batches = Batches(dataset, Path(dataset.folder), config.train.batch_size, config.train.seed)
        self._position = Position()
        self._step = 0

    def resume(self) -> None:
        """Go on from the newest checkpoint of this run, if there is one."""
        found = latest(self._run)
        if found is None:
            return
        if found.body["identity"] != self._identity:
            raise ArtifactError(f"{found.folder} belongs to another run. Remove {self._run}.")
        load(self._learner.tables, found.tables)
        self._learner.load_dense_state(found.dense())
        self._position = Position(**found.body["position"])
        self._step = found.step
        self._progress.say(f"going on from step {found.step:,} of run {self._run.name}")

    def train_to(self, epochs: int) -> Checkpoint:
        """Learn until `epochs` epochs are done; ends with a checkpoint."""
        rows = self._dataset.splits["train"].rows
        window = Window()
        with ThreadPoolExecutor(1, thread_name_prefix="checkpoint") as pool:
            writing: Future[Checkpoint] | None = None
            written = told = time.monotonic()
            while self._position.epoch < epochs:
                self._progress.begin(f"train epoch {self._position.epoch + 1}", total_rows=rows)
                for batch, after in self._batches.epoch(self._position):
                    step = self._learner.learn(batch)
                    self._position, self._step = after, self._step + 1
                    window.add(batch.label_B, batch.weight_B, step.probability_B)
                    self._progress.advance(rows=batch.rows)
                    now = time.monotonic()
                    if now - told > _TOLD_SECONDS:
                        told = now
                        auc, loss = window.measure()
                        if auc is not None and loss is not None:
                            size = self._learner.tables.size
                            self._progress.note(f"loss {loss:.4f}, AUC {auc:.4f}, {size:,} ids")
                    if now - written > self._every and (writing is None or writing.done()):
                        if writing is not None:
                            writing.result()
                        writing = self._begin_checkpoint(pool)
                        written = now
                self._progress.end()
            if writing is not None:
                writing.result()
            found = latest(self._run)
            if found is None or found.step != self._step:
                found = self._begin_checkpoint(pool).result()
        return found

    def _begin_checkpoint(self, pool: ThreadPoolExecutor) -> Future[Checkpoint]:
        """Cut here and now, between two steps; write while training goes on."""
        snapshot = freeze(self._learner.tables)
        dense = self._learner.dense_state()
        body = {
            "identity": self._identity,
            "dataset": self._dataset.id,
            "features": self._dataset.features.to_json(),
            "position": asdict(self._position),
        }
        step = self._step

        def write() -> Checkpoint:
            made = write_checkpoint(self._run, step, snapshot.write, dense, body)
            prune(self._run, self._keep)
            return made

        return pool.submit(write)


def _evaluate(learner: Learner, dataset: Dataset, progress: Progress) -> Evaluation | None:
    """Every eval row, scored and measured."""
    if "eval" not in dataset.splits:
        return None
    evaluator = Evaluator()
    split = dataset.splits["eval"]
    progress.begin("evaluate", total_rows=split.rows)
    for shard, group, _ in dataset.row_groups("eval"):
        rows = dataset.read(Path(dataset.folder, split.shards[shard].file), [group])
        evaluator.add(rows.label_B, rows.weight_B, learner.score(rows), rows.event_hour_B, {})
        progress.advance(rows=rows.rows)
    progress.end()
    return evaluator.evaluation()


def _judge(config: Config, evaluation: Evaluation | None) -> Verdict:
    gate = config.gate
    asked = Thresholds(gate.auc, gate.logloss, gate.accuracy, gate.calibration, gate.vs_current)
    if evaluation is not None:
        return judge(evaluation.total, asked)
    if any(value is not None for value in asdict(asked).values()):
        return Verdict(False, ("the gate asks for figures, but data.eval gives no rows to measure them on.",))
    return Verdict(True, (), ("nothing was measured: data.eval is not given.",))


def _write_report(run: Path, checkpoint: Checkpoint, evaluation: Evaluation | None, verdict: Verdict) -> Path:
    path = run / "report.json"
    document = {
        "checkpoint": checkpoint.folder.name,
        "evaluation": None if evaluation is None else evaluation.to_json(),
        "gate": verdict.to_json(),
    }
    Storage().put(str(path), as_json(document, indent=1))
    return path
