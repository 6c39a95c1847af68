"""Ray is there while a pipeline runs, and holds no places of the cluster before and after.

A container beside the pipeline's own asks for Ray's pods when it begins, and lets them go when it is ended: the kubelet
ends it when the pipeline has ended, however that was. It alone has a token of the cluster's API, which opens nothing
but the sizes of these two StatefulSets; the pipeline, which runs code of users, has none. Of Argo's workflow, whose
steps are pods of their own, the first step asks for Ray, and what Argo runs at the very end lets it go.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from clickline.deploy.kube_client import ApiError, Kube
from clickline.deploy.objects import DeployPlan, Object
from clickline.deploy.pods import SCRATCH, environment, security
from clickline.deploy.ray_pods import ray_is_temporary, worker_range
from clickline.errors import ClusterError

StopCheck = Callable[[float], bool]
"""Waits for so many seconds at most; True as soon as it is time to end."""

_POLL_SECONDS = 1.0
_KEEP_SECONDS = 5.0
_SCALE_DOWN_SECONDS = 300.0
"""That releasing is tried. In a pod the kubelet ends it sooner; a step of Argo has nobody who would."""
_TRANSIENT = (409, 429)
"""Refusals that another try may not meet, beside those of 500 and above."""
_TOKEN_MOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
_READY_FILE = SCRATCH / "ray-is-asked-for"


def scale_up(
    kube: Kube, namespace: str, sizes: Mapping[str, int], stopped: StopCheck, say: Callable[[str], None]
) -> None:
    """Bring StatefulSets to their sizes, and say which had others. Pods of a run before are let go to their end first:
    who joined them would end with them."""
    for name, size in sizes.items():
        item = _stateful_set(namespace, name)
        told = False
        while not stopped(0):
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
            if stopped(_POLL_SECONDS):
                return
        else:
            return
        if wanted != size:
            kube.patch(item, {"spec": {"replicas": size}}, part="scale")
            say(f"{name}: {size} asked for")


def keep_scaled(
    connect: Callable[[], Kube],
    namespace: str,
    sizes: Mapping[str, int],
    stopped: StopCheck,
    say: Callable[[str], None],
) -> None:
    """Hold StatefulSets at their sizes until it is time to end: a pipeline that ended late lets Ray go after its
    successor has asked for it."""
    told = ""
    while not stopped(_KEEP_SECONDS):
        try:
            kube = connect()  # by now the token is another
            try:
                scale_up(kube, namespace, sizes, stopped, say)
            finally:
                kube.close()
            told = ""
        except ClusterError as error:  # the pipeline may well run on without the API
            if str(error) != told:
                told = str(error)
                say(f"{told} Looking again.")


def scale_down(
    connect: Callable[[], Kube], namespace: str, names: list[str], say: Callable[[str], None]
) -> None:
    """Bring StatefulSets to none, the last one first; again and again while the API cannot be reached or is busy.
    Raises `ClusterError` with those that keep their pods."""
    deadline = time.monotonic() + _SCALE_DOWN_SECONDS
    kept: list[str] = []
    left = list(names)
    while left:
        try:
            kube = connect()  # by now the token is another
            try:
                kube.patch(_stateful_set(namespace, left[-1]), {"spec": {"replicas": 0}}, part="scale")
            finally:
                kube.close()
        except ClusterError as error:
            gone = isinstance(error, ApiError) and error.status == 404  # with the deployment
            if not gone and _is_transient(error) and time.monotonic() < deadline:
                say(str(error))
                time.sleep(_POLL_SECONDS)
                continue
            if not gone:
                kept.append(
                    f"{left[-1]} keeps its pods: {error} "
                    f"Release them: kubectl -n {namespace} scale statefulset {left[-1]} --replicas=0"
                )
        else:
            say(f"{left[-1]}: let go")
        left.pop()
    if kept:
        raise ClusterError("\n".join(kept))


def _is_transient(error: ClusterError) -> bool:
    return not isinstance(error, ApiError) or error.status >= 500 or error.status in _TRANSIENT


def _stateful_set(namespace: str, name: str) -> Object:
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": name, "namespace": namespace},
    }


# ── in the manifests ───────────────────────────────────────────────────────────────────────────


def scaler_command(plan: DeployPlan, *options: str) -> list[str]:
    sizes = {plan.object_name("ray-head"): 1, plan.object_name("ray-worker"): worker_range(plan.config)[1]}
    named = [f"{name}={size}" for name, size in sizes.items()]
    return ["clickline", "deploy", "hold-ray", "--namespace", plan.deploy.namespace, *options, *named]


def scaler_container(plan: DeployPlan) -> Object:
    """A sidecar, in Kubernetes' sense: an init container that stays. The others begin when it has asked for Ray."""
    return {
        "name": "ray",
        "command": scaler_command(plan, "--mark", str(_READY_FILE)),
        "image": plan.deploy.image,
        "imagePullPolicy": plan.deploy.pull,
        "workingDir": "/clickline",
        "env": environment(plan, ray=False),
        "restartPolicy": "Always",
        "startupProbe": {
            "exec": {"command": ["test", "-e", str(_READY_FILE)]},
            "periodSeconds": 1,
            "failureThreshold": 3600,
        },
        "volumeMounts": [
            {"name": "scratch", "mountPath": str(SCRATCH)},
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "api", "mountPath": _TOKEN_MOUNT, "readOnly": True},
        ],
        "securityContext": security(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "resources": {
            "requests": {"cpu": "10m", "memory": "96Mi"},
            "limits": {"memory": "256Mi"},
        },
    }


def api_token_volume() -> Object:
    """What Kubernetes would mount into every container of the pod, for one of them."""
    namespace = {"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}}
    sources = [
        {"serviceAccountToken": {"path": "token"}},
        {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
        {"downwardAPI": {"items": [namespace]}},
    ]
    return {"name": "api", "projected": {"sources": sources}}


def scale_rules(plan: DeployPlan) -> list[Object]:
    """What it may do, as rules of a Role."""
    if not ray_is_temporary(plan):
        return []
    return [
        {
            "apiGroups": ["apps"],
            "resources": ["statefulsets/scale"],
            "resourceNames": [plan.object_name("ray-head"), plan.object_name("ray-worker")],
            "verbs": ["get", "patch"],
        }
    ]
