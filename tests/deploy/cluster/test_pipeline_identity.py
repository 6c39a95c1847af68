"""When a pipeline is replaced: a change of serving does not train again, and there are never two pipelines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ads_objects import ADS, container, labels, pod
from api_server import ApiServer

from clickline.deploy.apply import ApplyResult, apply
from clickline.deploy.kube_client import Kube
from clickline.deploy.render import render
from clickline.errors import ClusterError
from clickline.progress import Progress

CONFIG = """
name: ads
data: {train: "data/{date}/{hour}/*.tsv", dates: {from: 20260101}}
model: {name: lr}
deploy: {namespace: shop}
"""
DONE = {"conditions": [{"type": "Complete", "status": "True"}]}
RUNS = {"active": 1}
NIGHTLY = "deploy.workflow.schedule=0 3 * * *"
ARGO = "deploy.workflow.kind=argo"
ACTIVE = {"name": "ads-pipeline-1"}
STOP = """--type merge --patch '{"spec": {"shutdown": "Stop"}}'"""
"""Stops a Workflow: its exit handler runs and scales Ray down, which a deletion would prevent."""
FOLLOW = "deploy.workflow.follow=true"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "clickline.yaml").write_text(CONFIG)
    return tmp_path


def run(kube: Kube, folder: Path, *overrides: str) -> ApplyResult:
    made = render(folder / "clickline.yaml", overrides)
    return apply(kube, ADS, made.objects, prune=False, progress=Progress())


def refused(kube: Kube, api: ApiServer, folder: Path, *overrides: str) -> str:
    before = list(api.writes)
    with pytest.raises(ClusterError) as error:
        run(kube, folder, *overrides)
    assert api.writes == before
    return str(error.value)


def pipelines(api: ApiServer) -> list[str]:
    """The objects that train into `home`."""
    kinds = ("Job", "CronJob", "Workflow", "CronWorkflow")
    learners = [f"Deployment {name}" for name in api.names("Deployment") if name == "ads-trainer"]
    return [f"{kind} {name}" for kind in kinds for name in api.names(kind)] + learners


def give(api: ApiServer, kind: str, status: dict[str, Any]) -> None:
    live = api.one(kind, "ads-pipeline")
    assert live is not None
    live["status"] = status


SECURED = (
    ("serve.token_file=token", "deploy.secrets.files={token: web/token}"),
    (
        "serve.tls={certificate: c.pem, key: k.pem, ca: a.pem}",
        "deploy.secrets.files={c.pem: web/crt, k.pem: web/key, a.pem: web/ca}",
    ),
    ("studio.token_file=token", "deploy.secrets.files={token: web/token}"),
)

# ── what makes it another ──────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("status", [DONE, RUNS], ids=["done", "running"])
def test_change_of_serving_does_not_change_the_pipeline(
    bare: ApiServer, kube: Kube, folder: Path, status: dict[str, Any]
) -> None:
    run(kube, folder)
    give(bare, "Job", status)
    bare.put({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "web", "namespace": "shop"}})
    for change in (
        "serve.drain_timeout=25",
        "studio.port=8555",
        "deploy.serving.replicas=3",
        "deploy.serving.lookup={replicas: 2}",
        "deploy.resources.predictor.cpu=2",
        *SECURED,
    ):
        done = run(kube, folder, *(change if isinstance(change, tuple) else [change]))
        assert "Job ads-pipeline" in done.unchanged and not done.failed, change


def test_change_of_serving_rolls_the_predictors(bare: ApiServer, kube: Kube, folder: Path) -> None:
    run(kube, folder)
    assert "Deployment ads-predictor" in run(kube, folder, "serve.max_rows=500").changed


@pytest.mark.parametrize("change", ["train.epochs=3", "gate.auc=0.7", "deploy.image=clickline:9"])
def test_change_of_training_or_gate_replaces_the_pipeline(
    bare: ApiServer, kube: Kube, folder: Path, change: str
) -> None:
    run(kube, folder)
    give(bare, "Job", DONE)
    assert run(kube, folder, change).replaced == ["Job ads-pipeline"]


def test_trusted_keys_are_part_of_the_pipeline(bare: ApiServer, kube: Kube, folder: Path) -> None:
    mounted = (
        "deploy.secrets.files={keys.pem: keys/pem}"  # mounted in both, so that the mount makes no difference
    )
    bare.namespace("shop", labels("access"))
    bare.put({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys", "namespace": "shop"}})
    run(kube, folder, mounted)
    give(bare, "Job", DONE)
    assert run(kube, folder, mounted, "serve.trusted_keys_file=keys.pem").replaced == ["Job ads-pipeline"]


@pytest.mark.parametrize("change", SECURED[:2], ids=["token", "tls"])
def test_server_certificate_and_token_are_mounted_only_where_needed(
    folder: Path, change: tuple[str, ...]
) -> None:
    made = render(folder / "clickline.yaml", [ARGO, *change]).objects
    template = next(one for one in made if one["kind"] == "WorkflowTemplate")["spec"]["templates"]
    steps = {one["name"]: one["container"] for one in template if "container" in one}
    predictor = next(
        one for one in made if one["metadata"]["name"] == "ads-predictor" and one["kind"] == "Deployment"
    )
    steps["predictor"] = predictor["spec"]["template"]["spec"]["containers"][0]
    having = {name for name, one in steps.items() if "secret-web" in {m["name"] for m in one["volumeMounts"]}}
    assert having == {"roll-out", "predictor"}


# ── who runs it ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("new", [NIGHTLY, ARGO, FOLLOW], ids=["schedule", "argo", "follow"])
def test_running_job_prevents_a_second_pipeline(
    cluster: ApiServer, kube: Kube, folder: Path, new: str
) -> None:
    run(kube, folder)
    give(cluster, "Job", RUNS)
    words = refused(kube, cluster, folder, new)
    assert "Job ads-pipeline is running, and the pipeline is now configured to run in another way" in words
    assert "kubectl -n shop delete job.batch ads-pipeline --cascade=foreground" in words
    assert words.endswith("Nothing was changed.")


@pytest.mark.parametrize(
    ("new", "expected"),
    [
        ((NIGHTLY,), "CronJob ads-pipeline"),
        ((ARGO,), "Workflow ads-pipeline"),
        ((ARGO, NIGHTLY), "CronWorkflow ads-pipeline"),
        ((FOLLOW,), "Deployment ads-trainer"),
    ],
    ids=["schedule", "argo", "argo at times", "follow"],
)
def test_finished_job_is_replaced_by_another_kind_and_back(
    cluster: ApiServer, kube: Kube, folder: Path, new: tuple[str, ...], expected: str
) -> None:
    run(kube, folder)
    give(cluster, "Job", DONE)
    there = run(kube, folder, *new)
    assert "Job ads-pipeline" in there.removed and expected in there.created
    assert pipelines(cluster) == [expected]
    if expected == "Workflow ads-pipeline":
        give(cluster, "Workflow", {"phase": "Succeeded"})
    back = run(kube, folder)
    assert expected in back.removed and back.created == ["Job ads-pipeline"]
    assert pipelines(cluster) == ["Job ads-pipeline"]
    assert cluster.names("WorkflowTemplate") == []


@pytest.mark.parametrize(
    ("kind", "old", "status", "command"),
    [
        ("CronJob", (NIGHTLY,), {"active": [ACTIVE]}, "delete cronjob ads-pipeline --cascade=foreground"),
        ("CronWorkflow", (ARGO, NIGHTLY), {"active": [ACTIVE]}, f"patch workflow ads-pipeline-1 {STOP}"),
        ("Workflow", (ARGO,), {"phase": "Running"}, f"patch workflow ads-pipeline {STOP}"),
    ],
)
def test_active_run_prevents_a_change_of_kind(
    cluster: ApiServer,
    kube: Kube,
    folder: Path,
    kind: str,
    old: tuple[str, ...],
    status: dict[str, Any],
    command: str,
) -> None:
    run(kube, folder, *old)
    give(cluster, kind, status)
    words = refused(kube, cluster, folder)
    assert f"{kind} ads-pipeline is running" in words
    assert f"kubectl -n shop {command}" in words
    assert pipelines(cluster) == [f"{kind} ads-pipeline"]


@pytest.mark.parametrize("new", [(), (FOLLOW,)], ids=["job", "trainer"])
def test_apply_waits_for_terminating_pods_of_the_previous_run(
    bare: ApiServer, kube: Kube, folder: Path, new: tuple[str, ...]
) -> None:
    bare.namespace("shop", labels("access"))
    ending = pod("ads-pipeline-old", "pipeline", "Running", container("pipeline", running={}))
    ending["metadata"]["deletionTimestamp"] = "2026-11-16T11:00:00Z"
    bare.put(ending)
    bare.linger["ads-pipeline-old"] = 2  # kubectl delete job does not wait for it
    run(kube, folder, *new)
    assert bare.names("Pod") == []
    assert pipelines(bare) == (["Deployment ads-trainer"] if new else ["Job ads-pipeline"])


def test_new_pipeline_is_created_after_the_old_one_is_deleted(
    bare: ApiServer, kube: Kube, folder: Path
) -> None:
    run(kube, folder, FOLLOW)
    bare.linger["ads-trainer"] = 2  # its pod takes a while to terminate
    bare.writes.clear()
    run(kube, folder)
    assert bare.writes.index(("delete", "Deployment", "ads-trainer")) == 0
    assert ("apply", "Job", "ads-pipeline") in bare.writes
    assert pipelines(bare) == ["Job ads-pipeline"]
