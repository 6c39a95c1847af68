"""Starts a real server for a test, and sends it requests over real sockets."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import yaml

from clickline.wire.messages import PredictRequest, PredictResponse
from servers.waiting import free_ports

_PREDICT = "/tensorflow.serving.PredictionService/Predict"


def predict_request(
    milliseconds: float = 0.0, rows: int = 1, name: str = "ctr", version: int | None = None
) -> bytes:
    """A PredictRequest whose first row takes this long to score."""
    request = PredictRequest()
    request.model_spec.name = name
    if version is not None:
        request.model_spec.version.value = version
    tensor = request.inputs["I1"]
    tensor.dtype = 1
    tensor.tensor_shape.dim.add().size = rows
    tensor.float_val.extend([milliseconds] + [0.0] * (rows - 1))
    body: bytes = request.SerializeToString()
    return body


class Service:
    """A running server: its ports, processes and output."""

    def __init__(self, command: list[str | Path], folder: Path, serve: Mapping[str, Any]) -> None:
        self.folder = folder
        self.grpc_port, self.http_port, self.metrics_port = free_ports(3)
        section = {
            "processes": 1,
            "poll_interval": 0.05,
            "drain_timeout": 5,
            "grpc_port": self.grpc_port,
            "http_port": self.http_port,
            "metrics_port": self.metrics_port,
            **serve,
        }
        file = folder / "clickline.yaml"
        if file.exists():  # a project: the test only changes how it is served
            config = yaml.safe_load(file.read_text())
        else:
            config = {"data": {"format": "criteo", "train": "train.tsv"}, "cache": {"dir": "cache"}}
        file.write_text(yaml.safe_dump({**config, "name": "ctr", "serve": section}))
        self._stderr = (folder / "stderr").open("wb")
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        self.pids: set[int] = set()
        self.scheme = "https" if "tls" in serve else "http"

    def wait_up(self) -> dict[str, Any]:
        """Wait until all workers listen, and return what the server printed."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the server exited: {self.errors()}"
        up: dict[str, Any] = json.loads(line)
        return up

    def errors(self) -> str:
        return (self.folder / "stderr").read_text()

    def log(self, event: str) -> list[dict[str, Any]]:
        """Log lines of one event."""
        # Split only at line feeds: client input may contain other characters that Python treats as line ends.
        lines = [json.loads(line) for line in self.errors().split("\n") if line.endswith("}")]
        return [line for line in lines if line["event"] == event]

    def begun(self) -> int:
        """The number of slow requests (100 ms and more) whose scoring has begun."""
        file = self.folder / "begun"
        return file.stat().st_size if file.exists() else 0

    def workers(self) -> list[int]:
        """Process ids of the running workers."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        found = [int(pid) for pid in path.read_text().split()]
        self.pids.update(found)
        return found

    def url(self, path: str) -> str:
        return f"{self.scheme}://127.0.0.1:{self.http_port}{path}"

    def admin(self, path: str, **more: Any) -> httpx.Response:
        return httpx.get(f"{self.scheme}://127.0.0.1:{self.metrics_port}{path}", timeout=10, **more)

    def metrics(self) -> dict[str, float]:
        """Samples of /metrics by name and labels."""
        lines = self.admin("/metrics").text.splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[0] != "#"}

    def channel(self) -> grpc.Channel:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
        return grpc.insecure_channel(f"127.0.0.1:{self.grpc_port}", options=options)

    def post(self, milliseconds: float = 0.0, rows: int = 1, **more: Any) -> httpx.Response:
        """Send a prediction request over REST."""
        instances = [{"I1": milliseconds}] + [{"I1": 0}] * (rows - 1)
        return httpx.post(
            self.url("/v1/models/ctr:predict"), json={"instances": instances}, timeout=60, **more
        )

    def version(self) -> int:
        """The version that answers a request on a new connection."""
        with self.channel() as channel:
            return answered(predictor(channel)(predict_request(), timeout=10))

    def kill(self) -> None:
        """Kill all processes that still run."""
        if self.process.poll() is None:
            self.workers()
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._stderr.close()
        for pid in self.pids:
            if running(pid):
                os.kill(pid, signal.SIGKILL)


def predictor(channel: grpc.Channel) -> Any:
    return channel.unary_unary(_PREDICT)


def answered(body: bytes) -> int:
    """The version of an answer, checked against the scores of all its rows."""
    response = PredictResponse.FromString(body)
    scores = np.array(response.outputs["logistic"].float_val) * 1024
    version = int(response.model_spec.version.value)
    assert (scores == version).all(), f"version {version} answered with scores of {set(scores)}"
    return version


def running(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@contextmanager
def standing_in(folder: Path, **serve: Any) -> Iterator[Service]:
    """A server with stand-in scorers that follows `folder/versions`."""
    (folder / "versions").mkdir(exist_ok=True)
    script = Path(__file__).with_name("standin.py")
    service = Service([sys.executable, script, "clickline.yaml", "versions"], folder, serve)
    try:
        yield service
    finally:
        service.kill()


@contextmanager
def command(project: Path, **serve: Any) -> Iterator[Service]:
    """`clickline serve --json` in a project."""
    code = "from clickline.cli.app import app; app()"
    service = Service([sys.executable, "-c", code, "serve", "--json"], project, serve)
    try:
        yield service
    finally:
        service.kill()


class Load:
    """Clients that send requests without a pause, and their results."""

    def __init__(self, service: Service, clients: int, rows: int = 3, milliseconds: float = 0.0) -> None:
        self.versions: list[int] = []
        self.failures: list[str] = []
        self.seconds: list[float] = []
        self._service = service
        self._body = predict_request(milliseconds, rows)
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ask(self) -> None:
        with self._service.channel() as channel:
            predict = predictor(channel)
            while not self._stop.is_set():
                began = time.monotonic()
                try:
                    self.versions.append(answered(predict(self._body, timeout=30, wait_for_ready=True)))
                    self.seconds.append(time.monotonic() - began)
                except grpc.RpcError as error:
                    self.failures.append(f"{error.code().name}: {error.details()}")
                    time.sleep(0.002)
                except AssertionError as error:
                    self.failures.append(str(error))
