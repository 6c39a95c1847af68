"""Long runs of a real server: a thousand switches under load, and a million requests. `make soak-parts` runs them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest

from clickline.artifacts.checkpoint import find_checkpoint
from clickline.artifacts.dataset import Dataset
from clickline.artifacts.from_config import registry_of
from clickline.config import Config, load_config
from clickline.embedding import save_snapshot
from clickline.models.model import open_checkpoint
from clickline.progress import Progress
from clickline.publishing.release import Release
from clickline.publishing.run import publish, publish_release
from clickline.storage.storage import Storage
from clickline.training.train_step import TrainStep
from clickline.wire.messages import PredictRequest, PredictResponse
from servers.waiting import free_ports

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

SWITCHES = int(os.environ.get("CLICKLINE_SOAK_SWITCHES", "1000"))
REQUESTS = int(os.environ.get("CLICKLINE_SOAK_REQUESTS", "1000000"))
PREDICT = "/tensorflow.serving.PredictionService/Predict"


def request(project: Path, rows: int, first: int = 0) -> bytes:
    """Raw fields of log lines, as TF Serving clients send them."""
    lines = [line.split("\t") for line in (project / "data" / "eval.tsv").read_text().splitlines()]
    found = lines[first : first + rows]
    asked = PredictRequest()
    asked.model_spec.name = "clickline"
    names = [*(f"I{n}" for n in range(1, 14)), *(f"C{n}" for n in range(1, 27))]
    for place, name in enumerate(names, start=1):
        tensor = asked.inputs[name]
        tensor.dtype = 1 if name.startswith("I") else 7
        tensor.tensor_shape.dim.add().size = rows
        for line in found:
            if name.startswith("I"):
                tensor.float_val.append(float(line[place]) if line[place] else float("nan"))
            else:
                tensor.string_val.append(line[place].encode())
    body: bytes = asked.SerializeToString()
    return body


@contextmanager
def serving(project: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a server; yields its process and its gRPC address."""
    ports = free_ports(3)
    settings = [*options]
    for name, port in zip(("grpc_port", "http_port", "metrics_port"), ports, strict=True):
        settings.append(f"serve.{name}={port}")
    command = [
        str(Path(sys.executable).with_name("clickline")),
        "serve",
        "--json",
        "-c",
        str(project / "clickline.yaml"),
    ]
    for setting in settings:
        command += ["--set", setting]
    with (project / "serve.log").open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, (project / "serve.log").read_text()
            json.loads(line)
            yield process, f"127.0.0.1:{ports[0]}"
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
            process.stdout.close()


def two_versions(config: Config, folder: Path) -> None:
    """Publish a base, and a delta on it that changes every score."""
    publish(config)
    model = open_checkpoint(find_checkpoint(None, config.home), 2)
    dataset = Dataset.current(Storage(), config.home)
    rows = dataset.read(Path(dataset.folder, dataset.splits["train"].shards[0].file), [0])
    train_step = TrainStep(model)
    train_step.run(train_step.prepare(rows.take(np.arange(60))))
    save_snapshot(model.tables, folder / "later.bin")
    origin = {"checkpoint": "later", "step": 1, "tables_sha256": "", "dataset": dataset.id}
    release = Release(model, folder / "later.bin", origin, "", None, rows)
    publish_release(config, release, iter(()), Progress(), reason="soak", started=time.monotonic())


class RequestLoop(threading.Thread):
    """Sends requests in a loop and compares every answer with the expected scores of its version."""

    def __init__(self, address: str, body: bytes, wanted: dict[int, np.ndarray]) -> None:
        super().__init__(daemon=True)
        self.answers = dict.fromkeys(wanted, 0)
        self.faults: list[str] = []
        self.stopping = threading.Event()
        self._address, self._body, self._wanted = address, body, wanted

    def run(self) -> None:
        with grpc.insecure_channel(self._address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            call = channel.unary_unary(PREDICT)
            while not self.stopping.is_set():
                try:
                    answer = PredictResponse.FromString(call(self._body, timeout=20))
                except grpc.RpcError as error:
                    self.faults.append(f"{error.code()}: {error.details()}")
                    continue
                version = answer.model_spec.version.value
                found = np.array(answer.outputs["logistic"].float_val, dtype=np.float32)
                if not np.allclose(found, self._wanted[version], rtol=0, atol=2e-6):
                    self.faults.append(f"version {version} answered {found[:4]}…")
                self.answers[version] += 1


def test_thousand_switches_fail_no_request_and_mix_no_versions(project, tmp_path):
    config = load_config(project / "clickline.yaml")
    two_versions(config, tmp_path)
    registry = registry_of(config)
    body = request(project, 50)
    with (
        serving(project, "serve.processes=2", "serve.poll_interval=0.02") as (_, address),
        grpc.insecure_channel(address) as channel,
    ):
        call = channel.unary_unary(PREDICT)

        def ask() -> tuple[int, np.ndarray]:
            answer = PredictResponse.FromString(call(body, timeout=20))
            scores = np.array(answer.outputs["logistic"].float_val, dtype=np.float32)
            return answer.model_spec.version.value, scores

        def moved_to(version: int) -> np.ndarray:
            registry.move(version, "soak", after=registry.current())
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline:
                found, scores = ask()
                if found == version:
                    return scores
            raise AssertionError(f"version {version} never answered")

        wanted = {version: moved_to(version) for version in (1, 2)}
        assert np.abs(wanted[1] - wanted[2]).min() > 1e-5  # a mixed answer would be detected
        asking = [RequestLoop(address, body, wanted) for _ in range(4)]
        for one in asking:
            one.start()
        for switch in range(SWITCHES):
            moved_to(1 + switch % 2)
            if switch % 100 == 99:
                registry.gc(2)
        for one in asking:
            one.stopping.set()
        for one in asking:
            one.join(30)
    assert [fault for one in asking for fault in one.faults] == []
    answers = {version: sum(one.answers[version] for one in asking) for version in wanted}
    print(f"{SWITCHES} switches under {answers} answers")  # noqa: T201
    assert min(answers.values()) > SWITCHES / 10


def resident(pids: list[int]) -> int:
    """Private memory of these processes, in bytes."""
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon"):
                total += int(line.split()[1]) * 1024
    return total


def children(pid: int) -> list[int]:
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_memory_is_flat_over_a_million_requests(project):
    config = load_config(project / "clickline.yaml")
    publish(config)
    bodies = [request(project, 1, first) for first in range(200)]
    with serving(project, "serve.processes=2") as (process, address):

        def ask(count: int) -> None:
            """Keeps a bounded number of calls in flight."""
            free = threading.Semaphore(64)
            failed: list[grpc.StatusCode] = []

            def done(answer: grpc.Future) -> None:
                if answer.code() != grpc.StatusCode.OK:
                    failed.append(answer.code())
                free.release()

            with grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
                call = channel.unary_unary(PREDICT)
                for number in range(count):
                    free.acquire()
                    call.future(bodies[number % len(bodies)], timeout=30).add_done_callback(done)
                for _ in range(64):
                    free.acquire()
            assert failed == []

        workers = children(process.pid)
        ask(REQUESTS // 10)
        warm = resident([process.pid, *workers])
        ask(REQUESTS - REQUESTS // 10)
        assert children(process.pid) == workers  # none has died
        after = resident([process.pid, *workers])
        print(f"{warm / 2**20:.1f} MiB after a tenth, {after / 2**20:.1f} MiB at the end")  # noqa: T201
        assert after < warm * 1.05 + 2**22
