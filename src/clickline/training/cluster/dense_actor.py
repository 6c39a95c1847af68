"""The Ray actor of the dense parameter server in async mode."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clickline.artifacts.dataset import Dataset
from clickline.machine import resident_bytes
from clickline.models.model import Model
from clickline.models.model_plan import ModelPlan
from clickline.storage.storage import Storage
from clickline.training.cluster.dense_parameter_server import DenseParameterServer
from clickline.training.cluster.role_log import RoleLog
from clickline.training.dense_optimizer import DenseOptimizer


class DenseActor:
    """Builds and loads the network, and forwards calls to the dense parameter server."""

    def __init__(
        self,
        dataset: str,
        plan: ModelPlan,
        model_file: Path | None,
        max_staleness: int,
        scale_lr: bool,
        state: Mapping[str, NDArray[Any]],
        step: int,
        log: Path,
    ) -> None:
        self._log = RoleLog(log)
        features = Dataset.open(Storage(), dataset).features
        model = Model.build(features, plan, 1, model_file)
        self._dense = DenseOptimizer(model.network, plan, model.custom)
        self._dense.load_state(state, step=step)
        self._server = DenseParameterServer(self._dense, max_staleness, scale_lr)
        self._log.write(f"network at step {step}, process {os.getpid()}")

    async def open_stream(self, stream: int, token: int, start: int) -> int:
        return self._server.open_stream(stream, token, start)

    async def close_stream(self, stream: int) -> None:
        self._server.close_stream(stream)

    async def weights(self, stream: int, token: int) -> tuple[NDArray[np.float32], int]:
        return await self._server.weights(stream, token)

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
        return await self._server.push(stream, token, sequence, gradient, total, version, rows)

    async def state(self) -> dict[str, NDArray[Any]]:
        return self._dense.state()

    async def host_and_memory(self) -> tuple[str, int]:
        """Its host name, and its memory in bytes."""
        return socket.gethostname(), resident_bytes()

    async def step(self) -> int:
        return self._dense.step
