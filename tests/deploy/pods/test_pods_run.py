"""Runs the pods of a rendered deployment: a complete small pipeline on Ray, and predictions from its endpoint.

Every container's command is run exactly as in the manifests, with a read-only root file system, the user id
of the manifest and no capabilities.
"""

from __future__ import annotations

import json
import re
import shutil
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from pod_runner import Pods, missing

import clickline
from clickline.deploy.render import render

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),  # a busy machine may be slow
    pytest.mark.skipif(missing() is not None, reason=missing() or ""),
]

SMALL = """
name: ads
data: {format: criteo, train: data/train.tsv, eval: data/eval.tsv}
model: {embedding_dim: 4, hidden: [8]}
gate: {auc: 0.55, extra_epochs: 0}
deploy:
  identity: {user: 4711, group: 4712, fs_group: 4713}
"""
ON_RAY = (
    "train={mode: cluster, workers: {min: 1, max: 1}, embedding_servers: 2, batch_size: 256}",
    "tracking.enabled=false",
    "deploy.serving={replicas: 1, lookup: {replicas: 1}}",
)
BY_OPERATORS = (
    "train.batch_size=256",
    "deploy.workflow.kind=argo",
    "deploy.tracking.enabled=true",
    "deploy.serving.kind=knative",
)
BY_THE_HOUR = (
    "data.train=data/{date}/{hour}/*.tsv",
    "data.eval=null",
    "data.dates.from=20260101/00",
    "train.batch_size=256",
    "tracking.enabled=false",
    "deploy.workflow.follow=true",
    "gate={}",
)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Callable[..., Pods]]:
    """A node with the objects of a config, and the data pod."""
    with ExitStack() as ends:

        def make(*overrides: str) -> Pods:
            (tmp_path / "clickline.yaml").write_text(SMALL)
            made = render(tmp_path / "clickline.yaml", overrides)
            tools = yaml.safe_load_all(made.files["tools/data-pod.yaml"])
            folder = tmp_path / "node"
            folder.mkdir()
            objects = [*made.objects, *(one for one in tools if one["kind"] == "Pod")]
            running = Pods(folder, objects, kernels(tmp_path / "kernels"))
            ends.callback(running.close)
            return running

        yield make


def fill(pods: Pods, *options: str) -> None:
    """Logs for the data volume, as a user puts them there."""
    data = pods.start("Pod", "ads-data")
    pods.run(
        data, "Pod", "ads-data", ["clickline", "sample", "--format", "criteo", "--out", "data", *options]
    )
    pods.kill(data)


def kernels(folder: Path) -> Path:
    """The image's /opt: compiled kernels, as far as other tests have compiled them."""
    stored = Path(clickline.__file__).parent / "__pycache__" / "kernels"
    stored.mkdir(parents=True, exist_ok=True)
    shutil.copytree(stored, folder)
    return folder


def test_pipeline_on_ray_and_its_endpoint(node: Callable[..., Pods]) -> None:
    pods = node(*ON_RAY)
    fill(pods, "--rows", "6000")

    # In any order, as on a cluster: none may need another to start first.
    predictor = pods.start("Deployment", "ads-predictor")
    head = pods.start("StatefulSet", "ads-ray-head")
    pods.until_ready(head, "StatefulSet", "ads-ray-head")
    worker = pods.start("StatefulSet", "ads-ray-worker")
    lookups = [pods.start("StatefulSet", "ads-lookup", index) for index in range(2)]
    pipeline = pods.start("Job", "ads-pipeline")
    assert pods.ended(pipeline, 400) == 0, pods.log(pipeline)
    result = pods.log(pipeline)
    assert "publish" in result and "Traceback" not in result
    assert pods.alive(head) and pods.alive(worker)

    for index, lookup in enumerate(lookups):
        pods.until_ready(lookup, "StatefulSet", "ads-lookup")
        assert f'"lookup, shard {index}"' in pods.log(lookup)
    pods.until_ready(predictor, "Deployment", "ads-predictor")
    answer = ask(pods.address(predictor), {"instances": [{"C1": "a", "I1": "3"}, {}]})
    assert len(answer["predictions"]) == 2 and all(
        0 < one["logistic"][0] < 1 for one in answer["predictions"]
    )
    assert pods.stop(predictor) == 0


