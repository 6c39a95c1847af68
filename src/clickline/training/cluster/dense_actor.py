"""The process that holds the dense part in async mode."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clickline.artifacts.dataset import Dataset
from clickline.models.model import Model
from clickline.models.model_plan import ModelPlan
from clickline.storage.storage import Storage
from clickline.training.cluster.dense_parameter_server import Holder
from clickline.training.cluster.role_log import RoleLog, resident
from clickline.training.dense_optimizer import Dense


class Network:
    """A holder with its network built and loaded. The driver makes an actor of it."""

    def __init__(
        self,
        dataset: str,
        plan: ModelPlan,
        model_file: Path | None,
        staleness: int,
        scaled: bool,
        state: Mapping[str, NDArray[Any]],
        step: int,
        log: Path,
    ) -> None:
        self._log = RoleLog(log)
        features = Dataset.open(Storage(), dataset).features
        model = Model.build(features, plan, 1, model_file)
        self._dense = Dense(model.network, plan, model.custom)
        self._dense.load_state(state, step=step)
        self._holder = Holder(self._dense, staleness, scaled)
        self._log.say(f"network at step {step}, process {os.getpid()}")

    async def open(self, stream: int, token: int, start: int) -> int:
        return self._holder.open(stream, token, start)

    async def close(self, stream: int) -> None:
        self._holder.close(stream)

    async def weights(self, stream: int, token: int) -> tuple[NDArray[np.float32], int]:
        return await self._holder.weights(stream, token)

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
        return await self._holder.push(stream, token, sequence, gradient, total, version, rows)

    async def state(self) -> dict[str, NDArray[Any]]:
        return self._dense.state()

    async def where(self) -> tuple[str, int]:
        """Its machine, and its memory in bytes."""
        return socket.gethostname(), resident()

    async def step(self) -> int:
        return self._dense.step
