"""Scales Ray up while a pipeline runs, so that it takes no resources of the cluster before and after.

A sidecar of the pipeline scales Ray's StatefulSets up when it starts and down when it is terminated: the kubelet
terminates it when the pipeline has ended, for whatever reason. Only the sidecar has a token of the Kubernetes API,
which allows no more than to scale these two StatefulSets; the pipeline, which runs the users' code, has none. In an
Argo workflow, whose steps are separate pods, the first step scales Ray up and the exit handler scales it down."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from clickline.deploy.kube_client import ApiError, Kube
from clickline.deploy.objects import DeployPlan, Object
from clickline.deploy.pods import SCRATCH, environment, security
from clickline.deploy.ray_pods import ray_is_temporary, worker_range
from clickline.errors import ClusterError

StopCheck = Callable[[float], bool]
"""Waits for at most the given number of seconds; True as soon as it is time to stop."""

_POLL_SECONDS = 1.0
_KEEP_SECONDS = 5.0
_SCALE_DOWN_SECONDS = 300.0
"""How long scaling down is retried. In a pod the kubelet stops it sooner; nothing stops a step of Argo."""
_TRANSIENT = (409, 429)
"""Status codes that are worth a retry, besides those from 500."""
_TOKEN_MOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
_READY_FILE = SCRATCH / "ray-is-asked-for"


def scale_up(
    kube: Kube, namespace: str, sizes: Mapping[str, int], stopped: StopCheck, log: Callable[[str], None]
) -> None:
    """Scale StatefulSets to their sizes, and log which changed. First wait until the pods of the previous run are gone:
    a driver that joined them would end with them."""
    for name, size in sizes.items():
        waiting = False
        while not stopped(0):
            scale = kube.get_scale(name, namespace)
            if scale is None:
                raise ClusterError(
                    f"StatefulSet {name} does not exist in namespace {namespace}. `clickline deploy apply` creates it."
                )
            wanted, there = scale["spec"].get("replicas", 0), scale.get("status", {}).get("replicas", 0)
            if wanted or not there:
                break
            if not waiting:
                log(f"{name}: pods of the previous run are terminating")
                waiting = True
            if stopped(_POLL_SECONDS):
                return
        else:
            return
        if wanted != size:
            kube.set_scale(name, namespace, size)
            log(f"{name}: scaled to {size}")


def keep_scaled(
    connect: Callable[[], Kube],
    namespace: str,
    sizes: Mapping[str, int],
    stopped: StopCheck,
    log: Callable[[str], None],
) -> None:
    """Keep StatefulSets at their sizes until it is time to stop: an earlier pipeline that ends late may scale Ray down
    after this one has scaled it up."""
    last_error = ""
    while not stopped(_KEEP_SECONDS):
        try:
            with connect() as kube:  # each time, because the token is rotated
                scale_up(kube, namespace, sizes, stopped, log)
            last_error = ""
        except ClusterError as error:  # the pipeline can continue without the API
            if str(error) != last_error:
                last_error = str(error)
                log(f"{last_error} Trying again.")


def scale_down(
    connect: Callable[[], Kube], namespace: str, names: list[str], log: Callable[[str], None]
) -> None:
    """Scale StatefulSets to zero, the last one first; retry while the API cannot be reached or is busy. Raises
    `ClusterError` with those that keep their pods."""
    deadline = time.monotonic() + _SCALE_DOWN_SECONDS
    kept: list[str] = []
    left = list(names)
    while left:
        try:
            with connect() as kube:
                kube.set_scale(left[-1], namespace, 0)
        except ClusterError as error:
            gone = isinstance(error, ApiError) and error.status == 404  # deleted with the deployment
            if not gone and _is_transient(error) and time.monotonic() < deadline:
                log(str(error))
                time.sleep(_POLL_SECONDS)
                continue
            if not gone:
                kept.append(
                    f"{left[-1]} keeps its pods: {error} "
                    f"Scale it down: kubectl -n {namespace} scale statefulset {left[-1]} --replicas=0"
                )
        else:
            log(f"{left[-1]}: scaled to 0")
        left.pop()
    if kept:
        raise ClusterError("\n".join(kept))


def _is_transient(error: ClusterError) -> bool:
    return not isinstance(error, ApiError) or error.status >= 500 or error.status in _TRANSIENT


# ── in the manifests ───────────────────────────────────────────────────────────────────────────


def scaler_command(plan: DeployPlan, *options: str) -> list[str]:
    """The command that scales Ray up and down."""
    sizes = {plan.object_name("ray-head"): 1, plan.object_name("ray-worker"): worker_range(plan.config)[1]}
    named = [f"{name}={size}" for name, size in sizes.items()]
    return ["clickline", "deploy", "hold-ray", "--namespace", plan.deploy.namespace, *options, *named]


def scaler_container(plan: DeployPlan) -> Object:
    """A Kubernetes sidecar: an init container that keeps running. The others start once it has scaled Ray up."""
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
    """The volume with the API token, for the sidecar only; Kubernetes would mount it into every container."""
    namespace = {"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}}
    sources = [
        {"serviceAccountToken": {"path": "token"}},
        {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
        {"downwardAPI": {"items": [namespace]}},
    ]
    return {"name": "api", "projected": {"sources": sources}}


def scale_rules(plan: DeployPlan) -> list[Object]:
    """The Role rules of the sidecar."""
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
