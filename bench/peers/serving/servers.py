"""The servers of the serving benchmark: started in their own environments, asked until they answer right, stopped.

Everything listens on 127.0.0.1. A server gets a mark in its environment that its children inherit, so all of its
processes are found again, whoever became their parent.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import numpy as np
from tritonclient.grpc import service_pb2

__all__ = [
    "PEERS",
    "Protocol",
    "Server",
    "environment",
    "free_ports",
    "inference_protocol",
    "octets_protocol",
    "start_peer",
]

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parents[2] / ".venv-peers"
DEBIAN_PYTHON = "/usr/bin/python3.11"
WORKERS = 2
MARK = "SERVING_BENCHMARK"
READY_IN = 90.0
STOPS_IN = 10.0


# ── protocols: what a request looks like ───────────────────────────────────────────────────────


@dataclass(frozen=True)
class Protocol:
    """How tensors become a request and an answer becomes logits again."""

    kind: str  # grpc | http
    path: str
    encode: Callable[[np.ndarray, np.ndarray], bytes]
    decode: Callable[[bytes], np.ndarray]
    headers: dict[str, str] = field(default_factory=dict)

    def ask(self, port: int, body: bytes, timeout: float = 10) -> bytes:
        """One request by a real client, which tells errors from answers."""
        if self.kind == "grpc":
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                answer: bytes = channel.unary_unary(self.path)(body, timeout=timeout)
                return answer
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
        try:
            connection.request("POST", self.path, body, self.headers)
            response = connection.getresponse()
            content = response.read()
        finally:
            connection.close()
        if response.status != 200:
            raise ConnectionError(f"HTTP {response.status}: {content[:500]!r}")
        return content

    def call(self, length: int) -> dict[str, object]:
        """What `load.py` has to know beside the bytes."""
        told: dict[str, object] = {"path": self.path, "length": length}
        return told | {"headers": self.headers} if self.kind == "http" else told


def inference_protocol(kind: str = "grpc") -> Protocol:
    """Open Inference Protocol (KServe v2), tensors as raw contents."""

    def encode(inputs_BI: np.ndarray, wide_B: np.ndarray) -> bytes:
        request = service_pb2.ModelInferRequest(model_name="network")
        for name, array in (("inputs", inputs_BI), ("wide", wide_B)):
            request.inputs.add(name=name, datatype="FP32", shape=array.shape)
            request.raw_input_contents.append(array.tobytes())
        content: bytes = request.SerializeToString()
        return content

    def decode(answer: bytes) -> np.ndarray:
        response = service_pb2.ModelInferResponse.FromString(answer)
        if response.raw_output_contents:
            return np.frombuffer(response.raw_output_contents[0], np.float32)
        return np.array(response.outputs[0].contents.fp32_contents, np.float32)

    return Protocol(kind, "/inference.GRPCInferenceService/ModelInfer", encode, decode)


def octets_protocol(path: str) -> Protocol:
    """Plain bytes over HTTP, for servers that leave the format to their users."""

    def encode(inputs_BI: np.ndarray, wide_B: np.ndarray) -> bytes:
        return inputs_BI.tobytes() + wide_B.tobytes()

    def decode(answer: bytes) -> np.ndarray:
        return np.frombuffer(answer, np.float32)

    return Protocol("http", path, encode, decode, {"Content-Type": "application/octet-stream"})


# ── a server that runs ─────────────────────────────────────────────────────────────────────────


class Server:
    """A started server. `stop` is always to be called; it leaves no process behind."""

    def __init__(
        self, name: str, version: str, protocol: Protocol, port: int, command: Sequence[object], folder: Path, **variables: str
    ) -> None:
        self.name, self.version, self.protocol, self.port = name, version, protocol, port
        self._log = folder / "log"
        self._mark = f"{MARK}={uuid.uuid4()}".encode()
        given = {**os.environ, MARK: self._mark.decode().partition("=")[2], "PYTHONPATH": str(HERE), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", **variables}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                list(map(str, command)), cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=given,
                start_new_session=True,
            )  # fmt: skip

    def wait_until(self, answers: Callable[[], object], seconds: float = READY_IN) -> None:
        """Ask until it answers; a server that ends, or takes too long, is an error that shows its log."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                answers()
                return
            except (OSError, grpc.RpcError, http.client.HTTPException) as error:
                last = error
            if self._process.poll() is not None:
                raise RuntimeError(f"{self.name} ended with {self._process.returncode}:\n{self.log()}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.name} gave no answer in {seconds:.0f} s ({last}):\n{self.log()}")
            time.sleep(0.2)

    def log(self) -> str:
        return self._log.read_text(errors="replace")[-3000:]

    def processes(self) -> list[int]:
        """All processes that have its mark."""
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                with contextlib.suppress(OSError):  # it may have ended meanwhile
                    if self._mark in (folder / "environ").read_bytes().split(b"\0"):
                        found.append(int(folder.name))
        return found

    def cpu_seconds(self) -> float:
        """What its processes have used of the cores so far."""
        ticks = 0
        for process in self.processes():
            with contextlib.suppress(OSError):
                fields = Path("/proc", str(process), "stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])  # user and system time
        return ticks / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOPS_IN)
        deadline = time.monotonic() + STOPS_IN
        while (left := self.processes()) and time.monotonic() < deadline:
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.05)
        self._process.wait(STOPS_IN)


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


# ── the peers ──────────────────────────────────────────────────────────────────────────────────