def ask(address: str, body: object) -> Any:
    call = urllib.request.Request(
        f"http://{address}:8501/v1/models/ads:predict", data=json.dumps(body).encode(), method="POST"
    )
    with urllib.request.urlopen(call, timeout=10) as reply:
        return json.load(reply)


def test_workflow_steps_tracking_server_and_knative_predictor(
    node: Callable[..., Pods],
) -> None:
    pods = node(*BY_OPERATORS)
    fill(pods, "--rows", "6000")
    tracking = pods.start("Deployment", "ads-tracking")
    template = pods.objects["WorkflowTemplate", "ads-pipeline"]["spec"]
    steps = {one["name"]: one for one in template["templates"] if "container" in one}
    for name, step in steps.items():
        words = step["container"]["command"]
        words[:] = [re.sub(r"\{\{=.*\}\}", "0", word) for word in words]  # the first attempt
        pods.add(f"ads-{name}", {}, {**step, "containers": [step["container"]], "volumes": step["volumes"]})
        pods.objects["Pod", f"ads-{name}"]["spec"]["containers"][0]["name"] = name

    pods.until_ready(tracking, "Deployment", "ads-tracking", 240)
    revision = pods.objects["Service", "ads-predictor"]["spec"]["template"]
    pods.add("ads-revision", revision["metadata"].get("labels", {}), revision["spec"])
    pods.objects["Pod", "ads-revision"]["spec"]["containers"][0].setdefault("name", "predictor")
    predictor = pods.start("Pod", "ads-revision")
    for name in ("prepare", "train", "publish", "roll-out"):
        step = pods.start("Pod", f"ads-{name}")
        assert pods.ended(step, 300) == 0, pods.log(step)
    assert "1 predictor serves the current version" in pods.log("ads-roll-out"), pods.log("ads-roll-out")
    answer = ask(pods.address(predictor), {"instances": [{"C1": "a", "I1": "3"}]})
    assert 0 < answer["predictions"][0]["logistic"][0] < 1

    call = urllib.request.Request(
        f"http://{pods.address(tracking)}:5000/api/2.0/mlflow/experiments/get-by-name?experiment_name=ads",
        headers={"Host": "ads-tracking:5000"},
    )
    with urllib.request.urlopen(call, timeout=10) as reply:
        assert json.load(reply)["experiment"]["name"] == "ads"


def test_trainer_follows_new_hours(node: Callable[..., Pods]) -> None:
    pods = node(*BY_THE_HOUR)
    fill(pods, "--rows", "8000", "--hours", "2")
    trainer = pods.start("Deployment", "ads-trainer")
    predictor = pods.start("Deployment", "ads-predictor")
    pods.until_ready(predictor, "Deployment", "ads-predictor", 240)
    assert pods.alive(trainer)
    assert pods.stop(trainer) == 0
    assert pods.stop(predictor) == 0


def test_unwritable_volume_is_reported(node: Callable[..., Pods]) -> None:
    pods = node(*ON_RAY)
    claim = pods.folder / "claim-ads-models"
    claim.mkdir(mode=0o755)
    with pytest.raises(AssertionError, match=r"/clickline/\.clickline") as caught:
        pods.start("Job", "ads-pipeline")
    assert "fs_group" in str(caught.value) and "Traceback" not in str(caught.value)


def test_data_pod_is_not_ready_on_an_unwritable_volume(node: Callable[..., Pods]) -> None:
    pods = node(*ON_RAY)
    claim = pods.folder / "claim-ads-data"
    claim.mkdir(mode=0o755)  # as the kubelet creates a host folder: owned by root
    with pytest.raises(AssertionError, match="/clickline/data: Permission denied") as caught:
        pods.start("Pod", "ads-data")
    assert "chown -R 4711:4712" in str(caught.value) and "Traceback" not in str(caught.value)
