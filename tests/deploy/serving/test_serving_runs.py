"""Commands, environment and probes of the manifests, with real processes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from socket import create_connection, socket
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from serving_plans import EVERY_WAY, objects, plan, templates

import clickline
from clickline.config import load_config
from clickline.training.tracking import MlflowTracker

_CONFIG = """
name: ads
data: {train: data/train.tsv, eval: data/eval.tsv, shard_size: 64KiB}
model: {embedding_dim: 4, hidden: [8]}
train: {batch_size: 256}
tracking: {enabled: false}
serve: {poll_interval: 0.05, drain_timeout: 1}
"""


def _free_ports(count: int) -> list[int]:
    held = [socket() for _ in range(count)]
    for one in held:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


def _eventually(condition: Callable[[], Any], seconds: float = 120.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.05)
    return found


def _without_rights(command: list[str]) -> list[str]:
    """Root can write what is read-only for others, unless it drops that capability."""
    if os.geteuid() != 0:
        return command
    dropping = shutil.which("setpriv")
    if dropping is None:
        pytest.skip("root cannot give its rights up here: no setpriv")
    return [dropping, "--bounding-set=-all", "--inh-caps=-all", *command]


@contextmanager
def _running(container: Mapping[str, Any], folder: Path, **more: str) -> Iterator[subprocess.Popen[bytes]]:
    """A container's process, with the folders of a pod in a local one."""

    def here(text: str) -> str:
        return text.replace("/clickline", str(folder)).replace("/scratch", str(folder / "scratch"))

    given = {one["name"]: here(one["value"]) for one in container["env"] if "value" in one}
    del given["NUMBA_CACHE_DIR"]  # compiling all kernels once more takes a minute
    (folder / "scratch").mkdir(exist_ok=True)
    with (folder / "said").open("ab") as said:
        process = subprocess.Popen(
            _without_rights([here(word) for word in container["command"]]),
            cwd=folder,
            env={"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **given, **more},
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
    try:
        yield process
    except BaseException:
        sys.stderr.write((folder / "said").read_text())
        raise
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _answer(container: Mapping[str, Any], probe: str) -> int:
    """The HTTP status that the kubelet would get; 0 if nothing listens."""
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    handler = container[probe]
    try:
        if "httpGet" in handler:
            port = handler["httpGet"]["port"]
            url = f"http://127.0.0.1:{ports.get(port, port)}{handler['httpGet']['path']}"
            return httpx.get(url, timeout=5).status_code
        if "tcpSocket" in handler:
            create_connection(("127.0.0.1", handler["tcpSocket"]["port"]), timeout=5).close()
            return 200
        with grpc.insecure_channel(f"127.0.0.1:{handler['grpc']['port']}") as channel:
            asked = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
            return 200 if asked.status == health_pb2.HealthCheckResponse.SERVING else 503
    except (httpx.TransportError, OSError, grpc.RpcError):
        return 0


def _main(made: list[dict[str, Any]], owner: str) -> dict[str, Any]:
    (container,) = templates(made)[owner]["spec"]["containers"]
    return dict(container)


@pytest.fixture
def pods(project: Path, tmp_path: Path) -> Iterator[Path]:
    """A pod's folder with a read-only home and no version yet."""
    home = project / ".clickline"
    everything = [home, *home.rglob("*")]
    if os.geteuid() == 0:
        for path in everything:
            os.chown(path, 12345, 12345)
    home.chmod(0o555)
    yield project
    home.chmod(0o755)


@pytest.mark.slow
def test_servers_become_ready_with_the_first_version_and_do_not_write_home(
    pods: Path,
) -> None:
    ports = dict(zip(("http", "grpc", "metrics", "lookup"), _free_ports(4), strict=True))
    lookup_metrics = _free_ports(1)[0]
    chosen = [f"serve.{name}_port={port}" for name, port in ports.items()]
    one = plan(*chosen, text=_CONFIG)
    (pods / "clickline.yaml").write_text(
        one.config_text.replace("/clickline/", f"{pods}/").replace("/scratch", str(pods / "scratch"))
    )
    predictor = _main(objects(one), "Deployment/ads-predictor")
    apart = plan("deploy.serving.lookup={}", *chosen, f"serve.metrics_port={lookup_metrics}", text=_CONFIG)
    shard = _main(objects(apart), "StatefulSet/ads-lookup")
    shard["command"][-1] += f" --set serve.metrics_port={lookup_metrics}"  # one address for both pods here
    also = {
        way: _main(objects(plan(*EVERY_WAY[way], *chosen, text=_CONFIG)), "Service/ads-predictor")
        for way in ("knative", "knative grpc")
    }
    with _running(predictor, pods), _running(shard, pods, POD_INDEX="3"):
        for container in (predictor, shard):
            _eventually(lambda c=container: _answer(c, "startupProbe") == 200)
            assert _answer(container, "livenessProbe") == 200
            assert _answer(container, "readinessProbe") == 503
        for container in also.values():
            _eventually(lambda c=container: _answer(c, "livenessProbe") == 200)
            assert _answer(container, "readinessProbe") == 503
        home = pods / ".clickline"
        home.chmod(0o755)
        before = set(home.rglob("*"))
        clickline.publish(load_config(pods / "clickline.yaml", ["gate.auc=null"]))
        (pods / ".clickline").chmod(0o555)
        for container in (shard, predictor, *also.values()):
            _eventually(lambda c=container: _answer(c, "readinessProbe") == 200)
        result = httpx.get(f"http://127.0.0.1:{lookup_metrics}/metrics").text
        assert "clickline_lookup_shard 1.0" in result  # 3 modulo 2
        new = {path.relative_to(home).parts[0] for path in home.rglob("*") if path not in before}
        assert new == {"registry"}


@pytest.mark.slow
def test_mlflow_accepts_requests_for_its_service_name(tmp_path: Path) -> None:
    pytest.importorskip(
        "flask_cors", reason="MLflow's server is not here: the image has flask-cors and pandas"
    )
    pytest.importorskip("pandas")
    (port,) = _free_ports(1)
    made = objects(
        plan(f"deploy.tracking={{enabled: true, port: {port}}}", text=_CONFIG.replace("enabled: false", ""))
    )
    server = _main(made, "Deployment/ads-tracking")
    (tmp_path / ".clickline").mkdir()
    search = f"http://127.0.0.1:{port}/api/2.0/mlflow/experiments/search"

    def status(host: str) -> int:
        headers = {"host": f"{host}:{port}"}
        return httpx.post(search, json={"max_results": 5}, headers=headers, timeout=20).status_code

    with _running(server, tmp_path):
        _eventually(lambda: _answer(server, "startupProbe") == 200)
        assert {status(host) for host in ("ads-tracking", "ads-tracking.clickline.svc", "localhost")} == {200}
        assert status("elsewhere") == 403
        said: list[str] = []
        (tmp_path / "run").mkdir()
        (tmp_path / "report.json").write_text("{}")
        tracker = MlflowTracker(
            f"http://127.0.0.1:{port}",
            "ads",
            "run",
            folder=tmp_path / "run",
            warn=said.append,
            patience=120,
        )
        tracker.metrics(1, {"auc": 0.7})
        tracker.artifact(tmp_path / "report.json")
        tracker.close("FINISHED")
        assert said == []
    kept = tmp_path / ".clickline"
    assert {path.name for path in kept.iterdir()} == {"mlflow.db", "mlflow-artifacts"}
    assert [path.read_text() for path in kept.rglob("report.json")] == ["{}"]
