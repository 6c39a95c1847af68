"""The driver's connection to its Ray cluster: opened when a run begins, and again after the cluster was lost."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

from clickline.distributed.session import RaySession, open_session
from clickline.progress import Progress
from clickline.training.cluster.job import StateLost, TrainingJob
from clickline.training.cluster.policy import LossReason

_LOOK_SECONDS = 1.0  # between two checks that the cluster is alive
_GUESSES = " Some common causes include"  # Ray adds this to every process that ends, and lists memory first


class ClusterConnection:
    """A Ray session, and calls that end if the cluster is lost."""

    def __init__(self, job: TrainingJob, progress: Progress) -> None:
        self._job = job
        self._progress = progress
        self._stack = ExitStack()
        self._session: RaySession | None = None

    @property
    def session(self) -> RaySession:
        assert self._session is not None
        return self._session

    @property
    def is_open(self) -> bool:
        return self._session is not None

    @property
    def usable(self) -> bool:
        """Whether it is open and the cluster is alive."""
        return self._session is not None and not self._session.lost()

    def open(self) -> None:
        """Connect to the cluster, or start an embedded one, unless that was done before."""
        if self._session is not None and self._session.lost():
            self.close()
        if self._session is None:
            job = self._job
            opened = open_session(
                job.address, cpus=job.logical_cpus(), home=job.home, progress=self._progress
            )
            self._session = self._stack.enter_context(opened)

    def close(self) -> None:
        """Disconnect from the cluster; an embedded one is shut down."""
        self._stack.close()
        self._session = None

    def check(self) -> None:
        """Raises StateLost if the cluster itself is gone."""
        if self._session is not None and self._session.lost():
            raise StateLost(
                "the cluster's head or this machine's node is gone, so training rolls back to the last checkpoint"
            )

    def get(self, refs: Any, seconds: float) -> Any:
        """Like `ray.get`, but raises StateLost if the cluster goes away: Ray would end this process after a minute."""
        import ray
        from ray.exceptions import GetTimeoutError

        until = time.monotonic() + seconds
        while True:
            left = max(0.0, until - time.monotonic())
            try:
                return ray.get(refs, timeout=min(left, _LOOK_SECONDS))
            except GetTimeoutError:
                self.check()
                if left <= _LOOK_SECONDS:
                    raise

    def capacity(self) -> str:
        """The cluster's CPUs as a message."""
        return f"{self.session.cpus():g} CPUs, {self.session.free_cpus():g} of them free"

    def loss_reason(self, error: Any, actor: Any | None) -> LossReason:
        """Why an actor ended, from Ray's error and, if the actor is known, the state of its node."""
        message = str(error).partition(_GUESSES)[0].lower()
        if getattr(error, "preempted", False) or "node was terminated" in message or "node died" in message:
            return "preempted"
        if any(sign in message for sign in ("out of memory", "low on memory", "memory pressure")):
            return "out_of_memory"
        left = actor is not None and self._session is not None and self._session.has_left(actor)
        return "preempted" if left else "crashed"


def loss_message(reason: LossReason, error: str) -> str:
    """The reported part of an error; nothing for a node that left."""
    return "" if reason == "preempted" else error.partition(_GUESSES)[0]
