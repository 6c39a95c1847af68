"""What the policy decides about the losses of a job: continue, roll back to the last checkpoint, or give up."""

from __future__ import annotations

import time
from typing import Any, Literal

from clickline.errors import ClusterError
from clickline.training.cluster.cluster_connection import loss_message
from clickline.training.cluster.job import StateLost, TrainingJob
from clickline.training.cluster.job_status import requested_workers
from clickline.training.cluster.monitor import Monitor
from clickline.training.cluster.policy import (
    Decision,
    GiveUp,
    LossReason,
    LostProcess,
    Observation,
    PolicyState,
    Restart,
    decide,
)


class Recovery:
    """Collects losses until they are handled."""

    def __init__(self, job: TrainingJob, monitor: Monitor) -> None:
        self.losses: list[LostProcess] = []
        self._job = job
        self._monitor = monitor
        self._policy_state = PolicyState()

    def record(
        self,
        role: Literal["worker", "shard", "network"],
        name: str,
        reason: LossReason,
        error: str,
        location: str = "",
    ) -> None:
        loss = LostProcess(role, name, reason, location, loss_message(reason, error))
        self._monitor.log.write(f"lost: {loss}\n{error}")
        self.losses.append(loss)

    def decide(self, workers: int, free_slots: int = 0, **observed: Any) -> Decision:
        """The policy's decision. Raises ClusterError if it gives up."""
        observation = Observation(
            workers,
            free_slots,
            requested=requested_workers(self._job.run),
            trained_rows=self._monitor.rows,
            checkpoint_step=self._monitor.checkpoint_step,
            **observed,
        )
        decision, self._policy_state = decide(
            self._job.rules, self._policy_state, observation, time.monotonic()
        )
        if isinstance(decision, GiveUp):
            raise ClusterError(f"{decision.reason}.")
        return decision

    def handle_losses(self, workers: int) -> None:
        """Continue with the remaining workers, also those that are starting, or raise StateLost or ClusterError."""
        if not self.losses:
            return
        lost, self.losses = tuple(self.losses), []
        decision = self.decide(workers, lost=lost)
        if isinstance(decision, Restart):
            self._monitor.announce("restart", decision.reason)
            raise StateLost(decision.reason, decided=True)
        self._monitor.announce("resize", decision.reason)

    def count_restart(self, lost: StateLost) -> None:
        """Count a rollback that no loss explains. Raises ClusterError after too many."""
        self._monitor.announce("restart", self.decide(0, restart=str(lost)).reason)
