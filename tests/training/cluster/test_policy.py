"""What is decided, at which moment, and in which words."""

from __future__ import annotations

import pytest

from clickline.training.cluster.policy import (
    Decision,
    Evict,
    GiveUp,
    Keep,
    LossReason,
    LostProcess,
    MemoryUse,
    Observation,
    PolicyRules,
    PolicyState,
    Resize,
    Restart,
    decide,
    decide_memory,
)

GIB = 2**30


class Story:
    """Decisions one after the other, each with the memory of those before."""

    def __init__(self, rules: PolicyRules | None = None) -> None:
        self.rules = rules or PolicyRules(max=4)
        self.state = PolicyState()

    def sees(self, now: float, observed: Observation) -> Decision:
        decision, self.state = decide(self.rules, self.state, observed, now)
        return decision


def worker(
    number: int = 1, reason: LossReason = "crashed", location: str = "step 120", error: str = ""
) -> LostProcess:
    return LostProcess("worker", f"worker-{number}", reason, location, error)


# ── losses ─────────────────────────────────────────────────────────────────────────────────────


def test_a_worker_crashes_while_others_live() -> None:
    decision = Story().sees(0.0, Observation(2, 1, (worker(error="Traceback …\nValueError: no such slot"),)))
    assert decision == Resize(2, "worker-1 crashed at step 120 (ValueError: no such slot): 2 workers go on")


def test_two_workers_go_at_once_and_one_is_left_below_min() -> None:
    decision = Story(PolicyRules(min=2)).sees(0.0, Observation(1, 0, (worker(1), worker(2, "partitioned"))))
    assert decision == Resize(
        1,
        "worker-1 crashed at step 120; worker-2 was cut off at step 120: "
        "1 worker goes on, below train.workers.min 2",
    )


def test_the_last_worker_goes() -> None:
    decision = Story().sees(0.0, Observation(0, 4, (worker(),)))
    assert decision == Restart(
        "worker-1 crashed at step 120: no worker is left, so everything goes back to the last cut"
    )


@pytest.mark.parametrize("role", ["shard", "network"])
def test_a_keeper_of_state_goes_while_all_workers_live(role: str) -> None:
    loss = LostProcess("shard" if role == "shard" else "network", f"{role}-0", "out_of_memory", "step 7")
    decision = Story().sees(0.0, Observation(3, 1, (loss,)))
    assert decision == Restart(
        f"{role}-0 ran out of memory at step 7: what it held is gone, so everything goes back to the last cut"
    )


def test_a_shard_goes_together_with_a_worker() -> None:
    losses = (worker(reason="preempted"), LostProcess("shard", "shard-1", "preempted"))
    assert isinstance(Story().sees(0.0, Observation(1, 0, losses)), Restart)


# ── the crash budget ───────────────────────────────────────────────────────────────────────────


def test_the_same_place_fails_a_third_time() -> None:
    story = Story(PolicyRules(max_failures=3))
    for now in (0.0, 1.0):
        assert isinstance(story.sees(now, Observation(3, 0, (worker(),))), Resize)
    assert story.sees(2.0, Observation(1, 0, (worker(3, error="ZeroDivisionError"),))) == GiveUp(
        "step 120 failed 3 times with no progress between (cluster.max_failures is 3). "
        "The last time: worker-3 crashed at step 120 (ZeroDivisionError)"
    )


def test_a_place_that_kills_all_workers_does_not_restart_for_ever() -> None:
    story = Story(PolicyRules(max_failures=2))
    assert isinstance(story.sees(0.0, Observation(0, 2, (worker(),))), Restart)
    assert isinstance(story.sees(1.0, Observation(0, 2)), Resize)
    assert isinstance(story.sees(2.0, Observation(0, 2, (worker(),))), GiveUp)


def test_many_places_fail_once_each() -> None:
    story = Story(PolicyRules(max_failures=2))
    for step in range(20):
        decision = story.sees(float(step), Observation(2, 0, (worker(location=f"step {step}"),)))
        assert isinstance(decision, Resize)


def test_all_processes_of_a_node_die_at_one_place_at_once() -> None:
    losses = (worker(1), worker(2), worker(3), LostProcess("shard", "shard-0", "crashed", "step 120"))
    assert isinstance(Story(PolicyRules(max_failures=2)).sees(0.0, Observation(1, 0, losses)), Restart)


def test_nodes_leave_at_the_same_place_again_and_again() -> None:
    story = Story(PolicyRules(max_failures=1))
    for now in range(10):
        assert isinstance(story.sees(float(now), Observation(1, 0, (worker(reason="preempted"),))), Resize)
    assert isinstance(story.sees(11.0, Observation(1, 0, (worker(),))), GiveUp), "that one was a crash"


def test_workers_die_before_they_learn_anything() -> None:
    story = Story(PolicyRules(max_failures=2))
    assert isinstance(story.sees(0.0, Observation(0, 2, (worker(location=""),))), Restart)
    decision = story.sees(1.0, Observation(0, 2, (worker(location="", error="ImportError: my_model"),)))
    assert decision == GiveUp(
        "starting, with 0 rows learned, failed 2 times with no progress between (cluster.max_failures is 2). "
        "The last time: worker-1 crashed (ImportError: my_model)"
    )


