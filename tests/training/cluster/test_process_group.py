"""Workers sum their vectors as one group; one that dies or hangs is noticed, and the others form a new group."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from ipaddress import IPv4Address
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clickline.training.cluster.process_group import PeerLost, ProcessGroup, Rendezvous

HERE = "127.0.0.1"
SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def rendezvous() -> Iterator[Rendezvous]:
    one = Rendezvous(HERE)
    yield one
    one.close()


def join(rendezvous: str, generation: int, rank: int, size: int, timeout: float = 30.0) -> ProcessGroup:
    return ProcessGroup(rendezvous, generation, rank, size, address=HERE, timeout=timeout)


class Member:
    """A process that runs the functions sent to it over a pipe; a lost peer is an answer, not an end."""

    def __init__(self) -> None:
        self.pipe, other = SPAWN.Pipe()
        self.process = SPAWN.Process(target=obey, args=(other,), daemon=True)
        self.process.start()
        other.close()

    def tell(self, act: Callable[..., Any], *arguments: object) -> None:
        self.pipe.send((act, arguments))

    def answer(self, seconds: float = 60.0) -> Any:
        assert self.pipe.poll(seconds), "no answer"
        return self.pipe.recv()

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


def obey(pipe: Connection) -> None:
    state: dict[str, Any] = {}
    while True:
        try:
            act, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(act(state, *arguments))
        except PeerLost as error:
            pipe.send(("lost", str(error)))


@contextmanager
def members(count: int) -> Iterator[list[Member]]:
    all_of_them = [Member() for _ in range(count)]
    try:
        yield all_of_them
    finally:
        for member in all_of_them:
            member.process.kill()
            member.process.join()
            member.pipe.close()


# ── functions for members ──────────────────────────────────────────────────────────────────────


def held() -> tuple[int, ...]:
    """Open files and threads of this process."""
    return tuple(len(list(Path("/proc/self", kind).iterdir())) for kind in ("fd", "task"))


def form(state: dict[str, Any], *arguments: Any) -> str:
    state["group"] = join(*arguments)
    return "formed"


def sum_once(state: dict[str, Any], seed: int, size: int) -> bytes:
    vector = np.random.default_rng(seed).normal(size=size).astype(np.float32)
    state["group"].all_reduce(vector)
    return vector.tobytes()


def sum_until_lost(state: dict[str, Any], size: int) -> tuple[str, int]:
    """Sum again and again; returns the error and how often, once a peer is lost."""
    vector = np.ones(size, np.float32)
    for number in range(10**9):
        try:
            state["group"].all_reduce(vector)
        except PeerLost as error:
            return str(error), number
        state["summed"] = number
        vector[:] = 1
    raise AssertionError


def share(state: dict[str, Any], data: bytes | None, source: int) -> bytes:
    return bytes(state["group"].broadcast(data, source))


def reform(state: dict[str, Any], rendezvous: str, rank: int, size: int, times: int) -> list[tuple[int, int]]:
    """Sockets and threads of the process after each group."""
    found = []
    for generation in range(times):
        group = join(rendezvous, generation, rank, size)
        vector = np.full(10, 1.0, np.float32)
        group.all_reduce(vector)
        assert vector.tolist() == [size] * 10
        group.close()
        found.append(held())
    return found


def ask(all_of_them: list[Member], act: Callable[..., Any], *each: tuple[object, ...]) -> list[Any]:
    for member, arguments in zip(all_of_them, each, strict=True):
        member.tell(act, *arguments)
    return [member.answer() for member in all_of_them]


def ask_all(all_of_them: list[Member], act: Callable[..., Any], *arguments: object) -> list[Any]:
    return ask(all_of_them, act, *[arguments] * len(all_of_them))


def form_all(
    all_of_them: list[Member], rendezvous: Rendezvous, generation: int, timeout: float = 30.0
) -> None:
    size = len(all_of_them)
    places = [(rendezvous.name, generation, rank, size, timeout) for rank in range(size)]
    assert ask(all_of_them, form, *places) == ["formed"] * size


# ── tests ──────────────────────────────────────────────────────────────────────────────────────


def test_a_group_of_one_needs_no_network():
    group = ProcessGroup("nowhere:1", 0, 0, 1, address="192.0.2.1", timeout=0.1)
    vector = np.arange(3, dtype=np.float32)
    group.all_reduce(vector)
    assert vector.tolist() == [0, 1, 2]
    assert group.broadcast(b"all of it", 0) == b"all of it"
    group.close()


@pytest.mark.slow
def test_ranks_get_the_same_sum_and_broadcast(rendezvous):
    with members(3) as three:
        form_all(three, rendezvous, 0)
        sums = ask(three, sum_once, *[(seed, 100_003) for seed in range(3)])
        assert sums[0] == sums[1] == sums[2]
        expected = sum(np.random.default_rng(seed).normal(size=100_003) for seed in range(3))
        assert np.allclose(np.frombuffer(sums[0], np.float32), expected, atol=1e-5)
        data = os.urandom(300_000)
        assert ask(three, share, (None, 1), (data, 1), (None, 1)) == [data] * 3
        assert ask(three, share, (b"", 0), (None, 0), (None, 0)) == [b""] * 3


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1, 3])
def test_killed_rank_is_noticed_at_once_and_the_others_form_a_new_group(rendezvous, victim):
    with members(4) as four:
        form_all(four, rendezvous, 0, timeout=60.0)
        for member in four:
            member.tell(sum_until_lost, 50_000)
        assert not four[victim].pipe.poll(0.5)  # they are in the middle of it
        began = time.monotonic()
        four[victim].signal(signal.SIGKILL)
        rest = [member for number, member in enumerate(four) if number != victim]
        for member in rest:
            reason, times = member.answer(30.0)
            assert "lost a peer of generation 0" in reason
            assert times > 0
        assert time.monotonic() - began < 30  # far below the timeout
        form_all(rest, rendezvous, 1)
        vectors = [np.frombuffer(one, np.float32) for one in ask_all(rest, sum_once, 7, 10)]
        once = np.random.default_rng(7).normal(size=10).astype(np.float32)
        assert all(np.allclose(vector, 3 * once) for vector in vectors)


@pytest.mark.slow
def test_hanging_rank_is_lost_after_the_timeout_and_finds_no_group(rendezvous):
    with members(3) as three:
        form_all(three, rendezvous, 0, timeout=2.0)
        for member in three:
            member.tell(sum_until_lost, 1000)
        assert not three[2].pipe.poll(0.3)
        began = time.monotonic()
        three[2].signal(signal.SIGSTOP)
        for member in three[:2]:
            assert "lost a peer" in member.answer(30.0)[0]
        assert 1.0 < time.monotonic() - began < 20
        form_all(three[:2], rendezvous, 1)
        three[2].signal(signal.SIGCONT)
        assert "lost a peer" in three[2].answer(30.0)[0]
        assert len(set(ask_all(three[:2], sum_once, 1, 10))) == 1


@pytest.mark.slow
def test_latecomer_of_a_generation_never_joins_the_next(rendezvous):
    with members(3) as three:
        early, late = three[:2], three[2]
        for rank, member in enumerate(early):
            member.tell(form, rendezvous.name, 0, rank, 3, 1.0)
        assert [member.answer()[0] for member in early] == ["lost", "lost"]
        form_all(early, rendezvous, 1)
        late.tell(form, rendezvous.name, 0, 2, 3, 2.0)
        sums = ask_all(early, sum_once, 3, 10)
        assert late.answer()[0] == "lost"
        once = np.random.default_rng(3).normal(size=10).astype(np.float32)
        assert np.allclose(np.frombuffer(sums[0], np.float32), 2 * once)
        assert ask_all(early, sum_once, 3, 10) == sums


@pytest.mark.slow
def test_fifty_consecutive_groups_leak_nothing(rendezvous):
    with members(2) as two:
        for found in ask(two, reform, (rendezvous.name, 0, 2, 50), (rendezvous.name, 1, 2, 50)):
            assert found[-1] == found[4]


def test_groups_that_fail_to_form_leak_nothing(rendezvous):
    def fail(generation: int) -> None:
        with pytest.raises(PeerLost, match="rank 0 of 2 lost a peer"):
            join(rendezvous.name, generation, 0, 2, timeout=0.1)

    for generation in range(3):
        fail(generation)
    before = held()
    for generation in range(3, 13):
        fail(generation)
    deadline = time.monotonic() + 20  # the store, in this process too, closes its end a little later
    while held() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert held() <= before


def test_missing_rendezvous_is_a_lost_peer_within_the_timeout():
    """A TCPStore retries once, for its whole timeout: twice as long as the driver waits for a worker."""
    began = time.monotonic()
    with pytest.raises(PeerLost):
        join("127.0.0.1:1", 0, 0, 2, timeout=4.0)
    assert time.monotonic() - began < 6.0


def test_closing_the_rendezvous_wakes_a_rank_that_waits_there(rendezvous):
    began = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(join, rendezvous.name, 0, 0, 2, timeout=60.0)
        time.sleep(0.5)
        assert not waiting.done()
        rendezvous.close()
        with pytest.raises(PeerLost, match="rank 0 of 2 lost a peer"):
            waiting.result(30.0)
    assert time.monotonic() - began < 30.0


def in_threads(act: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(act, range(2)))


def listening() -> set[str]:
    """Addresses at which this process listens."""
    mine = {link.readlink().name for link in Path("/proc/self/fd").iterdir() if link.is_socket()}
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        columns = line.split()
        if columns[3] == "0A" and f"socket:[{columns[9]}]" in mine:
            found.add(str(IPv4Address(bytes.fromhex(columns[1][:8])[::-1])))
    return found


def test_rendezvous_listens_only_on_the_given_address():
    before = listening()
    rendezvous = Rendezvous("127.0.0.2")
    groups = in_threads(
        lambda r: ProcessGroup(rendezvous.name, 0, r, 2, address=f"127.0.0.{3 + r}", timeout=30.0)
    )
    assert listening() - before == {"127.0.0.2", "127.0.0.3", "127.0.0.4"}
    for one in (rendezvous, *groups):
        one.close()


def test_group_survives_its_rendezvous_and_a_closed_group_raises(rendezvous):
    first, second = groups = in_threads(lambda rank: join(rendezvous.name, 0, rank, 2))
    rendezvous.close()
    vectors = [np.ones(4, np.float32) for _ in range(2)]
    in_threads(lambda rank: groups[rank].all_reduce(vectors[rank]))
    assert [vector.tolist() for vector in vectors] == [[2.0] * 4] * 2
    first.close()
    with pytest.raises(PeerLost, match="is closed"):
        first.all_reduce(vectors[0])
    with pytest.raises(PeerLost, match="rank 1 of 2 lost a peer"):
        second.all_reduce(vectors[1])
