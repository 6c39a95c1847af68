"""Plans of training deployments."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from clickline.config import load_config, resolved
from clickline.deploy.argo import workflow_objects
from clickline.deploy.kuberay import ray_job
from clickline.deploy.objects import DeployPlan
from clickline.deploy.pipeline_jobs import pipeline_objects
from clickline.deploy.ray_pods import cluster_overrides, ray_cluster
from clickline.deploy.volcano import volcano_job

_CONFIG = "name: ads\ndata: {train: data/train.tsv, eval: data/eval.tsv}\n"
_CLUSTER = "train.mode=cluster"

EVERY_KIND = {
    "local job": (),
    "local cron job": ("deploy.workflow.schedule=0 3 * * *",),
    "local trainer": ("deploy.workflow.follow=true",),
    "local argo": ("deploy.workflow.kind=argo",),
    "local argo cron": ("deploy.workflow.kind=argo", "deploy.workflow.schedule=0 3 * * *"),
    "plain job": (_CLUSTER,),
    "plain trainer": (_CLUSTER, "deploy.workflow.follow=true"),
    "plain argo": (_CLUSTER, "deploy.workflow.kind=argo"),
    "volcano": (_CLUSTER, "deploy.training.kind=volcano"),
    "volcano argo": (_CLUSTER, "deploy.training.kind=volcano", "deploy.workflow.kind=argo"),
    "kuberay": (_CLUSTER, "deploy.training.kind=kuberay"),
    "kuberay growing": (_CLUSTER, "deploy.training.kind=kuberay", "train.workers.max=3"),
    "kuberay gang": (_CLUSTER, "deploy.training.kind=kuberay", "deploy.training.gang=true"),
    "kuberay argo": (_CLUSTER, "deploy.training.kind=kuberay", "deploy.workflow.kind=argo"),
    "volcano trainer": (_CLUSTER, "deploy.training.kind=volcano", "deploy.workflow.follow=true"),
    "everything named": (
        _CLUSTER,
        "deploy.training={kind: volcano, queue: night}",
        "deploy.nodes={selector: {disk: fast}, priority_class: low, tolerations: [{key: spot, operator: Exists}]}",
        "deploy.pull_secrets=[registry]",
        "deploy.secrets.environment=[s3]",
        "deploy.resources.ray_worker={cpu_limit: '2', memory_limit: 8Gi, gpu: 1}",
    ),
}


def plan(*overrides: str) -> DeployPlan:
    """The config in the pods, with the overrides of training."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(_CONFIG)
        file.flush()

        def load(*more: str) -> Any:
            return load_config(Path(file.name), [*overrides, *more], folder=Path("/clickline"))

        changes = cluster_overrides(load())
        config = load(*(f"{key}={value}" for key, value in changes.items()))
    return DeployPlan(config, {}, resolved(config))


def objects(one: DeployPlan) -> list[dict[str, Any]]:
    """The objects of these modules."""
    operated = [*volcano_job(one), *ray_job(one)] if one.deploy.workflow.kind == "job" else []
    ran = workflow_objects(one) if one.deploy.workflow.kind == "argo" else pipeline_objects(one)
    return [*ray_cluster(one), *operated, *ran]


def the(kind: str, made: list[dict[str, Any]], name: str | None = None) -> dict[str, Any]:
    """The only object of its kind, or of its kind and name."""
    found = [one for one in made if one["kind"] == kind and name in (None, one["metadata"]["name"])]
    assert len(found) == 1, [(one["kind"], one["metadata"]["name"]) for one in made]
    return found[0]