def test_new_workers_die_while_the_others_get_on() -> None:
    story = Story(PolicyRules(max_failures=2))
    for trained_rows in range(5):
        observed = Observation(2, 1, (worker(location=""),), trained_rows=trained_rows)
        assert isinstance(story.sees(0.0, observed), Resize)


# ── beginning ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("rules", "asked", "room", "workers"),
    [
        (PolicyRules(min=2, max=4), None, 3, 3),
        (PolicyRules(min=2, max=4), None, 9, 4),
        (PolicyRules(min=2), None, 9, 9),
        (PolicyRules(min=2, max=4), 1, 9, 1),
        (PolicyRules(min=2, max=4), 6, 9, 4),
    ],
)
def test_it_begins_as_soon_as_min_fit(
    rules: PolicyRules, requested: int | None, free_slots: int, workers: int
) -> None:
    decision = Story(rules).sees(0.0, Observation(0, free_slots, requested=requested))
    word = "worker" if workers == 1 else "workers"
    assert decision == Resize(workers, f"the cluster has room: begins with {workers} {word}")


def test_there_is_no_room_for_min_until_a_node_joins() -> None:
    story = Story(PolicyRules(min=2, worker_size="1 CPU"))
    observed = Observation(0, 1, capacity="4 CPUs, 1 of them free")
    assert story.sees(0.0, observed) == Keep(
        "waits for room: 2 workers of 1 CPU each must fit to begin, and the cluster has room for 1. "
        "It has 4 CPUs, 1 of them free."
    )
    assert isinstance(story.sees(599.0, observed), Keep)
    assert isinstance(story.sees(599.5, Observation(0, 2)), Resize)


def test_there_is_no_room_for_min_for_ten_minutes() -> None:
    story = Story(PolicyRules(min=1, worker_size="8 CPUs and 2.0 GiB"))
    observed = Observation(0, 0, capacity="4 CPUs, all of them free")
    story.sees(50.0, observed)
    assert story.sees(650.0, observed) == GiveUp(
        "1 worker of 8 CPUs and 2.0 GiB must fit to begin, and the cluster has room for 0. "
        "It has 4 CPUs, all of them free. "
        "Waited 600 s for more. Add nodes, or lower train.workers.min, cluster.worker.cpus or "
        "cluster.worker.memory"
    )


def test_time_spent_waiting_for_room_is_forgotten_when_it_came() -> None:
    story = Story(PolicyRules(min=1))
    story.sees(0.0, Observation(0, 0))
    story.sees(500.0, Observation(0, 1))
    story.sees(501.0, Observation(1, 0))
    story.sees(502.0, Observation(0, 0, (worker(),)))
    assert isinstance(story.sees(700.0, Observation(0, 0)), Keep)
    assert isinstance(story.sees(1299.0, Observation(0, 0)), Keep)
    assert isinstance(story.sees(1300.0, Observation(0, 0)), GiveUp)


# ── growing and shrinking ──────────────────────────────────────────────────────────────────────


def test_a_node_joins() -> None:
    decision = Story().sees(0.0, Observation(2, 5))
    assert decision == Resize(4, "the cluster has room: from 2 to 4 workers")


def test_nothing_is_to_be_done() -> None:
    assert Story(PolicyRules(max=2)).sees(0.0, Observation(2, 5)) == Keep()
    assert Story(PolicyRules()).sees(0.0, Observation(2, 0)) == Keep()


def test_nodes_join_one_by_one_every_second() -> None:
    story = Story(PolicyRules())
    workers = 1
    resized = []
    for now in range(25):
        decision = story.sees(float(now), Observation(workers, now + 2 - workers))
        if isinstance(decision, Resize):
            resized.append(now)
            workers = decision.workers
    assert resized == [0, 10, 20]


def test_it_does_not_grow_right_after_it_began() -> None:
    story = Story(PolicyRules())
    assert story.sees(0.0, Observation(0, 1)) == Resize(1, "the cluster has room: begins with 1 worker")
    assert isinstance(story.sees(9.0, Observation(1, 1)), Keep)
    assert isinstance(story.sees(10.0, Observation(1, 1)), Resize)


def test_a_lost_worker_is_replaced_ten_seconds_later() -> None:
    story = Story(PolicyRules(max=3))
    story.sees(100.0, Observation(2, 1, (worker(),)))
    assert isinstance(story.sees(109.0, Observation(2, 1)), Keep)
    assert story.sees(110.0, Observation(2, 1)) == Resize(3, "the cluster has room: from 2 to 3 workers")


def test_a_node_that_left_is_replaced_at_once() -> None:
    story = Story(PolicyRules(max=3))
    story.sees(100.0, Observation(2, 0, (worker(reason="preempted"),)))
    assert isinstance(story.sees(101.0, Observation(2, 1)), Resize)


