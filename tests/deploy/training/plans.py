"""Plans of training deployments."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from clickline.deploy.objects import DeployPlan
from clickline.deploy.render import config_text, pod_config

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

        config = pod_config(Path(file.name), overrides)
    return DeployPlan(config, {}, config_text(config))


def the(kind: str, made: list[dict[str, Any]], name: str | None = None) -> dict[str, Any]:
    """The only object of its kind, or of its kind and name."""
    found = [one for one in made if one["kind"] == kind and name in (None, one["metadata"]["name"])]
    assert len(found) == 1, [(one["kind"], one["metadata"]["name"]) for one in made]
    return found[0]
