"""Writes the checkpoints of a run in the background, on schedule."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from clickline.artifacts.checkpoint import Checkpoint
from clickline.config.sections import TrainSection
from clickline.progress import Progress
from clickline.training.cluster.job import StateLost


class CheckpointWriter:
    """One checkpoint at a time, every `checkpoint_every` seconds and at each multiple of `checkpoint_steps`. Leaving
    its context waits for the last one."""

    def __init__(self, settings: TrainSection, progress: Progress) -> None:
        self._settings = settings
        self._progress = progress
        self._began_at = time.monotonic()
        self._step = 0  # of the last checkpoint
        self._writing: Future[Checkpoint] | None = None

    def __enter__(self) -> CheckpointWriter:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown()
        self._writing = None

    def resume_from(self, step: int) -> None:
        self._step = step

    def due(self, step: int) -> bool:
        """Whether to write a checkpoint at `step`: not while the previous one is still being written."""
        if self._writing is not None:
            if not self._writing.done():
                return False
            try:
                self.wait()
            except StateLost as error:  # a lost embedding server is reported elsewhere
                self._progress.log(
                    f"the checkpoint of step {self._step:,} was not written: {error}. Training "
                    "continues, and the next one is written on schedule; if an embedding server is lost, training "
                    "rolls back to the previous checkpoint"
                )
                # Not at once: an embedding server that still writes would be considered lost while it finishes.
                self._began_at, self._step = time.monotonic(), step
        steps = self._settings.checkpoint_steps
        if steps is not None and step // steps > self._step // steps:
            return True
        return time.monotonic() - self._began_at > self._settings.checkpoint_every

    def begin(self, step: int, write: Callable[[], Checkpoint]) -> None:
        """Write a checkpoint after the previous one."""
        self.wait()
        self._began_at, self._step = time.monotonic(), step
        self._writing = self._pool.submit(write)

    def wait(self) -> None:
        """Wait for the checkpoint that is being written; raises its error."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()
