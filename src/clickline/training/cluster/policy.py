"""What to do about what was seen: a decision, with its reason in words. Nothing here acts, waits or looks.

workers lost, one is left        Resize   the others go on
a shard, the network, all lost   Restart  from the last cut
one place fails again and again  GiveUp
room for more, or more asked     Resize   up, not too often
less asked                       Resize   down
no room to begin                 Keep     and GiveUp when it takes too long
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from clickline.distributed.session import ROOM_SECONDS
from clickline.progress import human_size

GROW_SECONDS = 10.0  # between two steps of growth
_LONGEST_GROW_SECONDS = 60.0
_CALM_SECONDS = 60.0  # without a loss, then growth is quick again
_FORGET_SHARE, _GIVE_UP_SHARE = 0.85, 0.95
_RESTARTS = 3  # times `crashes`: how often everything may go back to the same cut


@dataclass(frozen=True)
class Keep:
    """Go on as it is."""

    reason: str = ""


@dataclass(frozen=True)
class Resize:
    """Go on with so many workers, from where it is."""

    workers: int
    reason: str


@dataclass(frozen=True)
class Restart:
    """Go back to the last cut, and on from there."""

    reason: str


@dataclass(frozen=True)
class GiveUp:
    """End with an error; the checkpoints stay."""

    reason: str


@dataclass(frozen=True)
class Forget:
    """Let a shard evict by the rule of train.eviction, now."""

    shard: int
    reason: str


Decision = Keep | Resize | Restart | GiveUp

Why = Literal["crashed", "preempted", "straggling", "partitioned", "out_of_memory"]
"""preempted: its node left. That says nothing against the place it was at, and spends no budget."""


@dataclass(frozen=True)
class Loss:
    """A process that is gone, or is given up."""

    role: Literal["worker", "shard", "network"]
    name: str
    why: Why
    place: str = ""  # what it was at: "step 120", "unit 3, batch 17"; empty: nothing yet
    error: str = ""  # its last words

    def __str__(self) -> str:
        place = f" at {self.place}" if self.place else ""
        words = f" ({self.error.strip().splitlines()[-1]})" if self.error.strip() else ""
        return f"{self.name} {_WHY[self.why]}{place}{words}"


@dataclass(frozen=True)
class Seen:
    """What the driver sees. `lost` is what it had not told before."""

    workers: int  # alive
    room: int  # how many more the cluster could start now
    lost: tuple[Loss, ...] = ()
    restart: str = ""  # why everything has to go back to the last cut, where no loss tells
    asked: int | None = None  # by `clickline scale`
    learned: int = 0  # rows: what shows progress
    cut: int = 0  # step of the last cut
    has: str = ""  # what the cluster has, in words: "4 CPUs, 1 of them free"


@dataclass(frozen=True)
class Rules:
    """What the config says."""

    min: int = 1
    max: int | None = None
    crashes: int = 3
    each: str = ""  # what one worker asks for, in words: "1 CPU and 2.0 GiB"
    room_seconds: float = ROOM_SECONDS


@dataclass(frozen=True)
class Past:
    """What later decisions depend on; give back the one you got."""

    failures: Mapping[str, int] = field(default_factory=dict)  # by place
    lost_at: float = float("-inf")
    grow_after: float = float("-inf")
    grow_seconds: float = GROW_SECONDS
    waits_since: float | None = None  # for room


def decide(rules: Rules, past: Past, seen: Seen, now: float) -> tuple[Decision, Past]:
    """What to do now, and what to remember of it."""
    if seen.lost:
        past = _with_losses(past, seen, now)
        return _after_losses(rules, past, seen), past
    if seen.restart:
        past = replace(past, failures=Counter(past.failures) + Counter([_since_cut(seen)]))
        return _too_often(rules, past, seen, seen.restart) or Restart(seen.restart), past
    if seen.workers == 0:
        return _begin(rules, past, seen, now)
    past = replace(past, waits_since=None)
    most = _most(rules, seen)
    if most is not None and seen.workers > most:
        by = "`clickline scale` asks for" if most == seen.asked else "train.workers.max is"
        return Resize(most, f"{by} {_workers(most)}, and {seen.workers} run"), past
    wanted = _at_most(seen.workers + seen.room, most)
    if wanted > seen.workers and now >= past.grow_after:
        reason = f"the cluster has room: from {seen.workers} to {_workers(wanted)}"
        if seen.asked is not None:
            reason += f"; `clickline scale` asks for {seen.asked}"
        return Resize(wanted, reason), replace(past, grow_after=now + past.grow_seconds)
    return Keep(), past


def decide_memory(seen: MemorySeen, *, evicts: bool) -> Keep | Forget | GiveUp:
    """What to do about a shard's memory; `evicts`: train.eviction is set."""
    share = seen.used / seen.limit
    may_forget = evicts and not seen.forgot
    found = f"shard {seen.shard} uses {human_size(seen.used)} of {human_size(seen.limit)} ({share:.0%})"
    if share >= _GIVE_UP_SHARE and not may_forget:
        forget = "forget more ids (train.eviction)" if evicts else "set train.eviction to forget old ids"
        return GiveUp(
            f"{found}, and the system would kill it soon. Raise train.shards, give each more memory "
            f"(cluster.shard.memory), admit fewer ids (train.admission), or {forget}; "
            "the same command then goes on from the last checkpoint"
        )
    if share >= _FORGET_SHARE and may_forget:
        return Forget(seen.shard, f"{found}: it forgets ids by train.eviction")
    if share >= _FORGET_SHARE and not evicts:
        return Keep(
            f"{found}; training ends at {_GIVE_UP_SHARE:.0%}. train.eviction, which would make room, is not set"
        )
    return Keep()


