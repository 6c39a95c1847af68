"""The servers of the serving benchmark: started in their own environments, asked until they answer right, stopped.

Everything listens on 127.0.0.1. A server gets a mark in its environment that its children inherit, so all of its
processes are found again, whoever became their parent.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import grpc
import numpy as np
from tritonclient.grpc import service_pb2

from measure import free_ports

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parents[2] / ".venv-peers"
DEBIAN_PYTHON = "/usr/bin/python3.11"
WORKERS = 2
MARK = "SERVING_BENCHMARK"
READY_IN = 90.0
STOPS_IN = 10.0


# ── protocols: what a request looks like ───────────────────────────────────────────────────────


@dataclass(frozen=True)
class Endpoint:
    """Where requests are sent."""

    kind: str  # grpc | http
    path: str
    headers: dict[str, str] = field(default_factory=dict)

    def ask(self, port: int, body: bytes, timeout: float = 10) -> bytes:
        """Send one request with a real client, which raises on errors."""
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
        """What `load.py` needs besides the bytes; answers have this length."""
        document: dict[str, object] = {"path": self.path, "length": length}
        return document | {"headers": self.headers} if self.kind == "http" else document


@dataclass(frozen=True)
class Protocol:
    """How ready-made embeddings become a request, and an answer becomes logits."""

    endpoint: Endpoint
    encode: Callable[[np.ndarray, np.ndarray], bytes]
    decode: Callable[[bytes], np.ndarray]


INFERENCE = Endpoint("grpc", "/inference.GRPCInferenceService/ModelInfer")


def tensors(column: bool = False) -> Protocol:
    """Open Inference Protocol (KServe v2), float tensors as raw contents; with `column`, wide sums are [rows, 1]."""

    def encode(inputs_BI: np.ndarray, wide_B: np.ndarray) -> bytes:
        request = service_pb2.ModelInferRequest(model_name="network")
        for name, array in (("inputs", inputs_BI), ("wide", wide_B[:, None] if column else wide_B)):
            request.inputs.add(name=name, datatype="FP32", shape=array.shape)
            request.raw_input_contents.append(array.tobytes())
        content: bytes = request.SerializeToString()
        return content

    def decode(answer: bytes) -> np.ndarray:
        return np.frombuffer(
            service_pb2.ModelInferResponse.FromString(answer).raw_output_contents[0], np.float32
        )

    return Protocol(INFERENCE, encode, decode)


def blob() -> Protocol:
    """Open Inference Protocol, one tensor of one element of BYTES: all inputs, then the wide sums."""

    def encode(inputs_BI: np.ndarray, wide_B: np.ndarray) -> bytes:
        request = service_pb2.ModelInferRequest(model_name="network")
        request.inputs.add(name="rows", datatype="BYTES", shape=[1])
        element = inputs_BI.tobytes() + wide_B.tobytes()
        request.raw_input_contents.append(len(element).to_bytes(4, "little") + element)
        content: bytes = request.SerializeToString()
        return content

    def decode(answer: bytes) -> np.ndarray:
        element = service_pb2.ModelInferResponse.FromString(answer).raw_output_contents[0][4:]
        return np.frombuffer(element, np.float32)

    return Protocol(INFERENCE, encode, decode)


def octets(path: str) -> Protocol:
    """Plain bytes over HTTP, for servers that leave the format to their users: all inputs, then the wide sums."""

    def encode(inputs_BI: np.ndarray, wide_B: np.ndarray) -> bytes:
        return inputs_BI.tobytes() + wide_B.tobytes()

    def decode(answer: bytes) -> np.ndarray:
        return np.frombuffer(answer, np.float32)

    return Protocol(Endpoint("http", path, {"Content-Type": "application/octet-stream"}), encode, decode)


# ── a server that runs ─────────────────────────────────────────────────────────────────────────


class Server:
    """A started server. `stop` is always to be called; it leaves no process behind."""

    def __init__(
        self, name: str, version: str, port: int, folder: Path, *commands: Sequence[object], **variables: str
    ) -> None:
        """Several commands are several servers on one port, which the kernel shares out between them."""
        self.name, self.version, self.port = name, version, port
        mark = str(uuid.uuid4())
        self._mark = f"{MARK}={mark}".encode()
        self._log = folder / "log"
        given = {**os.environ, MARK: mark, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1", **variables}
        self._leaders: list[subprocess.Popen[bytes]] = []
        with self._log.open("wb") as log:
            for command in commands:
                self._leaders.append(
                    subprocess.Popen(
                        list(map(str, command)), cwd=folder, env=given, start_new_session=True,
                        stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    )
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
            for leader in self._leaders:
                if leader.poll() is not None:
                    raise RuntimeError(f"{self.name} ended with {leader.returncode}:\n{self.log()}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.name} gave no answer in {seconds:.0f} s ({last}):\n{self.log()}")
            time.sleep(0.2)

    def log(self) -> str:
        return self._log.read_text(errors="replace")[-3000:]

    def processes(self) -> list[int]:
        """All processes that have its mark, and those it began with, which may have written over theirs."""
        found = [leader.pid for leader in self._leaders if leader.poll() is None]
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit() and int(folder.name) not in found:
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
        """Ask it to end, then those of its processes that its end left; what does not end in time is killed."""
        for leader in self._leaders:
            if leader.poll() is None:
                leader.terminate()
        deadline = time.monotonic() + STOPS_IN
        while any(leader.poll() is None for leader in self._leaders) and time.monotonic() < deadline:
            time.sleep(0.05)
        for ask in (signal.SIGTERM, signal.SIGKILL):
            for process in self.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, ask)
            deadline = time.monotonic() + STOPS_IN
            while self.processes() and time.monotonic() < deadline:
                for leader in self._leaders:
                    leader.poll()
                time.sleep(0.05)
        for leader in self._leaders:
            leader.wait(STOPS_IN)


# ── the peers ──────────────────────────────────────────────────────────────────────────────────


def environment(name: str, python: str = sys.executable) -> Path:
    """`bin` of a peer's own environment, made on first use from NAME.txt beside this file."""
    folder = ENVIRONMENTS / name
    if not (folder / "ready").exists():
        if not Path(python).exists():
            raise RuntimeError(f"there is no {python}: {name}.txt says why it is needed")
        print(f"making the environment of {name} in .venv-peers/{name} …", flush=True)
        subprocess.run([python, "-m", "venv", "--clear", str(folder)], check=True)
        pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "-r", HERE / f"{name}.txt"]
        subprocess.run(list(map(str, pip)), check=True)
        (folder / "ready").touch()
    return folder / "bin"


