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


class Policy:
    """Decisions one after the other, each with the memory of those before."""

    def __init__(self, rules: PolicyRules | None = None) -> None:
        self.rules = rules or PolicyRules(max=4)
        self.state = PolicyState()

    def observe(self, now: float, observed: Observation) -> Decision:
        decision, self.state = decide(self.rules, self.state, observed, now)
        return decision


def worker(
    number: int = 1, reason: LossReason = "crashed", location: str = "step 120", error: str = ""
) -> LostProcess:
    return LostProcess("worker", f"worker-{number}", reason, location, error)


# ── losses ─────────────────────────────────────────────────────────────────────────────────────


def test_crashed_worker_is_a_resize() -> None:
    decision = Policy().observe(
        0.0, Observation(2, 1, (worker(error="Traceback …\nValueError: no such slot"),))
    )
    assert decision == Resize(
        2, "worker-1 crashed at step 120 (ValueError: no such slot): 2 workers continue"
    )


def test_two_lost_workers_leave_one_below_min() -> None:
    decision = Policy(PolicyRules(min=2)).observe(
        0.0, Observation(1, 0, (worker(1), worker(2, "partitioned")))
    )
    assert decision == Resize(
        1,
        "worker-1 crashed at step 120; worker-2 became unreachable at step 120: "
        "1 worker continues, below train.workers.min 2",
    )


def test_last_worker_lost_is_a_restart() -> None:
    decision = Policy().observe(0.0, Observation(0, 4, (worker(),)))
    assert decision == Restart(
        "worker-1 crashed at step 120: no worker is left, so training rolls back to the last checkpoint"
    )


@pytest.mark.parametrize("role", ["shard", "network"])
def test_lost_stateful_actor_is_a_restart(role: str) -> None:
    loss = LostProcess("shard" if role == "shard" else "network", f"{role}-0", "out_of_memory", "step 7")
    decision = Policy().observe(0.0, Observation(3, 1, (loss,)))
    assert decision == Restart(
        f"{role}-0 ran out of memory at step 7: its state is gone, so training rolls back to the last checkpoint"
    )


def test_embedding_server_and_worker_lost_together_is_a_restart() -> None:
    losses = (worker(reason="preempted"), LostProcess("shard", "shard-1", "preempted"))
    assert isinstance(Policy().observe(0.0, Observation(1, 0, losses)), Restart)


# ── the crash budget ───────────────────────────────────────────────────────────────────────────


def test_third_failure_at_the_same_location_gives_up() -> None:
    policy = Policy(PolicyRules(max_failures=3))
    for now in (0.0, 1.0):
        assert isinstance(policy.observe(now, Observation(3, 0, (worker(),))), Resize)
    assert policy.observe(2.0, Observation(1, 0, (worker(3, error="ZeroDivisionError"),))) == GiveUp(
        "step 120 failed 3 times without progress in between (cluster.max_failures is 3). "
        "The last failure: worker-3 crashed at step 120 (ZeroDivisionError)"
    )


def test_location_that_kills_all_workers_does_not_restart_forever() -> None:
    policy = Policy(PolicyRules(max_failures=2))
    assert isinstance(policy.observe(0.0, Observation(0, 2, (worker(),))), Restart)
    assert isinstance(policy.observe(1.0, Observation(0, 2)), Resize)
    assert isinstance(policy.observe(2.0, Observation(0, 2, (worker(),))), GiveUp)


def test_single_failures_at_many_locations_do_not_give_up() -> None:
    policy = Policy(PolicyRules(max_failures=2))
    for step in range(20):
        decision = policy.observe(float(step), Observation(2, 0, (worker(location=f"step {step}"),)))
        assert isinstance(decision, Resize)


def test_simultaneous_losses_at_one_location_count_once() -> None:
    losses = (worker(1), worker(2), worker(3), LostProcess("shard", "shard-0", "crashed", "step 120"))
    assert isinstance(Policy(PolicyRules(max_failures=2)).observe(0.0, Observation(1, 0, losses)), Restart)


def test_preemptions_never_count_as_failures() -> None:
    policy = Policy(PolicyRules(max_failures=1))
    for now in range(10):
        assert isinstance(
            policy.observe(float(now), Observation(1, 0, (worker(reason="preempted"),))), Resize
        )
    assert isinstance(policy.observe(11.0, Observation(1, 0, (worker(),))), GiveUp), "that one was a crash"


def test_workers_that_die_while_starting_give_up() -> None:
    policy = Policy(PolicyRules(max_failures=2))
    assert isinstance(policy.observe(0.0, Observation(0, 2, (worker(location=""),))), Restart)
    decision = policy.observe(1.0, Observation(0, 2, (worker(location="", error="ImportError: my_model"),)))
    assert decision == GiveUp(
        "starting, with 0 rows trained, failed 2 times without progress in between (cluster.max_failures is 2). "
        "The last failure: worker-1 crashed (ImportError: my_model)"
    )