def environment(name: str, python: str = sys.executable) -> Path:
    """`bin` of a peer's own environment, made on first use from NAME.txt beside this file."""
    folder = ENVIRONMENTS / name
    if not (folder / "ready").exists():
        print(f"making the environment of {name} in .venv-peers/{name} …", flush=True)
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "-r", str(HERE / f"{name}.txt")]
        subprocess.run(pip, check=True)
        (folder / "ready").touch()
    return folder / "bin"


def version_of(name: str, package: str) -> str:
    """The version that is pinned in NAME.txt."""
    for line in (HERE / f"{name}.txt").read_text().splitlines():
        if line.startswith(f"{package}=="):
            return line.partition("==")[2].strip()
    raise ValueError(f"{name}.txt pins no {package}")


def mlserver(folder: Path, network: Path) -> Server:
    tools = environment("mlserver")
    http_port, port, metrics_port = free_ports(3)
    settings = {
        "host": "127.0.0.1", "http_port": http_port, "grpc_port": port, "metrics_port": metrics_port,
        "parallel_workers": WORKERS, "debug": False,
    }  # fmt: skip
    (folder / "settings.json").write_text(json.dumps(settings))
    model = {"name": "network", "implementation": "mlserver_model.Ranker"}
    (folder / "model-settings.json").write_text(json.dumps(model))
    command = [tools / "mlserver", "start", folder]
    version = version_of("mlserver", "mlserver")
    return Server("MLServer", version, inference_protocol(), port, command, folder, SERVED_NETWORK=str(network))


def bentoml(folder: Path, network: Path) -> Server:
    tools = environment("bentoml")
    (port,) = free_ports(1)
    command = [tools / "bentoml", "serve", "bentoml_service:Ranker", "--working-dir", HERE]
    command += ["--host", "127.0.0.1", "--port", port]
    return Server(
        "BentoML", version_of("bentoml", "bentoml"), octets_protocol("/rank"), port, command, folder,
        SERVED_NETWORK=str(network), BENTOML_HOME=str(folder / "home"), BENTOML_DO_NOT_TRACK="True",
    )  # fmt: skip


def kserve(folder: Path, network: Path) -> Server:
    tools = environment("kserve")
    port, http_port = free_ports(2)
    command = [tools / "python", HERE / "kserve_server.py", "--grpc_port", port, "--http_port", http_port]
    version = version_of("kserve", "kserve")
    return Server("KServe", version, inference_protocol(), port, command, folder, SERVED_NETWORK=str(network))


def torchserve(folder: Path, network: Path) -> Server:
    tools = environment("torchserve")
    port, management, metrics, grpc_port, grpc_management = free_ports(5)
    store = folder / "store"
    store.mkdir()
    pack = [tools / "torch-model-archiver", "--model-name", "network", "--version", "1.0", "--export-path", store]
    pack += ["--handler", HERE / "torchserve_handler.py", "--extra-files", HERE / "network.py"]
    subprocess.run(list(map(str, pack)), check=True, capture_output=True, timeout=60)
    (folder / "config.properties").write_text(
        f"inference_address=http://127.0.0.1:{port}\nmanagement_address=http://127.0.0.1:{management}\n"
        f"metrics_address=http://127.0.0.1:{metrics}\n"
        f"grpc_inference_address=127.0.0.1\ngrpc_management_address=127.0.0.1\n"
        f"grpc_inference_port={grpc_port}\ngrpc_management_port={grpc_management}\n"
        f"default_workers_per_model={WORKERS}\njob_queue_size=1000\ndisable_system_metrics=true\n"
    )
    shutil.copy(HERE / "torchserve_log.xml", folder / "log4j2.xml")
    command = [tools / "torchserve", "--start", "--foreground", "--disable-token-auth", "--no-config-snapshots"]
    command += ["--model-store", store, "--models", "network.mar", "--ts-config", folder / "config.properties"]
    command += ["--log-config", folder / "log4j2.xml"]
    return Server(
        "TorchServe", version_of("torchserve", "torchserve"), octets_protocol("/predictions/network"), port, command, folder,
        SERVED_NETWORK=str(network), TMPDIR=str(folder), TEMP=str(folder), PATH=f"{tools}:{os.environ['PATH']}",
    )  # fmt: skip


def pytriton(folder: Path, network: Path) -> Server:
    tools = environment("pytriton", DEBIAN_PYTHON)
    ports = free_ports(3)
    command = [tools / "python", HERE / "pytriton_server.py", *ports]
    version = version_of("pytriton", "nvidia-pytriton")
    return Server("PyTriton", version, inference_protocol(), ports[0], command, folder, SERVED_NETWORK=str(network))


PEERS = {"mlserver": mlserver, "bentoml": bentoml, "kserve": kserve, "torchserve": torchserve, "pytriton": pytriton}


def start_peer(name: str, folder: Path, network: Path, inputs_BI: np.ndarray, wide_B: np.ndarray, logit_B: np.ndarray) -> Server:
    """A peer that has proven to give the network's own logits."""
    folder.mkdir(parents=True)
    server = PEERS[name](folder, network)
    try:
        protocol, found_B = server.protocol, np.zeros(0, np.float32)

        def answers() -> None:
            nonlocal found_B
            found_B = protocol.decode(protocol.ask(server.port, protocol.encode(inputs_BI, wide_B)))

        server.wait_until(answers)
        if found_B.shape != logit_B.shape or not np.allclose(found_B, logit_B, rtol=1e-4, atol=1e-5):
            raise RuntimeError(f"{server.name} gives other logits: {found_B[:4]} instead of {logit_B[:4]}")
    except BaseException:
        server.stop()
        raise
    return server