def pinned(name: str, package: str) -> str:
    """The version that is pinned in NAME.txt."""
    for line in (HERE / f"{name}.txt").read_text().splitlines():
        if line.startswith(f"{package}=="):
            return line.partition("==")[2].strip()
    raise ValueError(f"{name}.txt pins no {package}")


@dataclass(frozen=True)
class Peer:
    """A server that answers, and the protocol it answers in."""

    server: Server
    protocol: Protocol
    listens: Sequence[int] = ()  # ports that must be open too before it is ready


def mlserver(folder: Path, network: Path, workers: int = WORKERS) -> Peer:
    tools = environment("mlserver")
    http_port, port, metrics_port = free_ports(3)
    settings = {
        "host": "127.0.0.1", "http_port": http_port, "grpc_port": port, "metrics_port": metrics_port,
        "parallel_workers": workers, "debug": False,
    }  # fmt: skip
    (folder / "settings.json").write_text(json.dumps(settings))
    model = {"name": "network", "implementation": "mlserver_model.Ranker"}
    (folder / "model-settings.json").write_text(json.dumps(model))
    how = f"{workers} workers" if workers else "in its one process"
    server = Server(
        f"MLServer, {how}", pinned("mlserver", "mlserver"), port, folder, [tools / "mlserver", "start", folder],
        SERVED_NETWORK=str(network), PYTHONPATH=str(HERE),
    )  # fmt: skip
    return Peer(server, blob())


def bentoml(folder: Path, network: Path) -> Peer:
    tools = environment("bentoml")
    (port,) = free_ports(1)
    command = [tools / "bentoml", "serve", "bentoml_service:Ranker", "--working-dir", HERE]
    command += ["--host", "127.0.0.1", "--port", port]
    server = Server(
        f"BentoML, {WORKERS} workers", pinned("bentoml", "bentoml"), port, folder, command,
        SERVED_NETWORK=str(network), BENTOML_HOME=str(folder / "home"), BENTOML_DO_NOT_TRACK="True",
    )  # fmt: skip
    return Peer(server, octets("/rank"))


