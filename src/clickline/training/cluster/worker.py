"""What sync and async workers have in common: a network, rows of the dataset, and a client of the embedding servers.

A step: pulled rows become the network's input; the next batch is pulled ahead; forward and backward; row gradients are
pushed to the embedding servers; dense gradients are all-reduced over the process group (sync_worker.py), or pushed to
the dense parameter server (async_worker.py).

The driver runs a worker as a threaded Ray actor: training runs in one thread, other calls in the others.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from ray.exceptions import RayError, RayTaskError

from clickline.artifacts.dataset import Dataset
from clickline.errors import Fenced
from clickline.evaluation.binary_metrics import HourlyCounts
from clickline.models.model import DenseModel
from clickline.records import LabelledRows
from clickline.storage.storage import Storage
from clickline.training.batches import Batches
from clickline.training.cluster.embedding_client import EmbeddingClient
from clickline.training.cluster.job import TrainingJob
from clickline.training.cluster.job_status import logs_folder
from clickline.training.cluster.process_group import PeerLost
from clickline.training.cluster.role_log import RoleLog
from clickline.training.cluster.row_exchange import ExchangeClosed
from clickline.training.cluster.worker_metrics import WorkerMetrics, WorkerReport
from clickline.training.dense_optimizer import DenseOptimizer


class WorkResult(NamedTuple):
    """How a worker's training call ended."""

    outcome: Literal["done", "paused", "broken", "diverged"]
    step: int  # sync: the next step; async: the next batch of the unit; unknown if broken
    error: str = ""


class TrainWorker:
    """The part of a worker that does not depend on the mode."""

    def __init__(self, job: TrainingJob, name: str, embedding_servers: Sequence[Any]) -> None:
        self._log = RoleLog(logs_folder(job.run) / f"{name}.log")
        dataset = Dataset.open(Storage(), job.dataset)
        self._batches = Batches(dataset, **job.batches)
        self._model = DenseModel.build(dataset.features, job.plan, job.threads, job.model_file)
        self._dense = DenseOptimizer(self._model.network, job.plan, self._model.custom)
        self._metrics = WorkerMetrics(by_hour=bool(job.batches["time_ordered"]))
        self._embeddings = EmbeddingClient(embedding_servers, self._model, self._metrics, job.threads)
        self._pause = threading.Event()
        self._log.write(f"{name}, process {os.getpid()}")

    def load_state(self, state: Mapping[str, NDArray[Any]], step: int) -> None:
        """Load a dense state and its step."""
        self._dense.load_state(state, step=step)

    def state(self) -> tuple[int, dict[str, NDArray[Any]]]:
        return self._dense.step, self._dense.state()

    def step(self) -> int:
        return self._dense.step

    def hostname(self) -> str:
        """The machine it runs on; the first answer means that it has started."""
        return socket.gethostname()

    def take_hourly_counts(self) -> HourlyCounts:
        """Prediction counts of rows before they were trained on, since the last call."""
        return self._metrics.take_hourly_counts()

    def report(self) -> WorkerReport:
        return self._metrics.report(self._dense.step)

    def pause(self) -> None:
        """Stop at the next point where no batch is in flight; in sync mode the whole group stops."""
        self._pause.set()

    def score(self, rows: LabelledRows) -> NDArray[np.float32]:
        """Click probabilities before calibration; trains nothing."""
        return self._embeddings.score(writable(rows))

    def _attempt(self, train: Callable[[], WorkResult]) -> WorkResult:
        """Train. A lost peer, server or lease is a result: the driver decides what follows. Any other error is raised
        with the location where it happened."""
        try:
            return train()
        except (PeerLost, Fenced, ExchangeClosed, RayError) as error:
            if isinstance(error, RayTaskError) and not isinstance(error, Fenced):
                raise
            self._log.write(f"broken at {self._metrics.location}: {error}")
            return WorkResult("broken", 0, f"{type(error).__name__}: {error}")
        except Exception as error:
            error.add_note(self._metrics.location)
            raise

    def _get(self, phase: str, refs: list[Any]) -> list[Any]:
        with self._metrics.timed(phase):
            values: list[Any] = ray.get(refs)
        return values

    def _record(self, rows: LabelledRows, logit_B: NDArray[np.float32], epoch: int) -> None:
        if rows.rows:
            self._metrics.record(rows, self._model.probabilities(torch.from_numpy(logit_B)), epoch)


def writable(rows: LabelledRows) -> LabelledRows:
    """A copy: arrays from Ray are read-only, which PyTorch does not support."""
    return rows.take(np.arange(rows.rows))
