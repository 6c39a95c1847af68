"""The keeper of the network in async mode: takes the workers' gradients one by one and gives back fresh weights.

Each stream computes on the weights of some version, its base. How far bases fall behind is bounded: a push waits as
long as a slower stream could not come in time any more. The slowest one never waits, so somebody always goes on.

The class knows nothing of Ray but that its methods run in one event loop; the driver makes an actor of it.
"""

from __future__ import annotations

import asyncio

import numpy as np
from numpy.typing import NDArray

from clickline.errors import ClusterError
from clickline.training.cluster.streams import Stream, Streams
from clickline.training.dense_optimizer import Dense


class Holder:
    """Network and optimizer; every batch of every stream is learned once. `staleness` is how many steps of others a
    gradient may be behind (with more streams than that, as many as there are others); `scaled` makes the step of one
    that is n behind 1 / (1 + n) as long."""

    def __init__(self, dense: Dense, staleness: int, scaled: bool, rows: int = 0) -> None:
        self.dense = dense
        self.rows = rows  # that were learned, each once
        self._staleness = staleness
        self._scaled = scaled
        self._streams = Streams()
        self._bases: dict[int, int] = {}  # of the streams that compute
        self._moved = asyncio.Event()

    @property
    def version(self) -> int:
        """Of the weights: the steps they have made."""
        return self.dense.step

    def open(self, stream: int, token: int, start: int) -> int:
        """Give a stream to a new owner; how many batches of it were learned. Nobody waits for the owner before, and
        whatever it still sends is refused."""
        opened = self._streams.open(stream, token, start)
        self._bases.pop(stream, None)
        self._move()
        return opened.applied

    def close(self, stream: int) -> None:
        """The stream is learned: nothing is taken for it any more."""
        self._streams.close(stream)
        self._bases.pop(stream, None)
        self._move()

    async def weights(self, stream: int, token: int) -> tuple[NDArray[np.float32], int]:
        """The weights and their version, which the stream computes on from now on."""
        self._streams.of(stream, token)
        return self._answer(stream)

    async def push(
        self,
        stream: int,
        token: int,
        sequence: int,
        gradient: NDArray[np.float32],
        total: float,
        version: int,
        rows: int,
    ) -> tuple[NDArray[np.float32], int]:
        """Learn the gradient of batch `sequence`, computed on the weights of `version`; the weights to go on with.
        A repeated push changes nothing."""
        if not np.isfinite(gradient).all():
            raise ClusterError(
                f"the gradient of stream {stream}, batch {sequence} is not finite: training has diverged, and it "
                "was not learned. Lower train.learning_rate or train.embedding_learning_rate, or look for extreme "
                "values in the dense fields."
            )
        while self._next(stream, token, sequence):
            self._bases[stream] = version
            if self._has_time(stream):
                self._learn(self._streams.of(stream, token), gradient, total, self.version - version)
                self.rows += rows
                break
            await self._moved.wait()
        return self._answer(stream)

    def _next(self, stream: int, token: int, sequence: int) -> bool:
        """Whether this batch is the stream's next one; not if it was learned before."""
        applied = self._streams.of(stream, token).applied
        if sequence > applied:
            raise ClusterError(f"stream {stream} sent batch {sequence}, but batch {applied} is its next one.")
        return sequence == applied

    def _has_time(self, stream: int) -> bool:
        """Whether all others, if they come one by one now, the slowest first, still come in time after this one."""
        others = sorted(base for name, base in self._bases.items() if name != stream)
        if not others or self._bases[stream] <= others[0]:
            return True
        return all(
            self.version + place - base <= self._staleness for place, base in enumerate(others, start=1)
        )

    def _learn(self, stream: Stream, gradient: NDArray[np.float32], total: float, behind: int) -> None:
        self.dense.learn(gradient, total, 1 / (1 + behind) if self._scaled else 1.0)
        stream.found = stream.applied = stream.applied + 1

    def _answer(self, stream: int) -> tuple[NDArray[np.float32], int]:
        self._bases[stream] = self.version
        self._move()
        return self.dense.weights(), self.version

    def _move(self) -> None:
        """Let all who wait look again."""
        self._moved.set()
        self._moved = asyncio.Event()
