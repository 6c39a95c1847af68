"""Training by the KubeRay operator: a RayJob whose entrypoint, on the head, runs the stages.

The operator derives the command of head and workers from `rayStartParams`, and adds probes, an init container that
waits for the head, the submitter's command, the token (authOptions) and, if the cluster can grow, the autoscaler.
"""

from __future__ import annotations

from shlex import join
from typing import Any

from clickline.config.deploy_sections import Resources, amount
from clickline.deploy.objects import WORKING_FOLDER, DeployPlan, Object
from clickline.deploy.pods import pod, security
from clickline.deploy.ray_pods import (
    NO_MEMORY,
    OBJECT_STORE,
    WORKER_PORTS,
    tcp_probe,
    worker_cpus,
    worker_memory,
    worker_range,
)

_RAY_VERSION = "2.60.0"
"""Tells the operator what this Ray supports; the oldest version that Clickline runs with."""

_TTL_SECONDS = 60  # the cluster stays after the job has finished, for a look at its logs
_SUBMITTER = Resources(cpu="50m", memory="128Mi", memory_limit="512Mi")
_AUTOSCALER = {"requests": {"cpu": "50m", "memory": "256Mi"}, "limits": {"memory": "512Mi"}}
_HEAD_PORTS = {"gcs-server": 6379, "dashboard": 8265}


def ray_job_for(plan: DeployPlan, command: list[str]) -> Object:
    """A RayJob whose entrypoint is `command`. A lost worker is replaced; a lost head starts again from the checkpoint
    with a new cluster. A RayJob ignores exit codes: a permanent failure, such as a failed gate, is retried in vain."""
    least, most = worker_range(plan.config)
    cluster: Object = {
        "rayVersion": _RAY_VERSION,
        "authOptions": {"mode": "token"},
        "headGroupSpec": {
            "rayStartParams": {
                "num-cpus": "0",
                "memory": str(NO_MEMORY),
                "object-store-memory": str(OBJECT_STORE),
                "disable-usage-stats": "true",
            },
            "template": _head(plan, autoscales=least < most),
        },
        "workerGroupSpecs": [
            {
                "groupName": "workers",
                "replicas": least,
                "minReplicas": least,
                "maxReplicas": most,
                "rayStartParams": {
                    "num-cpus": str(worker_cpus(plan.config)),
                    "memory": str(worker_memory(plan.config)),
                    **{f"{name}-port": str(port) for name, port in WORKER_PORTS.items()},
                    "object-store-memory": str(OBJECT_STORE),
                    "disable-usage-stats": "true",
                },
                "template": _worker(plan),
            }
        ],
    }
    if least < most:
        cluster["enableInTreeAutoscaling"] = True
        cluster["autoscalerOptions"] = {
            "version": "v2",
            "idleTimeoutSeconds": 120,
            "imagePullPolicy": plan.deploy.pull,
            "securityContext": security(),
            "resources": _AUTOSCALER,
            "env": [{"name": "HOME", "value": "/tmp"}, {"name": "RAY_USAGE_STATS_ENABLED", "value": "0"}],
            "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
        }
    spec = {
        "entrypoint": join([*command, "-c", str(WORKING_FOLDER / "clickline.yaml")]),
        "backoffLimit": plan.deploy.workflow.retries,
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": _TTL_SECONDS,
        "submitterPodTemplate": _submitter(plan),
        "rayClusterSpec": cluster,
    }
    # The submitter is a Job of the same name. The operator would mistake an existing Job, such as the pipeline's, for
    # it and never submit the entrypoint.
    job = plan.object("ray.io/v1", "RayJob", "pipeline", name=plan.object_name("ray"), spec=spec)
    job["metadata"]["labels"] |= _gang(plan)
    return job


def _gang(plan: DeployPlan) -> dict[str, str]:
    """Labels with which the operator, installed with Volcano as its batch scheduler, creates a PodGroup."""
    if not plan.deploy.training.gang:
        return {}
    labels = {"ray.io/scheduler-name": "volcano"}
    if plan.deploy.training.queue is not None:
        labels["volcano.sh/queue-name"] = plan.deploy.training.queue
    if plan.deploy.nodes.priority_class is not None:
        labels["ray.io/priority-class-name"] = plan.deploy.nodes.priority_class
    return labels


# ── pods ───────────────────────────────────────────────────────────────────────────────────────


def _head(plan: DeployPlan, *, autoscales: bool) -> Object:
    """The head also runs the stages and has the resources of both. The autoscaler calls the Kubernetes API."""
    resources = _sum_resources(plan.deploy.resources.ray_head, plan.deploy.resources.pipeline)
    probes = _probes("dashboard", "gcs-server")
    return _pod(plan, "ray-head", resources, ports=_HEAD_PORTS, probes=probes, data=True, uses_api=autoscales)


def _worker(plan: DeployPlan) -> Object:
    probes = _probes("node-manager", "node-manager")
    resources = plan.deploy.resources.ray_worker
    return _pod(plan, "ray-worker", resources, ports=WORKER_PORTS, probes=probes, data=True)


def _probes(ready: str, alive: str) -> Object:
    """Replace the operator's probes, which start an interpreter every few seconds in each pod: too much for a small
    node."""
    return {"readinessProbe": tcp_probe(ready, failures=3), "livenessProbe": tcp_probe(alive, failures=24)}


def _submitter(plan: DeployPlan) -> Object:
    """It submits the entrypoint and prints its log: it needs no volumes and no init container."""
    template = _pod(plan, "pipeline", _SUBMITTER, restart="Never")
    spec = template["spec"]
    del spec["initContainers"]
    kept = ("scratch", "tmp")
    spec["volumes"] = [volume for volume in spec["volumes"] if volume["name"] in kept]
    for container in spec["containers"]:
        container["volumeMounts"] = [one for one in container["volumeMounts"] if one["name"] in kept]
        del container["workingDir"]
    return template


def _pod(plan: DeployPlan, role: str, resources: Resources, **options: Any) -> Object:
    """A pod template without what the operator sets: the command, and the token, which it keeps in a secret of its
    own."""
    template = pod(plan, role, [], resources=resources, ray=True, **options)
    spec: dict[str, Any] = template["spec"]
    for container in (*spec["initContainers"], *spec["containers"]):
        container["env"] = [one for one in container["env"] if one["name"] != "RAY_AUTH_TOKEN_PATH"]
    for container in spec["containers"]:
        del container["command"]
    if plan.deploy.nodes.priority_class is not None and not plan.deploy.training.gang:
        spec["priorityClassName"] = plan.deploy.nodes.priority_class
    return template


def _sum_resources(one: Resources, other: Resources) -> Resources:
    limits = (one.cpu_limit, other.cpu_limit)
    return Resources(
        cpu=_cores(one.cpu, other.cpu),
        memory=_bytes(one.memory, other.memory),
        cpu_limit=None if None in limits else _cores(*(limit for limit in limits if limit is not None)),
        memory_limit=_bytes(one.memory_limit, other.memory_limit),
        gpu=one.gpu + other.gpu,
    )


def _cores(*quantities: str) -> str:
    return f"{round(1000 * sum(map(amount, quantities)))}m"


def _bytes(*quantities: str) -> str:
    return f"{round(sum(map(amount, quantities)) / 2**20)}Mi"
