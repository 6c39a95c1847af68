"""Pure policy: an observation of the cluster in, a decision with its reason out. Nothing here acts, waits or polls.

workers lost, at least one remains           Resize   continue with the others
a stateful actor or all workers lost         Restart  from the last checkpoint
the same location fails repeatedly           GiveUp
free capacity, or more workers requested     Resize   up, not too often
fewer workers requested                      Resize   down
no capacity to start                         Keep     and GiveUp after a while
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from clickline.distributed.session import ROOM_SECONDS
from clickline.progress import human_size

GROW_SECONDS = 10.0  # between two increases
_MAX_GROW_SECONDS = 60.0
_CALM_SECONDS = 60.0  # without a loss, after which growth is fast again
_EVICT_SHARE, _GIVE_UP_SHARE = 0.85, 0.95
_RESTARTS = 3  # times `max_failures`: how often training may roll back to the same checkpoint


@dataclass(frozen=True)
class Keep:
    """Change nothing."""

    reason: str = ""


@dataclass(frozen=True)
class Resize:
    """Continue with this number of workers, without a rollback."""

    workers: int
    reason: str


@dataclass(frozen=True)
class Restart:
    """Roll back to the last checkpoint and resume from there."""

    reason: str


@dataclass(frozen=True)
class GiveUp:
    """Fail the run; its checkpoints stay."""

    reason: str


@dataclass(frozen=True)
class Evict:
    """Let an embedding server evict ids now, by the rule of train.eviction."""

    shard: int
    reason: str


Decision = Keep | Resize | Restart | GiveUp

LossReason = Literal["crashed", "preempted", "straggling", "partitioned", "out_of_memory"]
"""preempted: its node left. That does not count as a failure of its location."""


@dataclass(frozen=True)
class LostProcess:
    """A process that is gone or was given up."""

    role: Literal["worker", "shard", "network"]
    name: str
    reason: LossReason
    location: str = ""  # "step 120" or "unit 3, batch 17"; empty: it had not begun
    error: str = ""  # its last error

    def __str__(self) -> str:
        location = f" at {self.location}" if self.location else ""
        error = f" ({self.error.strip().splitlines()[-1]})" if self.error.strip() else ""
        return f"{self.name} {_REASONS[self.reason]}{location}{error}"


@dataclass(frozen=True)
class Observation:
    """The cluster as the driver sees it. `lost` has only new losses."""

    workers: int  # alive
    free_slots: int  # more workers that fit now
    lost: tuple[LostProcess, ...] = ()
    restart: str = ""  # why training must roll back, if no loss explains it
    requested: int | None = None  # by `clickline scale`
    trained_rows: int = 0  # a measure of progress
    checkpoint_step: int = 0  # of the last checkpoint
    capacity: str = ""  # "4 CPUs, 1 of them free"


@dataclass(frozen=True)
class PolicyRules:
    """The limits from the config."""

    min: int = 1
    max: int | None = None
    max_failures: int = 3
    worker_size: str = ""  # what one worker requests: "1 CPU and 2.0 GiB"
    room_seconds: float = ROOM_SECONDS


@dataclass(frozen=True)
class PolicyState:
    """What later decisions depend on; pass the returned one to the next call."""

    failures: Mapping[str, int] = field(default_factory=dict)  # by location
    lost_at: float = float("-inf")
    grow_after: float = float("-inf")
    grow_seconds: float = GROW_SECONDS
    waiting_since: float | None = None  # for capacity


def decide(
    rules: PolicyRules, state: PolicyState, observed: Observation, now: float
) -> tuple[Decision, PolicyState]:
    """The decision, and the state for the next call."""
    if observed.lost:
        state = _count_losses(state, observed, now)
        return _after_losses(rules, state, observed), state
    if observed.restart:
        state = replace(state, failures=Counter(state.failures) + Counter([_since_checkpoint(observed)]))
        return _too_often(rules, state, observed, observed.restart) or Restart(observed.restart), state
    if observed.workers == 0:
        return _start(rules, state, observed, now)
    state = replace(state, waiting_since=None)
    limit = _limit(rules, observed)
    if limit is not None and observed.workers > limit:
        by = "`clickline scale` requests" if limit == observed.requested else "train.workers.max is"
        return Resize(limit, f"{by} {_workers(limit)}, and {observed.workers} run"), state
    workers = _capped(observed.workers + observed.free_slots, limit)
    if workers > observed.workers and now >= state.grow_after:
        reason = f"the cluster has capacity: from {observed.workers} to {_workers(workers)}"
        if observed.requested is not None:
            reason += f"; `clickline scale` requests {observed.requested}"
        return Resize(workers, reason), replace(state, grow_after=now + state.grow_seconds)
    return Keep(), state


def decide_memory(observed: MemoryUse, *, evicts: bool) -> Keep | Evict | GiveUp:
    """What to do about the memory of an embedding server; `evicts`: train.eviction is set."""
    share = observed.used / observed.limit
    may_evict = evicts and not observed.evicted
    sizes = f"{human_size(observed.used)} of {human_size(observed.limit)}"
    usage = f"embedding server {observed.shard} uses {sizes} ({share:.0%})"
    if share >= _GIVE_UP_SHARE and not may_evict:
        advice = "evict more ids (train.eviction)" if evicts else "set train.eviction to evict old ids"
        return GiveUp(
            f"{usage}, and the kernel would soon kill it. Raise train.embedding_servers, give each more memory "
            f"(cluster.embedding_server.memory), admit fewer ids (train.admission), or {advice}; "
            "the same command then resumes from the last checkpoint"
        )
    if share >= _EVICT_SHARE and may_evict:
        return Evict(observed.shard, f"{usage}: it evicts ids by train.eviction")
    if share >= _EVICT_SHARE and not evicts:
        return Keep(f"{usage}; training ends at {_GIVE_UP_SHARE:.0%}. Set train.eviction to evict old ids")
    return Keep()


@dataclass(frozen=True)
class MemoryUse:
    """Memory of an embedding server, in bytes."""

    shard: int
    used: int
    limit: int
    evicted: bool = False  # it has evicted ids and is still crowded


_REASONS = {
    "crashed": "crashed",
    "preempted": "left with its node",
    "straggling": "stopped making progress",
    "partitioned": "became unreachable",
    "out_of_memory": "ran out of memory",
}


def _count_losses(state: PolicyState, observed: Observation, now: float) -> PolicyState:
    failed = {_failure(loss, observed) for loss in observed.lost if loss.reason != "preempted"}
    if failed and (observed.workers == 0 or any(loss.role != "worker" for loss in observed.lost)):
        failed.add(_since_checkpoint(observed))  # training rolls back to it
    if not failed:  # nodes come and go: not a reason to grow slowly
        return state
    failures = Counter(state.failures)
    failures.update(failed)
    calm = now - state.lost_at >= _CALM_SECONDS
    wait = GROW_SECONDS if calm else min(2 * state.grow_seconds, _MAX_GROW_SECONDS)
    return replace(state, failures=failures, lost_at=now, grow_after=now + wait, grow_seconds=wait)


def _since_checkpoint(observed: Observation) -> str:
    return f"training after the checkpoint of step {observed.checkpoint_step:,}"


def _failure(loss: LostProcess, observed: Observation) -> str:
    """The key by which failures are counted: the location, or the progress so far if it had none."""
    return loss.location or f"starting, with {observed.trained_rows:,} rows trained,"


def _after_losses(rules: PolicyRules, state: PolicyState, observed: Observation) -> Decision:
    losses = "; ".join(str(loss) for loss in observed.lost)
    for loss in observed.lost:
        location = _failure(loss, observed)
        if loss.reason != "preempted" and state.failures[location] >= rules.max_failures:
            return GiveUp(
                f"{location} failed {state.failures[location]} times without progress in between "
                f"(cluster.max_failures is {rules.max_failures}). The last failure: {loss}"
            )
    if (over := _too_often(rules, state, observed, losses)) is not None:
        return over
    if any(loss.role != "worker" for loss in observed.lost):
        return Restart(f"{losses}: its state is gone, so training rolls back to the last checkpoint")
    if observed.workers == 0:
        return Restart(f"{losses}: no worker is left, so training rolls back to the last checkpoint")
    below = f", below train.workers.min {rules.min}" if observed.workers < rules.min else ""
    verb = "continues" if observed.workers == 1 else "continue"
    return Resize(observed.workers, f"{losses}: {_workers(observed.workers)} {verb}{below}")


def _too_often(rules: PolicyRules, state: PolicyState, observed: Observation, losses: str) -> GiveUp | None:
    restarts = state.failures.get(_since_checkpoint(observed), 0)
    if restarts < _RESTARTS * rules.max_failures:
        return None
    return GiveUp(
        f"{_since_checkpoint(observed)} was started {restarts} times and never reached another checkpoint. "
        f"The last failure: {losses}"
    )


def _start(
    rules: PolicyRules, state: PolicyState, observed: Observation, now: float
) -> tuple[Decision, PolicyState]:
    limit = _limit(rules, observed)
    minimum = _capped(rules.min, limit)
    if observed.free_slots >= minimum:
        workers = _capped(observed.free_slots, limit)
        reason = f"the cluster has capacity: starting with {_workers(workers)}"
        started = replace(
            state, waiting_since=None, grow_after=max(state.grow_after, now + state.grow_seconds)
        )
        return Resize(workers, reason), started
    since = now if state.waiting_since is None else state.waiting_since
    state = replace(state, waiting_since=since)
    worker_size = f" of {rules.worker_size}{' each' if minimum > 1 else ''}" if rules.worker_size else ""
    capacity = f" It has {observed.capacity}." if observed.capacity else ""
    missing = (
        f"{_workers(minimum)}{worker_size} must fit before training starts, and the cluster has capacity for "
        f"{observed.free_slots}.{capacity}"
    )
    if now - since >= rules.room_seconds:
        return GiveUp(
            f"{missing} Waited {now - since:,.0f} s for capacity. Add nodes, or lower train.workers.min, "
            "cluster.worker.cpus or cluster.worker.memory"
        ), state
    return Keep(f"waiting for capacity: {missing}"), state


def _limit(rules: PolicyRules, observed: Observation) -> int | None:
    """The most workers allowed; None: any number."""
    bounds = [bound for bound in (rules.max, observed.requested) if bound is not None]
    return min(bounds) if bounds else None


def _capped(count: int, limit: int | None) -> int:
    return count if limit is None else min(count, limit)


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"
