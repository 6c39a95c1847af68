"""Each unit is finished exactly once, whatever happens to the workers."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from clickline.training.cluster.leases import PATIENCE_SECONDS, Leases, WorkLease, WorkUnit


def units(count: int) -> list[WorkUnit]:
    return [WorkUnit(0, number) for number in range(count)]


def granted(leases: Leases, worker: str, now: float = 0.0) -> WorkLease:
    lease = leases.grant(worker, now)
    assert lease is not None
    return lease


def test_units_are_granted_in_order_with_increasing_tokens() -> None:
    leases = Leases(units(3), token=7)
    found = [granted(leases, worker) for worker in ("a", "b", "a")]
    assert [(lease.unit.number, lease.token, lease.start_batch) for lease in found] == [
        (0, 7, 0),
        (1, 8, 0),
        (2, 9, 0),
    ]
    assert leases.grant("b", 0.0) is None
    assert (leases.todo, len(leases.open), leases.done) == (0, 3, 0)


def test_unit_of_a_lost_worker_is_granted_next_from_its_last_batch() -> None:
    leases = Leases(units(3))
    lost, kept = granted(leases, "a"), granted(leases, "b")
    assert leases.progress(lost.token, 5)
    assert [unit.number for unit in leases.release("a")] == [0]
    again = granted(leases, "b")
    assert (again.unit.number, again.start_batch) == (0, 5)
    assert not leases.progress(lost.token, 9)
    assert not leases.finish(lost.token, 1.0), "it was given to another worker meanwhile"
    assert leases.finish(again.token, 1.0)
    assert leases.finish(kept.token, 1.0)
    assert leases.done == 2


def test_fence_token_is_above_earlier_leases_and_below_the_next() -> None:
    leases = Leases(units(2))
    lost = granted(leases, "a")
    leases.release("a")
    fence = leases.fence()
    again = granted(leases, "b")
    assert lost.token < fence < again.token < leases.fence()
    assert not leases.finish(fence, 1.0), "it has no owner"
    assert leases.finish(again.token, 1.0)
    later = Leases.from_json(units(2), json.loads(json.dumps(leases.to_json())))
    assert granted(later, "c").token > again.token + 1, "a checkpoint includes fences"


def test_next_unit_can_be_prefetched() -> None:
    leases = Leases(units(3))
    first = granted(leases, "a")
    coming = leases.next_unit(set())
    assert coming is not None
    other = leases.next_unit({coming.number})
    assert other is not None
    assert other != coming, "another one makes ready for that"
    granted_b = leases.grant("b", 0.0, other.number)
    assert granted_b is not None
    assert granted_b.unit == other, "a worker gets the unit that it has prefetched"
    assert leases.next_unit({coming.number}) is None, "what others have is not to be read"
    leases.release("a")
    assert leases.next_unit(set()) == first.unit
    unready = leases.grant("c", 0.0, other.number)
    assert unready is not None
    assert unready.unit == first.unit, "what it has read is not to do any more"


def test_late_progress_report_does_not_rewind_a_lease() -> None:
    leases = Leases(units(1))
    lease = granted(leases, "a")
    leases.progress(lease.token, 4)
    leases.progress(lease.token, 3)
    leases.release("a")
    assert granted(leases, "b").start_batch == 4


def test_straggler_loses_its_unit_only_when_the_queue_is_empty() -> None:
    leases = Leases(units(3))
    slow, quick = granted(leases, "slow", 0.0), granted(leases, "quick", 0.0)
    leases.progress(slow.token, 2)
    assert leases.finish(quick.token, 20.0)
    assert leases.stragglers(60.0) == [], "three times the 20 s that a unit takes"
    assert [lease.token for lease in leases.stragglers(60.1)] == [slow.token]
    third = granted(leases, "quick", 70.0)
    assert third.unit.number == 2
    assert leases.finish(third.token, 90.0)
    taken = granted(leases, "quick", 90.0)
    assert (taken.unit.number, taken.start_batch, taken.taken_from) == (0, 2, "slow")
    assert not leases.finish(slow.token, 91.0)
    assert leases.release("slow") == []
    assert leases.finish(taken.token, 92.0)
    assert leases.all_done


def test_no_lease_is_a_straggler_before_the_minimum_time() -> None:
    leases = Leases(units(2))
    granted(leases, "slow", 0.0)
    leases.finish(granted(leases, "quick", 0.0).token, 0.1)
    assert leases.stragglers(30.0) == []
    assert len(leases.stragglers(30.1)) == 1


def test_partial_units_do_not_count_for_the_median_time() -> None:
    leases = Leases(units(3))
    whole, begun = granted(leases, "a", 0.0), granted(leases, "b", 0.0)
    leases.progress(begun.token, 9)
    leases.release("b")
    rest = granted(leases, "b", 0.0)
    leases.finish(rest.token, 0.1)
    leases.finish(whole.token, 100.0)
    granted(leases, "a", 100.0)
    assert leases.stragglers(399.0) == []
    assert len(leases.stragglers(401.0)) == 1


def test_straggler_does_not_get_its_own_unit_again() -> None:
    leases = Leases(units(1))
    granted(leases, "a", 0.0)
    assert leases.grant("a", 100.0) is None


def test_checkpoint_restores_finished_and_started_units() -> None:
    leases = Leases(units(4))
    first, second = granted(leases, "a"), granted(leases, "b")
    leases.finish(first.token, 1.0)
    leases.progress(second.token, 3)
    third = granted(leases, "a")
    leases.progress(third.token, 2)
    leases.release("a")
    restored = Leases.from_json(units(4), json.loads(json.dumps(leases.to_json())), token=2)
    assert restored.next_token == leases.next_token == 4, "tokens rise over a restore"
    assert (restored.todo, restored.open, restored.done) == (3, (), 1)
    found = [granted(restored, "c") for _ in range(3)]
    assert [(lease.unit.number, lease.start_batch) for lease in found] == [(1, 3), (2, 2), (3, 0)]


def test_leases_granted_after_the_checkpoint_stay_fenced() -> None:
    leases = Leases(units(2))
    checkpoint = leases.to_json()
    late = granted(leases, "a")
    restored = Leases.from_json(units(2), checkpoint, token=leases.next_token)
    granted(restored, "b")
    assert not restored.finish(late.token, 1.0)


def test_an_epoch_without_units_is_done() -> None:
    leases = Leases([])
    assert leases.all_done
    assert leases.grant("a", 0.0) is None


class AnyStory(RuleBasedStateMachine):
    """Grants, losses, stragglers, late words, cuts and restores, in any order."""

    WORKERS = st.sampled_from(["a", "b", "c"])

    @initialize(count=st.integers(0, 5))
    def begin(self, count: int) -> None:
        self.units = units(count)
        self.leases = Leases(self.units)
        self.checkpoint = (self.leases.to_json(), frozenset[int]())
        self.granted: list[WorkLease] = []
        self.owner: dict[int, int] = {}  # the newest token of each unit
        self.finished: list[int] = []
        self.now = 0.0

    @rule(worker=WORKERS)
    def grant(self, worker: str) -> None:
        lease = self.leases.grant(worker, self.now)
        if lease is None:
            return
        assert all(lease.token > before.token for before in self.granted)
        assert lease.unit.number not in self.finished
        self.granted.append(lease)
        self.owner[lease.unit.number] = lease.token

    @rule(seconds=st.floats(0.0, 2 * PATIENCE_SECONDS))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(worker=WORKERS)
    def lose(self, worker: str) -> None:
        for unit in self.leases.release(worker):
            assert unit.number not in self.finished
            self.owner.pop(unit.number)

    @precondition(lambda self: self.granted)
    @rule(data=st.data(), batches=st.integers(0, 9))
    def progress(self, data: st.DataObject, batches: int) -> None:
        lease = data.draw(st.sampled_from(self.granted))
        owns = self.owner.get(lease.unit.number) == lease.token
        assert self.leases.progress(lease.token, batches) == owns

    @precondition(lambda self: self.granted)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.granted))
        owns = self.owner.get(lease.unit.number) == lease.token
        assert self.leases.finish(lease.token, self.now) == owns, "an old token finishes nothing"
        if owns:
            del self.owner[lease.unit.number]
            self.finished.append(lease.unit.number)

    @rule()
    def make_a_cut(self) -> None:
        self.checkpoint = (json.loads(json.dumps(self.leases.to_json())), frozenset(self.finished))

    @rule()
    def go_back_to_the_cut(self) -> None:
        document, done = self.checkpoint
        self.leases = Leases.from_json(self.units, document, self.leases.next_token)
        self.finished = [number for number in self.finished if number in done]
        self.owner = {}

    @invariant()
    def every_unit_is_in_one_place(self) -> None:
        assert len(self.finished) == len(set(self.finished)) == self.leases.done
        assert self.leases.todo + len(self.leases.open) + self.leases.done == len(self.units)
        assert {lease.token for lease in self.leases.open} == set(self.owner.values())

    def teardown(self) -> None:
        """From anywhere the epoch comes to its end."""
        for worker in ("a", "b", "c"):
            self.leases.release(worker)
        while (lease := self.leases.grant("d", self.now)) is not None:
            assert self.leases.finish(lease.token, self.now)
            self.finished.append(lease.unit.number)
        assert sorted(self.finished) == [unit.number for unit in self.units]
        assert self.leases.all_done


AnyStory.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestAnyStory = AnyStory.TestCase


@given(
    steps=st.lists(st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 6)), max_size=30),
)
def test_resume_point_of_a_unit_never_moves_back(steps: list[tuple[str, int]]) -> None:
    """One unit whose lease is reported and lost again and again."""
    leases = Leases(units(1))
    furthest = 0
    for worker, batches in steps:
        lease = granted(leases, worker)
        assert lease.start_batch == furthest
        leases.progress(lease.token, batches)
        furthest = max(furthest, batches)
        leases.release(worker)
