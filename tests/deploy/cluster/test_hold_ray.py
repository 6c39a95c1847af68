"""Ray runs while a pipeline does: its sidecar scales Ray up and down."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ads_objects import ADS, item
from api_server import ApiServer, Fault

from clickline.deploy.apply import ApplyResult, apply
from clickline.deploy.deploy_status import fetch_status, summarize
from clickline.deploy.kube_client import Kube, connect
from clickline.deploy.ray_lifecycle import keep_scaled, scale_down
from clickline.deploy.render import render
from clickline.errors import ClusterError
from clickline.progress import Progress

Holder = Callable[..., subprocess.Popen[str]]
SIZES = ("ads-ray-head=1", "ads-ray-worker=3")


@pytest.fixture
def hold(bare: ApiServer, tmp_path: Path) -> Iterator[Holder]:
    """The container's command as a process, with the test's API server."""
    started: list[subprocess.Popen[str]] = []

    def start(*sizes: str) -> subprocess.Popen[str]:
        command = [Path(sys.executable).parent / "clickline", "deploy", "hold-ray", "--namespace", "shop"]
        process = subprocess.Popen(
            [*command, "--mark", tmp_path / "mark", *(sizes or SIZES)],
            env=dict(os.environ),
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def stateful(api: ApiServer, name: str, replicas: int, there: int = 0) -> dict[str, Any]:
    one = item("apps/v1", "StatefulSet", name, name.removeprefix("ads-"), spec={"replicas": replicas})
    return api.put({**one, "status": {"replicas": there}})


def replicas(api: ApiServer) -> list[int]:
    found = [api.one("StatefulSet", name) for name in ("ads-ray-head", "ads-ray-worker")]
    return [one["spec"]["replicas"] for one in found if one is not None]


def until(what: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    return process.returncode, said


def test_ray_is_scaled_up_and_down_again_on_sigterm(bare: ApiServer, hold: Holder, tmp_path: Path) -> None:
    stateful(bare, "ads-ray-head", 1)  # the default of a new StatefulSet
    stateful(bare, "ads-ray-worker", 0)
    process = hold()
    until((tmp_path / "mark").exists)
    assert replicas(bare) == [1, 3]
    code, said = ended(process)
    assert code == 0, said
    assert replicas(bare) == [0, 0]
    assert [name for verb, _, name in bare.writes if verb == "patch"] == [
        "ads-ray-worker",
        "ads-ray-worker",
        "ads-ray-head",
    ]


def test_scale_up_waits_for_terminating_pods_of_the_previous_run(
    bare: ApiServer, hold: Holder, tmp_path: Path
) -> None:
    before = stateful(bare, "ads-ray-head", 0, there=1)
    stateful(bare, "ads-ray-worker", 0)
    process = hold()
    asked = "GET /apis/apps/v1/namespaces/shop/statefulsets/ads-ray-head/scale"
    until(lambda: sum(line.startswith(asked) for line in list(bare.requests)) >= 2)
    assert replicas(bare) == [0, 0] and not (tmp_path / "mark").exists()
    before["status"]["replicas"] = 0
    until((tmp_path / "mark").exists)
    assert replicas(bare) == [1, 3]
    assert "pods of the previous run are terminating" in ended(process)[1]


def test_scale_down_is_retried_after_a_closed_connection(
    bare: ApiServer, hold: Holder, tmp_path: Path
) -> None:
    stateful(bare, "ads-ray-head", 1)
    stateful(bare, "ads-ray-worker", 3)
    process = hold()
    until((tmp_path / "mark").exists)
    bare.faults.append(Fault("patch", "statefulsets/scale", cut=True, times=1))
    assert ended(process)[0] == 0
    assert replicas(bare) == [0, 0]


def test_scale_down_accepts_a_deleted_deployment(bare: ApiServer, hold: Holder, tmp_path: Path) -> None:
    stateful(bare, "ads-ray-head", 1)
    stateful(bare, "ads-ray-worker", 3)
    process = hold()
    until((tmp_path / "mark").exists)
    for key in [key for key in bare.objects if key[1] == "StatefulSet"]:
        bare.delete(key, None)
    assert ended(process)[0] == 0


def test_workflow_steps_scale_up_and_down_separately(bare: ApiServer, hold: Holder) -> None:
    stateful(bare, "ads-ray-head", 1)
    stateful(bare, "ads-ray-worker", 0)
    for only, sizes in (("ask", [1, 3]), ("release", [0, 0])):
        process = hold("--only", only, *SIZES)
        _, said = process.communicate(timeout=60)
        assert process.returncode == 0, said
        assert replicas(bare) == sizes


def test_missing_scale_permission_is_reported(bare: ApiServer, hold: Holder, tmp_path: Path) -> None:
    stateful(bare, "ads-ray-head", 0)
    bare.faults.append(Fault("patch", "statefulsets/scale"))
    process = hold()
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "verb patch, resource statefulsets.apps/scale" in said
    assert not (tmp_path / "mark").exists()


# ── while it runs ──────────────────────────────────────────────────────────────────────────────


def held(*rounds: Callable[[], None]) -> tuple[list[str], Callable[[float], bool]]:
    """The log, and a stop check that runs one action per round and stops after the last."""
    left = list(rounds)

    def stopped(seconds: float) -> bool:
        if seconds and left:
            left.pop(0)()
            return False
        return bool(seconds) and not left

    return [], stopped


WANTED = {"ads-ray-head": 1, "ads-ray-worker": 3}


def test_ray_scaled_down_late_by_an_earlier_pipeline_is_scaled_up_again(bare: ApiServer) -> None:
    stateful(bare, "ads-ray-head", 1)
    stateful(bare, "ads-ray-worker", 3)

    def ended_late() -> None:
        scale_down(connect, "shop", list(WANTED), lambda line: None)

    said, stopped = held(ended_late, lambda: None)
    keep_scaled(connect, "shop", WANTED, stopped, said.append)
    assert replicas(bare) == [1, 3]
    assert said == ["ads-ray-head: scaled to 1", "ads-ray-worker: scaled to 3"]


def test_nothing_is_patched_or_logged_while_ray_has_its_size(bare: ApiServer) -> None:
    stateful(bare, "ads-ray-head", 1)
    stateful(bare, "ads-ray-worker", 3)
    said, stopped = held(lambda: None, lambda: None)
    keep_scaled(connect, "shop", WANTED, stopped, said.append)
    assert said == [] and bare.writes == []


def test_unreachable_api_is_logged_once_and_retried(bare: ApiServer) -> None:
    stateful(bare, "ads-ray-head", 0)
    stateful(bare, "ads-ray-worker", 3)
    bare.faults.append(Fault("get", "statefulsets/scale", 503, "overloaded", times=2))
    said, stopped = held(lambda: None, lambda: None, lambda: None)
    keep_scaled(connect, "shop", WANTED, stopped, said.append)
    assert replicas(bare) == [1, 3]
    assert [line.endswith("Trying again.") for line in said] == [True, False]


def test_sidecar_keeps_ray_scaled_until_it_is_terminated(
    bare: ApiServer, hold: Holder, tmp_path: Path
) -> None:
    stateful(bare, "ads-ray-head", 1)
    stateful(bare, "ads-ray-worker", 3)
    process = hold()
    until((tmp_path / "mark").exists)
    scale_down(connect, "shop", list(WANTED), lambda line: None)
    until(lambda: replicas(bare) == [1, 3])
    assert ended(process)[0] == 0
    assert replicas(bare) == [0, 0]


# ── letting go ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("status", [409, 429, 500, 503])
def test_scale_down_is_retried_while_the_api_is_busy(
    bare: ApiServer, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setattr("clickline.deploy.ray_lifecycle._POLL_SECONDS", 0.01)
    stateful(bare, "ads-ray-head", 1)
    stateful(bare, "ads-ray-worker", 3)
    bare.faults.append(Fault("patch", "statefulsets/scale", status, "not now", times=2))
    scale_down(connect, "shop", list(WANTED), lambda line: None)
    assert replicas(bare) == [0, 0]


@pytest.mark.parametrize(("status", "bound"), [(503, 0.05), (403, 300.0)], ids=["busy", "forbidden"])
def test_scale_down_times_out_and_names_sets_that_keep_their_pods(
    bare: ApiServer, monkeypatch: pytest.MonkeyPatch, status: int, bound: float
) -> None:
    monkeypatch.setattr("clickline.deploy.ray_lifecycle._POLL_SECONDS", 0.01)
    monkeypatch.setattr("clickline.deploy.ray_lifecycle._SCALE_DOWN_SECONDS", bound)
    stateful(bare, "ads-ray-head", 1)
    stateful(bare, "ads-ray-worker", 3)
    bare.faults.append(Fault("patch", "statefulsets/scale", status, name="ads-ray-worker"))
    with pytest.raises(ClusterError, match="kubectl -n shop scale statefulset ads-ray-worker --replicas=0"):
        scale_down(connect, "shop", list(WANTED), lambda line: None)
    assert replicas(bare) == [0, 3]


# ── with the rest of a deployment ──────────────────────────────────────────────────────────────


@pytest.fixture
def objects(tmp_path: Path) -> list[dict[str, Any]]:
    file = tmp_path / "clickline.yaml"
    file.write_text(
        "name: ads\ndata: {format: criteo, train: data/train.tsv, eval: data/eval.tsv}\n"
        "train: {mode: cluster, workers: {min: 1, max: 3}}\ndeploy: {namespace: shop}\n"
    )
    return render(file).objects


@pytest.fixture
def nightly(objects: list[dict[str, Any]], tmp_path: Path) -> list[dict[str, Any]]:
    return render(tmp_path / "clickline.yaml", ["deploy.workflow.schedule=0 3 * * *"]).objects


def run(kube: Kube, objects: list[dict[str, Any]]) -> ApplyResult:
    return apply(kube, ADS, objects, prune=False, progress=Progress())


def test_apply_does_not_undo_the_scaling_of_the_pipeline(
    bare: ApiServer, kube: Kube, objects: list[dict[str, Any]]
) -> None:
    run(kube, objects)
    assert replicas(bare) == [1, 1]
    for size in (3, 0):
        for name in ("ads-ray-head", "ads-ray-worker"):
            kube.set_scale(name, "shop", size)
        assert run(kube, objects).changed == []
        assert replicas(bare) == [size, size]


def test_scheduled_ray_has_no_pods_before_the_first_run(
    bare: ApiServer, kube: Kube, nightly: list[dict[str, Any]]
) -> None:
    run(kube, nightly)
    assert replicas(bare) == [0, 0]
    for name in ("ads-ray-head", "ads-ray-worker"):
        kube.set_scale(name, "shop", 2)
    assert run(kube, nightly).changed == []
    assert replicas(bare) == [2, 2]


def test_ray_scaled_to_zero_counts_as_done(
    bare: ApiServer, kube: Kube, objects: list[dict[str, Any]]
) -> None:
    run(kube, objects)
    for name in ("ads-ray-head", "ads-ray-worker"):
        found = bare.one("StatefulSet", name)
        assert found is not None
        found["spec"]["replicas"] = 0
    document = summarize(fetch_status(kube, ADS))
    result = {one["role"]: (one["state"], one["ready"], one["desired"]) for one in document["roles"]}
    assert result["ray-head"] == result["ray-worker"] == ("done", 0, 0)