@dataclass(frozen=True)
class MemorySeen:
    """A shard's memory, in bytes."""

    shard: int
    used: int
    limit: int
    forgot: bool = False  # it has evicted since it was crowded, and is crowded still


_WHY = {
    "crashed": "crashed",
    "preempted": "left with its node",
    "straggling": "no longer moved",
    "partitioned": "was cut off",
    "out_of_memory": "ran out of memory",
}


def _with_losses(past: Past, seen: Seen, now: float) -> Past:
    failed = {_failure(loss, seen) for loss in seen.lost if loss.why != "preempted"}
    if failed and (seen.workers == 0 or any(loss.role != "worker" for loss in seen.lost)):
        failed.add(_since_cut(seen))  # everything goes back to it
    if not failed:  # nodes come and go: no reason to grow slowly
        return past
    failures = Counter(past.failures)
    failures.update(failed)
    calm = now - past.lost_at >= _CALM_SECONDS
    wait = GROW_SECONDS if calm else min(2 * past.grow_seconds, _LONGEST_GROW_SECONDS)
    return replace(past, failures=failures, lost_at=now, grow_after=now + wait, grow_seconds=wait)


def _since_cut(seen: Seen) -> str:
    return f"the work after the cut at step {seen.cut:,}"


def _failure(loss: Loss, seen: Seen) -> str:
    """What counts as the same failure: the same place, or having come no further before there was one."""
    return loss.place or f"starting, with {seen.learned:,} rows learned,"


def _after_losses(rules: Rules, past: Past, seen: Seen) -> Decision:
    told = "; ".join(str(loss) for loss in seen.lost)
    for loss in seen.lost:
        place = _failure(loss, seen)
        if loss.why != "preempted" and past.failures[place] >= rules.crashes:
            return GiveUp(
                f"{place} failed {past.failures[place]} times with no progress between (cluster.crashes is "
                f"{rules.crashes}). The last time: {loss}"
            )
    if (over := _too_often(rules, past, seen, told)) is not None:
        return over
    if any(loss.role != "worker" for loss in seen.lost):
        return Restart(f"{told}: what it held is gone, so everything goes back to the last cut")
    if seen.workers == 0:
        return Restart(f"{told}: no worker is left, so everything goes back to the last cut")
    below = f", below train.workers.min {rules.min}" if seen.workers < rules.min else ""
    verb = "goes" if seen.workers == 1 else "go"
    return Resize(seen.workers, f"{told}: {_workers(seen.workers)} {verb} on{below}")


def _too_often(rules: Rules, past: Past, seen: Seen, told: str) -> GiveUp | None:
    again = past.failures.get(_since_cut(seen), 0)
    if again < _RESTARTS * rules.crashes:
        return None
    return GiveUp(
        f"{_since_cut(seen)} was begun {again} times and never came to another cut. The last time: {told}"
    )


def _begin(rules: Rules, past: Past, seen: Seen, now: float) -> tuple[Decision, Past]:
    most = _most(rules, seen)
    least = _at_most(rules.min, most)
    if seen.room >= least:
        wanted = _at_most(seen.room, most)
        reason = f"the cluster has room: begins with {_workers(wanted)}"
        begun = replace(past, waits_since=None, grow_after=max(past.grow_after, now + past.grow_seconds))
        return Resize(wanted, reason), begun
    since = now if past.waits_since is None else past.waits_since
    past = replace(past, waits_since=since)
    each = f" of {rules.each}{' each' if least > 1 else ''}" if rules.each else ""
    has = f" It has {seen.has}." if seen.has else ""
    missing = f"{_workers(least)}{each} must fit to begin, and the cluster has room for {seen.room}.{has}"
    if now - since >= rules.room_seconds:
        return GiveUp(
            f"{missing} Waited {now - since:,.0f} s for more. Add nodes, or lower train.workers.min, "
            "cluster.worker.cpus or cluster.worker.memory"
        ), past
    return Keep(f"waits for room: {missing}"), past


def _most(rules: Rules, seen: Seen) -> int | None:
    """How many workers there may be; None: any number."""
    bounds = [bound for bound in (rules.max, seen.asked) if bound is not None]
    return min(bounds) if bounds else None


def _at_most(count: int, most: int | None) -> int:
    return count if most is None else min(count, most)


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"