def kserve(folder: Path, network: Path, threads: int = WORKERS, servers: int = 1) -> Peer:
    tools = environment("kserve")
    port, *http_ports = free_ports(1 + servers)
    command = [tools / "python", HERE / "kserve_server.py", "--grpc_port", port, "--http_port"]
    how = f"a pool of {threads} threads" if threads else "in its event loop"
    server = Server(
        f"KServe, {how}" + (f", {servers} servers on one port" if servers > 1 else ""), pinned("kserve", "kserve"),
        port, folder, *([*command, http_port] for http_port in http_ports),
        SERVED_NETWORK=str(network), SERVED_THREADS=str(threads),
    )  # fmt: skip
    return Peer(
        server, tensors(), http_ports
    )  # with several servers, the first answer says nothing of the others


def torchserve(folder: Path, network: Path) -> Peer:
    tools = environment("torchserve")
    port, management, metrics, grpc_port, grpc_management = free_ports(5)
    store = folder / "store"
    store.mkdir()
    pack = [
        tools / "torch-model-archiver",
        "--model-name",
        "network",
        "--version",
        "1.0",
        "--export-path",
        store,
    ]
    pack += ["--handler", HERE / "torchserve_handler.py", "--extra-files", HERE / "network.py"]
    subprocess.run(list(map(str, pack)), check=True, capture_output=True, timeout=60)
    (folder / "config.properties").write_text(
        f"inference_address=http://127.0.0.1:{port}\nmanagement_address=http://127.0.0.1:{management}\n"
        f"metrics_address=http://127.0.0.1:{metrics}\n"
        f"grpc_inference_address=127.0.0.1\ngrpc_management_address=127.0.0.1\n"
        f"grpc_inference_port={grpc_port}\ngrpc_management_port={grpc_management}\n"
        f"default_workers_per_model={WORKERS}\njob_queue_size=1000\ndisable_system_metrics=true\n"
    )
    command = [
        tools / "torchserve",
        "--start",
        "--foreground",
        "--disable-token-auth",
        "--no-config-snapshots",
    ]
    command += [
        "--model-store",
        store,
        "--models",
        "network.mar",
        "--ts-config",
        folder / "config.properties",
    ]
    command += ["--log-config", HERE / "torchserve_log.xml"]
    server = Server(
        f"TorchServe, {WORKERS} workers", pinned("torchserve", "torchserve"), port, folder, command,
        SERVED_NETWORK=str(network), TEMP=str(folder), PATH=f"{tools}:{os.environ['PATH']}",
    )  # fmt: skip
    return Peer(server, octets("/predictions/network"))


def pytriton(folder: Path, network: Path) -> Peer:
    tools = environment("pytriton", DEBIAN_PYTHON)
    ports = free_ports(3)
    server = Server(
        f"PyTriton, {WORKERS} callables", pinned("pytriton", "nvidia-pytriton"), ports[0], folder,
        [tools / "python", HERE / "pytriton_server.py", *ports],
        SERVED_NETWORK=str(network),
    )  # fmt: skip
    return Peer(server, tensors(column=True))


PEERS: dict[str, Callable[[Path, Path], Peer]] = {
    "mlserver": mlserver,
    "mlserver-alone": partial(mlserver, workers=0),
    "bentoml": bentoml,
    "kserve": kserve,
    "kserve-loop": partial(kserve, threads=0),
    "kserve-twice": partial(kserve, threads=0, servers=2),
    "torchserve": torchserve,
    "pytriton": pytriton,
}
"""Where it is not plain which setting of a peer is its best, there are several."""


def start_peer(
    name: str, folder: Path, network: Path, inputs_BI: np.ndarray, wide_B: np.ndarray, logit_B: np.ndarray
) -> Peer:
    """A peer that has proven to give the network's own logits."""
    folder.mkdir(parents=True)
    peer = PEERS[name](folder, network)
    server, protocol, found_B = peer.server, peer.protocol, np.zeros(0, np.float32)

    def answers() -> None:
        nonlocal found_B
        for port in peer.listens:
            socket.create_connection(("127.0.0.1", port), 1).close()
        found_B = protocol.decode(protocol.endpoint.ask(server.port, protocol.encode(inputs_BI, wide_B)))

    try:
        server.wait_until(answers)
        if found_B.shape != logit_B.shape or not np.allclose(found_B, logit_B, rtol=1e-4, atol=1e-5):
            raise RuntimeError(f"{server.name} gives other logits: {found_B[:4]} instead of {logit_B[:4]}")
    except BaseException:
        server.stop()
        raise
    return peer