def test_workers_that_die_again_and_again_are_replaced_ever_more_slowly() -> None:
    story = Story(PolicyRules(max=3, max_failures=100))
    waits = []
    now = 0.0
    for _ in range(5):
        story.sees(now, Observation(2, 1, (worker(),)))
        lost = now
        while isinstance(story.sees(now, Observation(2, 1)), Keep):
            now += 1.0
        waits.append(now - lost)
    assert waits == [10.0, 20.0, 40.0, 60.0, 10.0], "60 s without a loss are calm enough"


def test_more_workers_are_asked_for_than_there_is_room() -> None:
    story = Story(PolicyRules())
    assert story.sees(0.0, Observation(2, 1, requested=5)) == Resize(
        3, "the cluster has room: from 2 to 3 workers; `clickline scale` asks for 5"
    )
    assert story.sees(20.0, Observation(3, 0, requested=5)) == Keep()


def test_fewer_workers_are_asked_for_than_run() -> None:
    decision = Story(PolicyRules(min=2)).sees(0.0, Observation(3, 4, requested=1))
    assert decision == Resize(1, "`clickline scale` asks for 1 worker, and 3 run")


def test_fewer_are_asked_for_right_after_it_grew() -> None:
    story = Story(PolicyRules())
    story.sees(0.0, Observation(1, 2))
    assert isinstance(story.sees(1.0, Observation(3, 0, requested=2)), Resize), (
        "growth waits, shrinking does not"
    )


def test_more_are_asked_for_than_max_allows() -> None:
    assert Story(PolicyRules(max=2)).sees(0.0, Observation(2, 8, requested=5)) == Keep()


# ── the memory of a shard ──────────────────────────────────────────────────────────────────────


def test_a_shard_has_memory_left() -> None:
    assert decide_memory(MemoryUse(0, 84 * GIB, 100 * GIB), evicts=True) == Keep()


def test_a_shard_is_nearly_full_and_may_forget() -> None:
    assert decide_memory(MemoryUse(1, 85 * GIB, 100 * GIB), evicts=True) == Evict(
        1, "shard 1 uses 85.0 GiB of 100.0 GiB (85%): it forgets ids by train.eviction"
    )


def test_a_shard_that_filled_up_at_once_forgets_first() -> None:
    decision = decide_memory(MemoryUse(1, 99 * GIB, 100 * GIB), evicts=True)
    assert isinstance(decision, Evict)


def test_a_shard_is_nearly_full_and_may_not_forget() -> None:
    assert decide_memory(MemoryUse(1, 90 * GIB, 100 * GIB), evicts=False) == Keep(
        "shard 1 uses 90.0 GiB of 100.0 GiB (90%); training ends at 95%. "
        "train.eviction, which would make room, is not set"
    )


@pytest.mark.parametrize(
    ("evicts", "last"),
    [
        (True, "or forget more ids (train.eviction)"),
        (False, "or set train.eviction to forget old ids"),
    ],
)
def test_a_shard_is_full(evicts: bool, last: str) -> None:
    assert decide_memory(MemoryUse(2, 19 * GIB, 20 * GIB, evicted=True), evicts=evicts) == GiveUp(
        "shard 2 uses 19.0 GiB of 20.0 GiB (95%), and the system would kill it soon. Raise train.embedding_servers, give "
        f"each more memory (cluster.embedding_server.memory), admit fewer ids (train.admission), {last}; the same command "
        "then goes on from the last checkpoint"
    )


def test_work_that_never_comes_to_another_cut_is_given_up() -> None:
    story = Story(PolicyRules(max_failures=2))
    for again in range(5):
        lost = LostProcess("shard", "shard-0", "crashed", f"step {again}")
        assert isinstance(
            story.sees(float(again), Observation(2, 0, lost=(lost,), checkpoint_step=7)), Restart
        )
    lost = LostProcess("shard", "shard-0", "crashed", "step 99")
    decision = story.sees(9.0, Observation(2, 0, lost=(lost,), checkpoint_step=7))
    assert isinstance(decision, GiveUp)
    assert "the work after the cut at step 7 was begun 6 times" in decision.reason
    lost = LostProcess("shard", "shard-0", "crashed", "step 100")
    assert isinstance(story.sees(10.0, Observation(2, 0, lost=(lost,), checkpoint_step=8)), Restart), (
        "another cut, another budget"
    )


def test_a_restart_that_no_loss_explains_spends_the_same_budget() -> None:
    story = Story(PolicyRules(max_failures=2))
    lost = LostProcess("shard", "shard-0", "crashed")
    assert isinstance(story.sees(0.0, Observation(2, 0, lost=(lost,), checkpoint_step=7)), Restart)
    for again in range(1, 5):
        decision = story.sees(float(again), Observation(0, 0, restart="the head is gone", checkpoint_step=7))
        assert decision == Restart("the head is gone")
    decision = story.sees(9.0, Observation(0, 0, restart="the head is gone", checkpoint_step=7))
    assert decision == GiveUp(
        "the work after the cut at step 7 was begun 6 times and never came to another cut. "
        "The last time: the head is gone"
    )
    assert story.sees(9.0, Observation(0, 0, restart="the head is gone", checkpoint_step=8)) == Restart(
        "the head is gone"
    )
