"""The dense parameter server of async mode: applies the workers' gradients one by one and returns fresh weights.

Each stream computes on some version of the weights, its base. Staleness is bounded: a push waits while applying it
would make a slower stream too stale. The slowest stream never waits, so there is always progress.

The class knows nothing of Ray except that its methods run in one event loop; the driver runs it as an async actor.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clickline.artifacts.dataset import Dataset
from clickline.errors import ClusterError
from clickline.machine import resident_bytes
from clickline.models.model import DenseModel
from clickline.models.model_plan import ModelPlan
from clickline.storage.storage import Storage
from clickline.training.cluster.role_log import RoleLog
from clickline.training.cluster.streams import BatchStream, BatchStreams
from clickline.training.dense_optimizer import DenseOptimizer


class DenseParameterServer:
    """Holds network and optimizer; every batch of every stream is applied once. `max_staleness` is how many steps of
    others a gradient may be behind (with more streams than that, the number of the others); `scale_lr` multiplies the
    step of a gradient that is n behind by 1 / (1 + n). `build` makes the optimizer in the process of the server."""

    def __init__(
        self, build: Callable[[], DenseOptimizer], max_staleness: int, scale_lr: bool, log: Path
    ) -> None:
        self._dense = build()
        self._max_staleness = max_staleness
        self._scale_lr = scale_lr
        self._streams = BatchStreams()
        self._bases: dict[int, int] = {}  # by active stream
        self._changed = asyncio.Event()
        with closing(RoleLog(log)) as lines:
            lines.write(f"network at step {self.step()}, process {os.getpid()}")

    def step(self) -> int:
        """The number of steps taken, which is the version of the weights."""
        return self._dense.step

    def state(self) -> dict[str, NDArray[Any]]:
        return self._dense.state()

    def host_and_memory(self) -> tuple[str, int]:
        """Its host name, and its memory in bytes."""
        return socket.gethostname(), resident_bytes()

    def open_stream(self, stream: int, token: int, start: int) -> int:
        """Give a stream to a new owner; returns how many of its batches were applied. No stream waits for the previous
        owner any longer, and its messages are refused."""
        opened = self._streams.open(stream, token, start)
        self._bases.pop(stream, None)
        self._notify()
        return opened.applied

    def close_stream(self, stream: int) -> None:
        """Close a finished stream: its messages are refused from now on."""
        self._streams.close(stream)
        self._bases.pop(stream, None)
        self._notify()

    async def weights(self, stream: int, token: int) -> tuple[NDArray[np.float32], int]:
        """The weights and their version, which become the base of the stream."""
        self._streams.owned_by(stream, token)
        return self._fresh_weights(stream)

    async def push(
        self,
        stream: int,
        token: int,
        sequence: int,
        gradient: NDArray[np.float32],
        total: float,
        version: int,
    ) -> tuple[NDArray[np.float32], int]:
        """Apply the gradient of batch `sequence`, computed on the weights of `version`; returns fresh weights. A
        repeated push changes nothing."""
        if not np.isfinite(gradient).all():
            raise ClusterError(
                f"the gradient of stream {stream}, batch {sequence} is not finite: training has diverged. The "
                "gradient was not applied. Lower train.learning_rate or train.embedding.learning_rate, or check the "
                "dense fields for extreme values."
            )
        while self._next(stream, token, sequence):
            self._bases[stream] = version
            if self._within_staleness(stream):
                self._apply(self._streams.owned_by(stream, token), gradient, total, self.step() - version)
                break
            await self._changed.wait()
        return self._fresh_weights(stream)

    def _next(self, stream: int, token: int, sequence: int) -> bool:
        """Whether this batch is the next of the stream; not if it was applied before."""
        applied = self._streams.owned_by(stream, token).applied
        if sequence > applied:
            raise ClusterError(f"stream {stream} sent batch {sequence}, but its next batch is {applied}.")
        return sequence == applied

    def _within_staleness(self, stream: int) -> bool:
        """Whether all other streams, pushing one by one with the slowest first, would stay within the limit after
        this."""
        others = sorted(base for name, base in self._bases.items() if name != stream)
        if not others or self._bases[stream] <= others[0]:
            return True
        return all(
            self.step() + place - base <= self._max_staleness for place, base in enumerate(others, start=1)
        )

    def _apply(self, stream: BatchStream, gradient: NDArray[np.float32], total: float, behind: int) -> None:
        self._dense.update(gradient, total, 1 / (1 + behind) if self._scale_lr else 1.0)
        stream.counted = stream.applied = stream.applied + 1

    def _fresh_weights(self, stream: int) -> tuple[NDArray[np.float32], int]:
        self._bases[stream] = self.step()
        self._notify()
        return self._dense.weights(), self.step()

    def _notify(self) -> None:
        """Wake all waiting pushes to check again."""
        self._changed.set()
        self._changed = asyncio.Event()


def restore_dense(
    dataset: str, plan: ModelPlan, model_file: Path | None, state: Mapping[str, NDArray[Any]], step: int
) -> DenseOptimizer:
    """The network and optimizer of a plan, with a state that a run begins with."""
    model = DenseModel.build(Dataset.open(Storage(), dataset).features, plan, 1, model_file)
    dense = DenseOptimizer(model.network, plan, model.custom)
    dense.load_state(state, step=step)
    return dense