def test_new_workers_that_die_while_others_progress_do_not_give_up() -> None:
    policy = Policy(PolicyRules(max_failures=2))
    for trained_rows in range(5):
        observed = Observation(2, 1, (worker(location=""),), trained_rows=trained_rows)
        assert isinstance(policy.observe(0.0, observed), Resize)


# ── beginning ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("rules", "requested", "free_slots", "workers"),
    [
        (PolicyRules(min=2, max=4), None, 3, 3),
        (PolicyRules(min=2, max=4), None, 9, 4),
        (PolicyRules(min=2), None, 9, 9),
        (PolicyRules(min=2, max=4), 1, 9, 1),
        (PolicyRules(min=2, max=4), 6, 9, 4),
    ],
)
def test_training_starts_as_soon_as_min_workers_fit(
    rules: PolicyRules, requested: int | None, free_slots: int, workers: int
) -> None:
    decision = Policy(rules).observe(0.0, Observation(0, free_slots, requested=requested))
    word = "worker" if workers == 1 else "workers"
    assert decision == Resize(workers, f"the cluster has capacity: starting with {workers} {word}")


def test_waits_for_capacity_until_a_node_joins() -> None:
    policy = Policy(PolicyRules(min=2, worker_size="1 CPU"))
    observed = Observation(0, 1, capacity="4 CPUs, 1 of them free")
    assert policy.observe(0.0, observed) == Keep(
        "waiting for capacity: 2 workers of 1 CPU each must fit before training starts, and the cluster has capacity for 1. "
        "It has 4 CPUs, 1 of them free."
    )
    assert isinstance(policy.observe(599.0, observed), Keep)
    assert isinstance(policy.observe(599.5, Observation(0, 2)), Resize)


def test_gives_up_after_ten_minutes_without_capacity() -> None:
    policy = Policy(PolicyRules(min=1, worker_size="8 CPUs and 2.0 GiB"))
    observed = Observation(0, 0, capacity="4 CPUs, all of them free")
    policy.observe(50.0, observed)
    assert policy.observe(650.0, observed) == GiveUp(
        "1 worker of 8 CPUs and 2.0 GiB must fit before training starts, and the cluster has capacity for 0. "
        "It has 4 CPUs, all of them free. "
        "Waited 600 s for capacity. Add nodes, or lower train.workers.min, cluster.worker.cpus or "
        "cluster.worker.memory"
    )


def test_waiting_time_is_reset_when_capacity_arrives() -> None:
    policy = Policy(PolicyRules(min=1))
    policy.observe(0.0, Observation(0, 0))
    policy.observe(500.0, Observation(0, 1))
    policy.observe(501.0, Observation(1, 0))
    policy.observe(502.0, Observation(0, 0, (worker(),)))
    assert isinstance(policy.observe(700.0, Observation(0, 0)), Keep)
    assert isinstance(policy.observe(1299.0, Observation(0, 0)), Keep)
    assert isinstance(policy.observe(1300.0, Observation(0, 0)), GiveUp)


# ── growing and shrinking ──────────────────────────────────────────────────────────────────────


def test_new_node_is_a_resize() -> None:
    decision = Policy().observe(0.0, Observation(2, 5))
    assert decision == Resize(4, "the cluster has capacity: from 2 to 4 workers")


def test_no_change_is_keep() -> None:
    assert Policy(PolicyRules(max=2)).observe(0.0, Observation(2, 5)) == Keep()
    assert Policy(PolicyRules()).observe(0.0, Observation(2, 0)) == Keep()


def test_nodes_join_one_by_one_every_second() -> None:
    policy = Policy(PolicyRules())
    workers = 1
    resized = []
    for now in range(25):
        decision = policy.observe(float(now), Observation(workers, now + 2 - workers))
        if isinstance(decision, Resize):
            resized.append(now)
            workers = decision.workers
    assert resized == [0, 10, 20]


def test_no_growth_right_after_the_start() -> None:
    policy = Policy(PolicyRules())
    assert policy.observe(0.0, Observation(0, 1)) == Resize(
        1, "the cluster has capacity: starting with 1 worker"
    )
    assert isinstance(policy.observe(9.0, Observation(1, 1)), Keep)
    assert isinstance(policy.observe(10.0, Observation(1, 1)), Resize)


def test_lost_worker_is_replaced_ten_seconds_later() -> None:
    policy = Policy(PolicyRules(max=3))
    policy.observe(100.0, Observation(2, 1, (worker(),)))
    assert isinstance(policy.observe(109.0, Observation(2, 1)), Keep)
    assert policy.observe(110.0, Observation(2, 1)) == Resize(
        3, "the cluster has capacity: from 2 to 3 workers"
    )


def test_a_node_that_left_is_replaced_at_once() -> None:
    policy = Policy(PolicyRules(max=3))
    policy.observe(100.0, Observation(2, 0, (worker(reason="preempted"),)))
    assert isinstance(policy.observe(101.0, Observation(2, 1)), Resize)


