"""The training loop on a cluster: the driver learns epochs, this writes their story and the checkpoints."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from clickline.artifacts.checkpoint import Checkpoint, begin_checkpoint, finish_checkpoint, latest
from clickline.artifacts.dataset import Dataset
from clickline.config import Config
from clickline.config.sections import TrainSection
from clickline.embedding import Eviction, SlotReport
from clickline.errors import ClicklineError
from clickline.evaluation.progressive_validation import Progressive
from clickline.progress import Progress, human_size
from clickline.records import LabelledRows
from clickline.training.batches import Batches, Position
from clickline.training.cluster.driver import Driver
from clickline.training.cluster.job import Job, Lost
from clickline.training.cluster.job_status import Figures, driving
from clickline.training.cluster.policy import Rules
from clickline.training.dense_optimizer import Diverged
from clickline.training.tracking import Tracker
from clickline.training.train_step import Learner
from clickline.training.training_run import Epochs, Result

_WRITER_SHARE = 0.2  # of one core of each shard, for a checkpoint that is written while training goes on
_TOLD_SECONDS = 2.0


@contextmanager
def cluster_trainer(
    config: Config,
    dataset: Dataset,
    learner: Learner,
    batches: Mapping[str, Any],
    run: Path,
    identity: Mapping[str, Any],
    tracker: Tracker,
    progress: Progress,
) -> Iterator[ClusterTrainer]:
    """A trainer whose roles end with it, the one driver of its run."""
    with driving(Path(config.home), run):
        job = _job(config, dataset, learner, batches, run)
        trainer = ClusterTrainer(
            config.train,
            dataset,
            learner,
            Batches(dataset, Path(dataset.folder), **batches),
            run,
            identity,
            tracker,
            progress,
            job,
        )
        state: Literal["done", "stopped", "failed"] = "failed"
        message = ""
        try:
            yield trainer
            state = "done"
        except KeyboardInterrupt:
            state = "stopped"
            raise
        except ClicklineError as error:
            message = str(error)
            raise
        finally:
            trainer.close(state, message)


def _job(config: Config, dataset: Dataset, learner: Learner, batches: Mapping[str, Any], run: Path) -> Job:
    train, cluster, model = config.train, config.cluster, learner.model
    worker, shard, rule = cluster.worker, cluster.shard, train.eviction
    memory = "" if worker.memory == "auto" else f" and {human_size(worker.memory)}"
    return Job(
        home=Path(config.home).absolute(),
        run=run.absolute(),
        address=cluster.address,
        dataset=str(Path(dataset.folder).absolute()),
        batches=batches,
        plan=model.plan,
        tables=model.plan.tables(uses_wide=model.tables.wide_optimizer is not None),
        model_file=None if config.model.file is None else Path(config.model.file).absolute(),
        sync=train.sync,
        staleness=train.staleness,
        staleness_rate=train.staleness_rate,
        rules=Rules(train.workers.min, train.workers.max, cluster.crashes, f"{worker.cpus:g} CPUs{memory}"),
        shards=train.shards,
        worker_cpus=worker.cpus,
        worker_memory=None if worker.memory == "auto" else worker.memory,
        shard_cpus=shard.cpus,
        shard_memory=None if shard.memory == "auto" else shard.memory,
        eviction=None
        if rule is None
        else Eviction(rule.threshold, rule.hours_unseen, rule.click_weight, rule.nonclick_weight),
        total_rows=dataset.splits["train"].rows * train.epochs,
    )


class ClusterTrainer(Epochs):
    """Epochs that are learned by the roles of a cluster. What they lose is learned again from the last checkpoint."""

    def __init__(
        self,
        settings: TrainSection,
        dataset: Dataset,
        learner: Learner,
        batches: Batches,
        run: Path,
        identity: Mapping[str, Any],
        tracker: Tracker,
        progress: Progress,
        job: Job,
    ) -> None:
        super().__init__(settings, dataset, learner.model, batches, run, identity, tracker, progress)
        self._learner = learner
        self._first = learner.dense_state()  # what a run begins with that has no checkpoint yet
        self._driver = Driver(job, progress, self._tell)
        self._start: Checkpoint | None = None
        self._units: Mapping[str, Any] | None = None  # async: where the epoch is
        self._cut_at = time.monotonic()
        self._cut_step = 0
        self._writing: Future[Checkpoint] | None = None
        self._told = 0.0
        self._figures = Figures()  # the newest
        self._advanced = 0

    @property
    def step(self) -> int:
        return self._driver.step

    # ── going on ───────────────────────────────────────────────────────────────────────────────

    def resume(self, start: Checkpoint | None) -> None:
        self._start = start
        while True:
            try:
                if latest(self._run) is None and start is None:
                    self._driver.begin((), self._first, 0, 0)
                super().resume(start)
                return
            except Lost as lost:  # again, while it began
                self._drop_unwritten(lost)

    def _warm(self, start: Checkpoint) -> None:
        arrays = start.dense()
        self._model.load_weights(arrays)
        self._learner.load_moments(arrays)
        self._driver.begin(start.tables, self._learner.dense_state(), 0, 0)

    def _restore(self, checkpoint: Checkpoint) -> None:
        from clickline.models.calibration import from_json

        body = checkpoint.body
        self._units = body["units"]
        self._cut_step = checkpoint.step
        found = body.get("calibration")
        self._model.calibration = None if found is None else from_json(found)
        self._driver.begin(checkpoint.tables, checkpoint.dense(), checkpoint.step, self._learned)

    def train_to(self, epochs: int) -> Result:
        while True:
            try:
                return super().train_to(epochs)
            except Lost as lost:
                self._drop_unwritten(lost)
                self.resume(self._start)

    def _drop_unwritten(self, lost: Lost) -> None:
        """What is not in the last checkpoint is not there."""
        self._driver.restarted(lost)
        self._position, self._units, self._learned, self._newest_hour = Position(), None, 0, -1
        self._evicted, self._epochs, self._measured = {}, [], {}
        self._hours = None if self._hours is None else Progressive()
        self._writing = None

    def close(self, state: Literal["done", "stopped", "failed"], message: str = "") -> None:
        self._driver.close(state, message)

    # ── an epoch ───────────────────────────────────────────────────────────────────────────────

    @property
    def _at_epoch_end(self) -> bool:
        return super()._at_epoch_end and self._units is None

    def _learn_epoch(self, pool: ThreadPoolExecutor) -> None:
        rows, epoch = self._dataset.splits["train"].rows, self._position.epoch
        self._progress.begin(f"train epoch {epoch + 1}", total_rows=rows)
        self._advanced = self._learned
        try:
            for pause in self._driver.learn(self._position, self._units, self._cut_due):
                if pause.position.epoch > epoch:  # behind the last step: the epoch's own checkpoint comes now
                    continue
                self._position, self._units = pause.position, pause.units
                self._writing = self._begin_checkpoint(pool)
            self._told = float("-inf")
            self._driver.tell()
        except Diverged as error:
            raise ClicklineError(f"{error} The batch is kept in {self._keep_batch(error.rows)}.") from error
        finally:
            self._progress.end()
        self._position, self._units = Position(epoch + 1), None
        if self._writing is not None:
            self._writing.result()

    def _cut_due(self, step: int) -> bool:
        if self._writing is not None:
            if not self._writing.done():
                return False
            error = self._writing.exception()
            if error is not None and not isinstance(error, Lost):  # of a lost shard others tell, and more
                raise error
            if error is not None:
                self._progress.say(
                    f"the checkpoint of step {self._cut_step:,} was not written: {error}. Training goes on, and the "
                    "next one comes at its time; if the shard is lost, training goes back to the checkpoint before"
                )
                # Not at once: a shard that still writes would be taken for lost while it ends that first.
                self._writing, self._cut_at, self._cut_step = None, time.monotonic(), step
        steps = self._settings.checkpoint_steps
        if steps is not None and step - self._cut_step >= steps:
            return True
        return time.monotonic() - self._cut_at > self._settings.checkpoint_every

    def _tell(self, figures: Figures) -> None:
        """One line of how it goes, and the tracked figures."""
        self._figures = figures
        self._progress.advance(rows=max(0, figures.rows - self._advanced))
        self._advanced = max(self._advanced, figures.rows)
        now = time.monotonic()
        if now - self._told < _TOLD_SECONDS:
            return
        self._told = now
        told = {"rows_per_second": figures.rows_per_second}
        words = [f"step {figures.step:,}"]
        if figures.auc is not None and figures.loss is not None:
            told |= {"auc": figures.auc, "loss": figures.loss}
            words.append(f"loss {figures.loss:.4f}, AUC {figures.auc:.4f}")
        words.append(self._driver.words())
        self._progress.note(", ".join(words))
        self._tracker.metrics(figures.step, told)
        self._draw(figures.step, figures.rows)

    def _draw(self, step: int, rows: int) -> None:
        newest = self._figures
        self._curve.add(step, rows, newest.loss, newest.auc, newest.rows_per_second)

    # ── checkpoints ────────────────────────────────────────────────────────────────────────────

    def _begin_checkpoint(self, pool: ThreadPoolExecutor, *, epoch_end: bool = False) -> Future[Checkpoint]:
        """Nothing is under way: every shard cuts now and writes on while training goes on."""
        began = time.monotonic()
        states = self._driver.states()
        self._newest_hour = max([self._newest_hour, *(state.newest_hour for state in states)])
        self._learned = states[0].rows
        step = self.step
        self._draw(step, self._learned)
        self._cut_at, self._cut_step = began, step
        dense = self._driver.dense_state()
        if self._hours is not None:
            for counted in self._driver.hours():
                self._hours.merge(counted)
            dense |= {f"hours/{name}": array for name, array in self._hours.to_arrays().items()}
        folder = begin_checkpoint(self._run, step)
        parts = self._driver.freeze(folder, 1.0 if epoch_end else _WRITER_SHARE)
        stalled = time.monotonic() - began
        body = {
            **self._story(epoch_end=epoch_end),
            "units": None if epoch_end else self._units,
        }

        def write() -> Checkpoint:
            made = finish_checkpoint(folder, step, self._driver.written(parts), dense, body)
            self._driver.cut_done(step, time.monotonic() - began, stalled)
            self._prune()
            return made

        self._writing = pool.submit(write)
        return self._writing

    # ── between epochs ─────────────────────────────────────────────────────────────────────────

    def score(self, rows: LabelledRows) -> NDArray[np.float32]:
        probability_B = self._driver.score(rows)
        calibration = self._model.calibration
        return probability_B if calibration is None else calibration.apply(probability_B)

    def _decay(self, rate: float) -> None:
        self._driver.decay(rate)

    def _evict(self, rule: Eviction) -> tuple[SlotReport, ...]:
        newest = max(state.newest_hour for state in self._driver.states())
        return self._driver.evict(rule, max(newest, self._newest_hour))

    def _slots(self) -> tuple[SlotReport, ...]:
        return self._driver.slots()

    def _unseen(self, rows: LabelledRows) -> None:
        return None  # the tables are in other processes
