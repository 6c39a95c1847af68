"""Ray's pods are there while a pipeline runs: the container beside it asks for them, and lets them go with it."""

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
from ads_objects import item
from api_server import ApiServer, Fault

from clickline.progress import Progress
from clickline.stages.deploy.apply import Applied, apply
from clickline.stages.deploy.kube import Kube
from clickline.stages.deploy.render import rendered
from clickline.stages.deploy.status import fetch, summarise

Holder = Callable[..., subprocess.Popen[str]]
SIZES = ("ads-ray-head=1", "ads-ray-worker=3")


@pytest.fixture
def hold(bare: ApiServer, tmp_path: Path) -> Iterator[Holder]:
    """The container's command as a process, with the API of the test."""
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


def test_ray_is_asked_for_and_let_go_when_the_container_is_ended(
    bare: ApiServer, hold: Holder, tmp_path: Path
) -> None:
    stateful(bare, "ads-ray-head", 1)  # as a new StatefulSet without a number has it
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


def test_pods_of_the_run_before_are_let_go_to_their_end_first(
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
    assert "pods of the run before are ending" in ended(process)[1]


def test_a_connection_that_is_cut_at_the_end_is_tried_again(
    bare: ApiServer, hold: Holder, tmp_path: Path
) -> None:
    stateful(bare, "ads-ray-head", 1)
    stateful(bare, "ads-ray-worker", 3)
    process = hold()
    until((tmp_path / "mark").exists)
    bare.faults.append(Fault("patch", "statefulsets/scale", cut=True, times=1))
    assert ended(process)[0] == 0
    assert replicas(bare) == [0, 0]


def test_a_deployment_that_is_deleted_meanwhile_ends_it_well(
    bare: ApiServer, hold: Holder, tmp_path: Path
) -> None:
    stateful(bare, "ads-ray-head", 1)
    stateful(bare, "ads-ray-worker", 3)
    process = hold()
    until((tmp_path / "mark").exists)
    for key in [key for key in bare.objects if key[1] == "StatefulSet"]:
        bare.delete(key, None)
    assert ended(process)[0] == 0


def test_the_steps_of_a_workflow_ask_and_let_go_one_after_the_other(bare: ApiServer, hold: Holder) -> None:
    stateful(bare, "ads-ray-head", 1)
    stateful(bare, "ads-ray-worker", 0)
    for only, sizes in (("ask", [1, 3]), ("release", [0, 0])):
        process = hold("--only", only, *SIZES)
        _, said = process.communicate(timeout=60)
        assert process.returncode == 0, said
        assert replicas(bare) == sizes


def test_without_the_right_to_it_the_reason_is_said(bare: ApiServer, hold: Holder, tmp_path: Path) -> None:
    stateful(bare, "ads-ray-head", 0)
    bare.faults.append(Fault("patch", "statefulsets/scale"))
    process = hold()
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "verb patch, resource statefulsets.apps/scale" in said
    assert not (tmp_path / "mark").exists()


# ── with the rest of a deployment ──────────────────────────────────────────────────────────────


@pytest.fixture
def objects(tmp_path: Path) -> list[dict[str, Any]]:
    file = tmp_path / "clickline.yaml"
    file.write_text(
        "name: ads\ndata: {format: criteo, train: data/train.tsv, eval: data/eval.tsv}\n"
        "train: {mode: cluster, workers: {min: 1, max: 3}}\ndeploy: {namespace: shop}\n"
    )
    return rendered(file).objects


def run(kube: Kube, objects: list[dict[str, Any]]) -> Applied:
    return apply(kube, objects, name="ads", namespace="shop", prune=False, progress=Progress())


def test_an_apply_leaves_ray_as_large_as_the_pipeline_wants_it(
    bare: ApiServer, kube: Kube, objects: list[dict[str, Any]]
) -> None:
    run(kube, objects)
    assert replicas(bare) == [1, 1]
    for size in (3, 0):
        for name in ("ads-ray-head", "ads-ray-worker"):
            found = bare.one("StatefulSet", name)
            assert found is not None
            kube.patch(found, {"spec": {"replicas": size}}, part="scale")
        assert run(kube, objects).changed == []
        assert replicas(bare) == [size, size]


def test_ray_that_was_let_go_is_done_and_not_waited_for(
    bare: ApiServer, kube: Kube, objects: list[dict[str, Any]]
) -> None:
    run(kube, objects)
    for name in ("ads-ray-head", "ads-ray-worker"):
        found = bare.one("StatefulSet", name)
        assert found is not None
        found["spec"]["replicas"] = 0
    document = summarise(fetch(kube, name="ads", namespace="shop", metrics_port=8502, tls=False))
    told = {one["role"]: (one["state"], one["ready"], one["desired"]) for one in document["roles"]}
    assert told["ray-head"] == told["ray-worker"] == ("done", 0, 0)