def test_workers_that_keep_dying_are_replaced_with_backoff() -> None:
    policy = Policy(PolicyRules(max=3, max_failures=100))
    waits = []
    now = 0.0
    for _ in range(5):
        policy.observe(now, Observation(2, 1, (worker(),)))
        lost = now
        while isinstance(policy.observe(now, Observation(2, 1)), Keep):
            now += 1.0
        waits.append(now - lost)
    assert waits == [10.0, 20.0, 40.0, 60.0, 10.0], "60 s without a loss are calm enough"


def test_scale_request_beyond_capacity() -> None:
    policy = Policy(PolicyRules())
    assert policy.observe(0.0, Observation(2, 1, requested=5)) == Resize(
        3, "the cluster has capacity: from 2 to 3 workers; `clickline scale` requests 5"
    )
    assert policy.observe(20.0, Observation(3, 0, requested=5)) == Keep()


def test_scale_request_below_the_running_workers() -> None:
    decision = Policy(PolicyRules(min=2)).observe(0.0, Observation(3, 4, requested=1))
    assert decision == Resize(1, "`clickline scale` requests 1 worker, and 3 run")


def test_scale_down_right_after_growth() -> None:
    policy = Policy(PolicyRules())
    policy.observe(0.0, Observation(1, 2))
    assert isinstance(policy.observe(1.0, Observation(3, 0, requested=2)), Resize), (
        "growth waits, shrinking does not"
    )


def test_scale_request_beyond_max() -> None:
    assert Policy(PolicyRules(max=2)).observe(0.0, Observation(2, 8, requested=5)) == Keep()


# ── the memory of a shard ──────────────────────────────────────────────────────────────────────


def test_enough_memory_is_keep() -> None:
    assert decide_memory(MemoryUse(0, 84 * GIB, 100 * GIB), evicts=True) == Keep()


def test_nearly_full_embedding_server_evicts() -> None:
    assert decide_memory(MemoryUse(1, 85 * GIB, 100 * GIB), evicts=True) == Evict(
        1, "embedding server 1 uses 85.0 GiB of 100.0 GiB (85%): it evicts ids by train.eviction"
    )


def test_full_embedding_server_evicts_first() -> None:
    decision = decide_memory(MemoryUse(1, 99 * GIB, 100 * GIB), evicts=True)
    assert isinstance(decision, Evict)


def test_nearly_full_embedding_server_without_eviction_warns() -> None:
    assert decide_memory(MemoryUse(1, 90 * GIB, 100 * GIB), evicts=False) == Keep(
        "embedding server 1 uses 90.0 GiB of 100.0 GiB (90%); training ends at 95%. "
        "Set train.eviction to evict old ids"
    )


@pytest.mark.parametrize(
    ("evicts", "last"),
    [
        (True, "or evict more ids (train.eviction)"),
        (False, "or set train.eviction to evict old ids"),
    ],
)
def test_full_embedding_server_gives_up(evicts: bool, last: str) -> None:
    assert decide_memory(MemoryUse(2, 19 * GIB, 20 * GIB, evicted=True), evicts=evicts) == GiveUp(
        "embedding server 2 uses 19.0 GiB of 20.0 GiB (95%), and the kernel would soon kill it. Raise train.embedding_servers, give "
        f"each more memory (cluster.embedding_server.memory), admit fewer ids (train.admission), {last}; the same command "
        "then resumes from the last checkpoint"
    )


def test_training_that_never_reaches_another_checkpoint_gives_up() -> None:
    policy = Policy(PolicyRules(max_failures=2))
    for again in range(5):
        lost = LostProcess("shard", "shard-0", "crashed", f"step {again}")
        assert isinstance(
            policy.observe(float(again), Observation(2, 0, lost=(lost,), checkpoint_step=7)), Restart
        )
    lost = LostProcess("shard", "shard-0", "crashed", "step 99")
    decision = policy.observe(9.0, Observation(2, 0, lost=(lost,), checkpoint_step=7))
    assert isinstance(decision, GiveUp)
    assert "training after the checkpoint of step 7 was started 6 times" in decision.reason
    lost = LostProcess("shard", "shard-0", "crashed", "step 100")
    assert isinstance(policy.observe(10.0, Observation(2, 0, lost=(lost,), checkpoint_step=8)), Restart), (
        "another checkpoint, another budget"
    )


def test_unexplained_restarts_spend_the_same_budget() -> None:
    policy = Policy(PolicyRules(max_failures=2))
    lost = LostProcess("shard", "shard-0", "crashed")
    assert isinstance(policy.observe(0.0, Observation(2, 0, lost=(lost,), checkpoint_step=7)), Restart)
    for again in range(1, 5):
        decision = policy.observe(
            float(again), Observation(0, 0, restart="the head is gone", checkpoint_step=7)
        )
        assert decision == Restart("the head is gone")
    decision = policy.observe(9.0, Observation(0, 0, restart="the head is gone", checkpoint_step=7))
    assert decision == GiveUp(
        "training after the checkpoint of step 7 was started 6 times and never reached another checkpoint. "
        "The last failure: the head is gone"
    )
    assert policy.observe(9.0, Observation(0, 0, restart="the head is gone", checkpoint_step=8)) == Restart(
        "the head is gone"
    )
