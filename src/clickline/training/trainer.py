"""The training loop on one machine: batches in, checkpoints out, and exactly where it was when it is started again."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clickline.artifacts.checkpoint import Checkpoint, write_checkpoint
from clickline.artifacts.dataset import Dataset
from clickline.config.sections import TrainSection
from clickline.embedding import Eviction, SlotReport, Snapshot, freeze
from clickline.errors import ClicklineError
from clickline.evaluation.report.report_document import unseen_in
from clickline.evaluation.rolling_metrics import Window
from clickline.models.torch_runtime import finds_ahead
from clickline.progress import Progress, human_size
from clickline.records import LabelledRows
from clickline.training.batches import Batches
from clickline.training.dense_optimizer import Diverged
from clickline.training.tracking import Tracker, process_figures
from clickline.training.train_step import Learner, Prepared
from clickline.training.training_run import Epochs

_TOLD_SECONDS = (0.5, 2.0)  # often at first, when much changes; measuring takes a hundredth of the first
_TOLD_ROWS = 1 << 15  # the last ones, whose AUC and loss are told
_WRITER_SHARE = 0.2  # of one core, for a checkpoint that is written while training goes on


class Trainer(Epochs):
    """Learns batch by batch and writes checkpoints in the background while it goes on."""

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
    ) -> None:
        super().__init__(settings, dataset, learner.model, batches, run, identity, tracker, progress)
        self._learner = learner
        self._finds_ahead = finds_ahead(identity["threads"])
        self._snapshot: Snapshot | None = None  # the one being written
        self._window = Window(_TOLD_ROWS)
        self._begun = self._told = self._written = time.monotonic()
        self._rows_told = 0

    @property
    def step(self) -> int:
        return self._learner.step

    def score(self, rows: LabelledRows) -> NDArray[np.float32]:
        return self._model.score(rows)

    def _warm(self, start: Checkpoint) -> None:
        self._learner.load_moments(self._model.restore(start))

    def _restore(self, checkpoint: Checkpoint) -> None:
        self._learner.load_dense_state(self._model.restore(checkpoint), step=checkpoint.step)

    def _decay(self, rate: float) -> None:
        self._model.tables.decay(rate)

    def _evict(self, rule: Eviction) -> tuple[SlotReport, ...]:
        return self._model.tables.evict(rule, self._newest_hour)

    def _slots(self) -> tuple[SlotReport, ...]:
        return self._model.tables.report()

    def _unseen(self, rows: LabelledRows) -> Sequence[float]:
        return unseen_in(self._model.tables, rows)

    # ── an epoch ───────────────────────────────────────────────────────────────────────────────

    def _learn_epoch(self, pool: ThreadPoolExecutor) -> None:
        """From the position to the end of its epoch."""
        rows = self._dataset.splits["train"].rows
        self._progress.begin(f"train epoch {self._position.epoch + 1}", total_rows=rows)
        self._told = time.monotonic()
        writing: Future[Checkpoint] | None = None
        with ThreadPoolExecutor(1, thread_name_prefix="find") as finder:
            coming = self._batches.epoch(self._position)
            current = next(coming, None)
            prepared = self._prepare(current[0]) if current else None
            while current is not None:
                batch, after = current
                following = next(coming, None)
                # A checkpoint must not come between a batch's lookup, which counts it, and its learning.
                cut = following is not None and self._checkpoint_due() and (writing is None or writing.done())
                ahead = None
                if following is not None and not cut and self._finds_ahead:
                    ahead = finder.submit(self._prepare, following[0])
                if prepared is not None:
                    self._learn(prepared)
                self._position = after
                self._progress.advance(rows=batch.rows)
                if cut:
                    if writing is not None:
                        writing.result()
                    writing = self._begin_checkpoint(pool)
                current = following
                if following is not None:
                    prepared = self._prepare(following[0]) if ahead is None else ahead.result()
        if self._rows_told:
            self._tell(time.monotonic())
        if writing is not None:
            if self._snapshot is not None:
                self._snapshot.hurry()  # nothing is learned meanwhile that it could disturb
            writing.result()
        self._progress.end()

    def _prepare(self, rows: LabelledRows) -> Prepared | None:
        return self._learner.prepare(rows) if rows.rows else None

    def _learn(self, prepared: Prepared) -> None:
        rows = prepared.rows
        try:
            step = self._learner.learn(prepared)
        except Diverged as error:
            raise ClicklineError(f"{error} The batch is kept in {self._keep_batch(error.rows)}.") from error
        self._window.add(rows.label_B, rows.weight_B, step.probability_B)
        if self._hours is not None and not self._position.epoch:
            self._hours.add(rows.event_hour_B, rows.label_B, rows.weight_B, step.probability_B)
        self._newest_hour = max(self._newest_hour, int(rows.event_hour_B.max()))
        self._rows_told += rows.rows
        self._learned += rows.rows
        now = time.monotonic()
        shortest, longest = _TOLD_SECONDS
        if now - self._told > min(max(shortest, (now - self._begun) / 20), longest):
            self._tell(now)

    def _tell(self, now: float) -> None:
        auc, loss = self._window.measure()
        size, busy = self._model.tables.size, process_figures()
        speed = self._rows_told / max(now - self._told, 1e-9)
        figures = {"rows_per_second": speed, "ids": size, **busy}
        if auc is not None and loss is not None:
            self._progress.note(
                f"step {self._learner.step:,}, loss {loss:.4f}, AUC {auc:.4f}, {size:,} ids, "
                f"{human_size(busy['system/memory_mib'] * 2**20)}"
            )
            figures |= {"loss": loss, "auc": auc}
        self._tracker.metrics(self._learner.step, figures)
        self._curve.add(self._learner.step, self._learned, loss, auc, speed)
        self._told, self._rows_told = now, 0

    # ── checkpoints ────────────────────────────────────────────────────────────────────────────

    def _checkpoint_due(self) -> bool:
        """Whether a checkpoint follows the step that comes now."""
        steps = self._settings.checkpoint_steps
        if steps is not None and (self._learner.step + 1) % steps == 0:
            return True
        return time.monotonic() - self._written > self._settings.checkpoint_every

    def _begin_checkpoint(self, pool: ThreadPoolExecutor, *, epoch_end: bool = False) -> Future[Checkpoint]:
        """Cut here and now, between two steps; write while training goes on."""
        self._written = time.monotonic()
        snapshot = self._snapshot = freeze(self._model.tables, share=1.0 if epoch_end else _WRITER_SHARE)
        dense = self._learner.dense_state()
        if self._hours is not None:
            dense |= {f"hours/{name}": array for name, array in self._hours.to_arrays().items()}
        body = self._story(epoch_end=epoch_end)
        step = self._learner.step

        def write() -> Checkpoint:
            made = write_checkpoint(self._run, step, snapshot.write, dense, body)
            self._prune()
            return made

        return pool.submit(write)
