"""Ray is there while a pipeline runs, and holds no places of the cluster before and after.

A container beside the pipeline's own asks for Ray's pods when it begins, and lets them go when it is ended: the kubelet
ends it when the pipeline has ended, however that was. It alone has a token of the cluster's API, which opens nothing
but the sizes of these two StatefulSets; the pipeline, which runs code of users, has none. Of Argo's workflow, whose
steps are pods of their own, the first step asks for Ray, and what Argo runs at the very end lets it go.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from threading import Event

from clickline.errors import ClusterError
from clickline.stages.deploy.kube import ApiRefused, Kube
from clickline.stages.deploy.objects import Object, Plan
from clickline.stages.deploy.pods import SCRATCH, environment, security
from clickline.stages.deploy.training import comes_and_goes, workers

__all__ = ["ask_for", "holder_command", "holder_container", "holder_volume", "let_go", "rules"]

_POLL_SECONDS = 1.0
_MOUNTED = "/var/run/secrets/kubernetes.io/serviceaccount"
_MARK = SCRATCH / "ray-is-asked-for"


def ask_for(
    kube: Kube, namespace: str, sizes: Mapping[str, int], stopped: Event, say: Callable[[str], None]
) -> None:
    """Bring StatefulSets to their sizes. Pods of a run before are let go to their end first: who joined them would end
    with them."""
    for name, size in sizes.items():
        item = _stateful_set(namespace, name)
        told = False
        while not stopped.is_set():
            scale = kube.get("apps/v1", "StatefulSet", name, namespace, part="scale")
            if scale is None:
                raise ClusterError(
                    f"StatefulSet {name} does not exist in namespace {namespace}. `clickline deploy apply` makes it."
                )
            wanted, there = scale["spec"].get("replicas", 0), scale.get("status", {}).get("replicas", 0)
            if wanted or not there:
                break
            if not told:
                say(f"{name}: pods of the run before are ending")
                told = True
            stopped.wait(_POLL_SECONDS)
        if stopped.is_set():
            return
        if wanted != size:
            kube.patch(item, {"spec": {"replicas": size}}, part="scale")
        say(f"{name}: {size} asked for")


def let_go(connect: Callable[[], Kube], namespace: str, names: list[str], say: Callable[[str], None]) -> None:
    """Bring StatefulSets to none, the last one first; again and again while the API cannot be reached: whoever ended us
    has set how long."""
    left = list(names)
    while left:
        try:
            kube = connect()  # by now the token is another
            try:
                kube.patch(_stateful_set(namespace, left[-1]), {"spec": {"replicas": 0}}, part="scale")
            finally:
                kube.close()
        except ApiRefused as refused:
            if refused.status != 404:  # else it is gone, with the deployment
                say(f"{left[-1]} keeps its pods: {refused}")
        except ClusterError as error:
            say(str(error))
            time.sleep(_POLL_SECONDS)
            continue
        else:
            say(f"{left[-1]}: let go")
        left.pop()


def _stateful_set(namespace: str, name: str) -> Object:
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": name, "namespace": namespace},
    }


# ── in the manifests ───────────────────────────────────────────────────────────────────────────


def holder_command(plan: Plan, *options: str) -> list[str]:
    sizes = {plan.called("ray-head"): 1, plan.called("ray-worker"): workers(plan.config)[1]}
    named = [f"{name}={size}" for name, size in sizes.items()]
    return ["clickline", "deploy", "hold-ray", "--namespace", plan.deploy.namespace, *options, *named]


def holder_container(plan: Plan) -> Object:
    """A sidecar, in Kubernetes' sense: an init container that stays. The others begin when it has asked for Ray."""
    return {
        "name": "ray",
        "command": holder_command(plan, "--mark", str(_MARK)),
        "image": plan.deploy.image,
        "imagePullPolicy": plan.deploy.pull,
        "workingDir": "/clickline",
        "env": environment(plan, ray=False),
        "restartPolicy": "Always",
        "startupProbe": {
            "exec": {"command": ["test", "-e", str(_MARK)]},
            "periodSeconds": 1,
            "failureThreshold": 3600,
        },
        "volumeMounts": [
            {"name": "scratch", "mountPath": str(SCRATCH)},
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "api", "mountPath": _MOUNTED, "readOnly": True},
        ],
        "securityContext": security(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "resources": {
            "requests": {"cpu": "10m", "memory": "96Mi"},
            "limits": {"memory": "256Mi"},
        },
    }


def holder_volume() -> Object:
    """What Kubernetes would mount into every container of the pod, for one of them."""
    namespace = {"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}}
    sources = [
        {"serviceAccountToken": {"path": "token"}},
        {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
        {"downwardAPI": {"items": [namespace]}},
    ]
    return {"name": "api", "projected": {"sources": sources}}


def rules(plan: Plan) -> list[Object]:
    """What it may do, as rules of a Role."""
    if not comes_and_goes(plan):
        return []
    return [
        {
            "apiGroups": ["apps"],
            "resources": ["statefulsets/scale"],
            "resourceNames": [plan.called("ray-head"), plan.called("ray-worker")],
            "verbs": ["get", "patch"],
        }
    ]
