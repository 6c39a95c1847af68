"""The dense parameter server applies every gradient once, within the staleness limit, and never deadlocks."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from training_doubles import model_plan

from clickline.embedding import Cosine
from clickline.errors import ClusterError, Fenced
from clickline.models.custom_network import CustomModel
from clickline.training.cluster.dense_parameter_server import DenseParameterServer
from clickline.training.dense_optimizer import DenseOptimizer

STEPS = 1000
PLAN = model_plan(
    network=None,
    network_sha256="0",
    slots=(),
    hidden=(),
    schedule=Cosine(STEPS),
    row_schedule=Cosine(STEPS),
)


def server(max_staleness: int = 4, *, scale_lr: bool = False) -> DenseParameterServer:
    """Of one weight that goes down by the gradient's mean times the schedule's factor."""
    network = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(network.weight)
    custom = CustomModel(network, False, optimizer=lambda weights: torch.optim.SGD(weights, lr=1.0))
    return DenseParameterServer(
        lambda: DenseOptimizer(network, PLAN, custom), max_staleness, scale_lr, Path(os.devnull)
    )


def gradient(value: float = 1.0) -> np.ndarray:
    vector = np.array([value, 0, 0, 0, 0], dtype=np.float32)
    vector.flags.writeable = False
    return vector


def now(act: Coroutine[Any, Any, tuple[np.ndarray, int]]) -> tuple[float, int]:
    """The answer of a call that must not wait."""
    try:
        act.send(None)
    except StopIteration as end:
        weights, version = end.value
        return float(weights[0]), version
    act.close()
    raise AssertionError("it waits")


def push(
    one: DenseParameterServer, stream: int, sequence: int, version: int, token: int = 1, value: float = 1.0
) -> tuple[float, int]:
    return now(one.push(stream, token, sequence, gradient(value), 2.0, version))


def opened(one: DenseParameterServer, *streams: int) -> DenseParameterServer:
    for stream in streams:
        assert one.open_stream(stream, 1, 0) == 0
        now(one.weights(stream, 1))
    return one


def test_gradient_is_applied_as_a_mean_at_the_learning_rate_of_its_step():
    one = opened(server(), 7)
    assert push(one, 7, 0, 0, value=3.0) == (-1.5, 1)
    factor = PLAN.schedule.factor(1)
    assert factor < 1
    weight, version = push(one, 7, 1, 1, value=3.0)
    assert weight == pytest.approx(-1.5 - 1.5 * factor)
    assert (version, one.step()) == (2, 2)


@pytest.mark.parametrize("scale_lr", [False, True])
def test_stale_gradient_is_scaled_as_configured(scale_lr):
    one = opened(server(scale_lr=scale_lr), 1, 2)
    before, _ = push(one, 1, 0, 0)
    before, _ = push(one, 1, 1, 1)
    after, _ = push(one, 2, 0, 0)  # two behind
    assert before - after == pytest.approx(0.5 * PLAN.schedule.factor(2) / (3 if scale_lr else 1))


def test_repeated_push_changes_nothing_and_returns_fresh_weights():
    one = opened(server(), 1, 2)
    push(one, 1, 0, 0)
    latest = push(one, 2, 0, 0)
    assert push(one, 1, 0, 0, value=100.0) == latest
    assert one.step() == 2
    assert one.open_stream(1, 2, 0) == 1  # the next owner knows


def test_batch_out_of_order_is_refused():
    one = opened(server(), 1)
    with pytest.raises(ClusterError, match="stream 1 sent batch 1, but its next batch is 0"):
        push(one, 1, 1, 0)
    assert one.step() == 0


def test_fenced_or_closed_stream_is_refused():
    one = opened(server(), 1)
    assert one.open_stream(1, 2, 0) == 0
    for act in (lambda: push(one, 1, 0, 0), lambda: now(one.weights(1, 1))):
        with pytest.raises(Fenced, match="belongs to token 2"):
            act()
    with pytest.raises(Fenced, match="token 1 is outdated"):
        one.open_stream(1, 1, 0)
    push(one, 1, 0, 0, token=2)
    one.close_stream(1)
    with pytest.raises(Fenced, match="is closed"):
        push(one, 1, 1, 1, token=2)
    assert one.step() == 1


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite_gradient_is_refused_and_the_weights_stay(value):
    one = opened(server(), 1)
    with pytest.raises(ClusterError, match=r"not finite: training has diverged.*Lower train\.learning_rate"):
        push(one, 1, 0, 0, value=value)
    assert now(one.weights(1, 1)) == (0.0, 0)
    assert push(one, 1, 0, 0) == (-0.5, 1)


def ahead_of(max_staleness: int) -> tuple[DenseParameterServer, int]:
    """Stream 1 as far ahead of stream 2 as it may be."""
    one = opened(server(max_staleness), 1, 2)
    for sequence in range(max_staleness):
        push(one, 1, sequence, sequence)
    return one, max_staleness


@pytest.mark.parametrize("release", ["push", "close", "fence", "weights"])
def test_push_waits_for_a_slower_stream_until_it_progresses_or_closes(release):
    async def story() -> None:
        one, version = ahead_of(3)
        waiting = asyncio.create_task(one.push(1, 1, 3, gradient(), 2.0, version))
        again = asyncio.create_task(one.push(1, 1, 3, gradient(), 2.0, version))  # sent twice
        for _ in range(5):
            await asyncio.sleep(0)
        assert not waiting.done()
        assert one.step() == 3
        if release == "push":
            push(one, 2, 0, 0)
        elif release == "close":
            one.close_stream(2)
        elif release == "fence":
            one.open_stream(2, 2, 0)
        else:
            await one.weights(2, 1)
        await asyncio.wait_for(asyncio.gather(waiting, again), 10)
        learned = 5 if release == "push" else 4
        assert one.step() == learned

    asyncio.run(story())


def test_waiting_push_is_refused_when_its_stream_gets_another_owner():
    async def story() -> None:
        one, version = ahead_of(3)
        waiting = asyncio.create_task(one.push(1, 1, 3, gradient(), 2.0, version))
        await asyncio.sleep(0)
        assert one.open_stream(1, 2, 0) == 3
        with pytest.raises(Fenced, match="belongs to token 2"):
            await asyncio.wait_for(waiting, 10)
        assert one.step() == 3
        push(one, 2, 0, 0)

    asyncio.run(story())


def test_staleness_is_bounded_for_all_slower_streams():
    async def story() -> None:
        one = opened(server(2), 1, 2, 3)
        push(one, 1, 0, 0)
        with pytest.raises(AssertionError, match="it waits"):
            push(one, 1, 1, 1)  # or the last of the others would be three behind
        assert push(one, 2, 0, 0)[1] == 2
        assert push(one, 3, 0, 0)[1] == 3
        assert push(one, 1, 1, 1)[1] == 4

    asyncio.run(story())


def test_stream_that_has_not_started_blocks_no_push():
    one = server(1)
    one.open_stream(1, 1, 0)
    one.open_stream(2, 1, 0)
    now(one.weights(1, 1))
    for sequence in range(10):
        push(one, 1, sequence, sequence)


@settings(max_examples=60)
@given(
    max_staleness=st.integers(1, 6),
    workers=st.integers(1, 5),
    waits=st.lists(st.integers(0, 12), min_size=1, max_size=40),
    trouble=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 4)), max_size=5),
)
def test_in_any_order_every_batch_is_applied_once_within_the_staleness_limit(
    max_staleness, workers, waits, trouble
):
    """Workers of different pace, who lose their stream to another now and then: nobody hangs, nothing is learned
    twice, and no gradient is further behind than allowed, or than the others are many."""
    batches = 8

    async def story() -> None:
        one = server(max_staleness)
        behind: list[int] = []
        learned: list[tuple[int, int]] = []
        turn = 0

        async def pause() -> None:
            nonlocal turn
            turn += 1
            for _ in range(waits[turn % len(waits)]):
                await asyncio.sleep(0)

        async def work(stream: int, token: int, start: int) -> None:
            try:
                await pause()
                _, base = await one.weights(stream, token)
                for sequence in range(start, batches):
                    await pause()
                    _, version = await one.push(stream, token, sequence, gradient(), 2.0, base)
                    behind.append(version - 1 - base)
                    learned.append((stream, sequence))
                    base = version
                one.close_stream(stream)
            except Fenced:
                return

        tasks: list[asyncio.Task[None]] = []
        owners: dict[int, asyncio.Task[None]] = {}

        def give(stream: int) -> None:
            """To a new owner, who begins behind what was learned."""
            token = len(tasks) + 1
            owners[stream] = asyncio.create_task(work(stream, token, one.open_stream(stream, token, 0)))
            tasks.append(owners[stream])

        for stream in range(workers):
            give(stream)
        for moment, number in trouble:
            for _ in range(moment):
                await asyncio.sleep(0)
            if not owners[number % workers].done():
                give(number % workers)
        await asyncio.wait_for(asyncio.gather(*tasks), 10)
        assert one.step() == workers * batches
        assert sorted(learned) == [(stream, n) for stream in range(workers) for n in range(batches)]
        assert max(behind) <= max(max_staleness, workers - 1)

    asyncio.run(story())
