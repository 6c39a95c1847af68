"""Ray by the KubeRay operator: a RayJob whose entrypoint, on the head, runs the stages.

The operator writes the command of head and workers from `rayStartParams`, adds their probes, a container that waits
for the head, the submitter's command, the token (authOptions) and, if the cluster grows, the autoscaler.
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
    driver_command,
    tcp_probe,
    uses_operator,
    worker_cpus,
    worker_memory,
    worker_range,
)

_RAY_VERSION = "2.60.0"
"""The operator asks for it to know what this Ray can do; the smallest that we run with."""

_TTL_SECONDS = 60  # that the cluster stays when the job has ended, for a look at its logs
_SUBMITTER = Resources(cpu="50m", memory="128Mi", memory_limit="512Mi")
_AUTOSCALER = {"requests": {"cpu": "50m", "memory": "256Mi"}, "limits": {"memory": "512Mi"}}
_HEAD_PORTS = {"gcs-server": 6379, "dashboard": 8265}


def ray_job(plan: DeployPlan) -> list[Object]:
    """The RayJob; nothing where another kind runs training."""
    if not uses_operator(plan.config) or plan.deploy.training.kind != "kuberay":
        return []
    return [ray_job_for(plan, driver_command(plan))]


def ray_job_for(plan: DeployPlan, command: list[str]) -> Object:
    """A RayJob whose entrypoint is `command`. A lost worker is made anew; a lost head begins again from the checkpoint,
    with a new cluster. A RayJob knows no exit codes: what ends for good, as a refused gate, ends so at each try."""
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
            "template": _head(plan, grows=least < most),
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
    made = plan.object(
        "ray.io/v1",
        "RayJob",
        # The submitter is a Job of the same name. One that is there, as the pipeline's of core objects, the operator
        # would take for it, and never hand the entrypoint over.
        plan.object_name("ray"),
        "pipeline",
        {
            "spec": {
                "entrypoint": join([*command, "-c", str(WORKING_FOLDER / "clickline.yaml")]),
                "backoffLimit": plan.deploy.workflow.retries,
                "shutdownAfterJobFinishes": True,
                "ttlSecondsAfterFinished": _TTL_SECONDS,
                "submitterPodTemplate": _submitter(plan),
                "rayClusterSpec": cluster,
            }
        },
    )
    made["metadata"]["labels"] |= _gang(plan)
    return made


def _gang(plan: DeployPlan) -> dict[str, str]:
    """The operator, installed with Volcano as its batch scheduler, makes a PodGroup of head and smallest workers."""
    if not plan.deploy.training.gang:
        return {}
    labels = {"ray.io/scheduler-name": "volcano"}
    if plan.deploy.training.queue is not None:
        labels["volcano.sh/queue-name"] = plan.deploy.training.queue
    if plan.deploy.nodes.priority_class is not None:
        labels["ray.io/priority-class-name"] = plan.deploy.nodes.priority_class
    return labels


# ── pods ───────────────────────────────────────────────────────────────────────────────────────


def _head(plan: DeployPlan, *, grows: bool) -> Object:
    """The stages run here, beside Ray's own processes: it takes what both take. The autoscaler calls the API."""
    resources = _sum_resources(plan.deploy.resources.ray_head, plan.deploy.resources.pipeline)
    return _for_operator(
        plan,
        pod(
            plan,
            "ray-head",
            [],
            resources=resources,
            ports=_HEAD_PORTS,
            probes=_probes("dashboard", "gcs-server"),
            ray=True,
            data=True,
            uses_api=grows,
        ),
    )


def _worker(plan: DeployPlan) -> Object:
    return _for_operator(
        plan,
        pod(
            plan,
            "ray-worker",
            [],
            resources=plan.deploy.resources.ray_worker,
            ports=WORKER_PORTS,
            probes=_probes("node-manager", "node-manager"),
            ray=True,
            data=True,
        ),
    )


def _probes(ready: str, alive: str) -> Object:
    """The operator's own start an interpreter every few seconds in each pod: a burden for a small node."""
    return {"readinessProbe": tcp_probe(ready, failures=3), "livenessProbe": tcp_probe(alive, failures=24)}


def _submitter(plan: DeployPlan) -> Object:
    """It hands the entrypoint over and shows what that prints: no volumes, nothing to prepare."""
    template = _for_operator(plan, pod(plan, "pipeline", [], resources=_SUBMITTER, ray=True, restart="Never"))
    spec = template["spec"]
    del spec["initContainers"]
    kept = ("scratch", "tmp")
    spec["volumes"] = [volume for volume in spec["volumes"] if volume["name"] in kept]
    for container in spec["containers"]:
        container["volumeMounts"] = [one for one in container["volumeMounts"] if one["name"] in kept]
        del container["workingDir"]
    return template


def _for_operator(plan: DeployPlan, template: Object) -> Object:
    """Without what the operator sets itself: the command, and the token, which it keeps in a secret of its own."""
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
