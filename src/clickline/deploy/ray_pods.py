"""Ray from core objects: a head and workers, each of which comes back alone when it is lost.

    StatefulSet <name>-ray-head      knows who is there, computes nothing
    StatefulSet <name>-ray-worker    workers and shards of training, pieces of prepare; a worker a pod
    Service     <name>-ray           a name for the head that stays when its pod is another

The driver joins from a pod of its own. What Volcano and KubeRay run differs in who starts the pods, not in the pods.
"""

from __future__ import annotations

import math
from typing import Any

from clickline.config import Config
from clickline.config.deploy_sections import amount
from clickline.deploy.objects import DeployPlan, Object
from clickline.deploy.pods import pod

HEAD_PORTS = {"gcs": 6379, "node-manager": 6380, "object-manager": 6381}
WORKER_PORTS = {"node-manager": 6382, "object-manager": 6383}
"""Beside these, processes of Ray and of training open ports of their own among each other."""

NO_MEMORY = 1
"""Bytes that a node without work has to give away: what asks for memory, a shard, never lands there."""

OBJECT_STORE = 256 << 20
"""Of a worker, in /dev/shm. Batches go from process to process; little passes through here."""

_SMALLEST_STORE = 75 << 20  # that Ray starts with
_SHARDS_SHARE = 0.6  # of a pod's memory, as training reckons where nobody says
_COMMON_OPTIONS = (
    "--disable-usage-stats",
    "--include-log-monitor=false",
)  # what is printed goes to files of ours
_POD_IP = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}


def ray_cluster(plan: DeployPlan) -> list[Object]:
    """Ray from core objects; nothing where training needs none, or an operator runs it."""
    if not plan.on_ray or uses_operator(plan.config):
        return []
    _, most = worker_range(plan.config)
    passing = ray_is_temporary(plan)
    return [
        ray_service(plan),
        _stateful_set(plan, "ray-head", None if passing else 1, head(plan)),
        _stateful_set(plan, "ray-worker", None if passing else most, worker(plan)),
    ]


def ray_is_temporary(plan: DeployPlan) -> bool:
    """Whether Ray is there only while a pipeline runs (`hold`). A learner never ends."""
    return plan.on_ray and not uses_operator(plan.config) and not plan.deploy.workflow.follow


def uses_operator(config: Config) -> bool:
    """Whether Volcano or KubeRay runs driver and Ray. Learning on as hours arrive never ends, and takes the cluster for
    its history alone: no job, so core objects run it."""
    return (
        config.train.mode == "cluster"
        and config.deploy.training.kind != "plain"
        and not config.deploy.workflow.follow
    )


def head_address(config: Config) -> str:
    """`cluster.address` in the pods. KubeRay runs the driver on the head."""
    if uses_operator(config) and config.deploy.training.kind == "kuberay":
        return "auto"
    return f"{config.name}-ray-head-0.{config.name}-ray:{HEAD_PORTS['gcs']}"


def cluster_overrides(config: Config) -> dict[str, object]:
    """What the config in the pods must say beyond the user's, by key; what the user set stays, but for the address.

    Every worker pod has room for one worker, so there are no more workers than pods. A shard asks for memory, which
    only worker pods have to give: it never lands on the head or beside the driver.
    """
    if config.train.mode != "cluster":
        return {}
    least, most = worker_range(config)
    changes: dict[str, object] = {"cluster.address": head_address(config)}
    if config.train.workers.max is None:
        changes["train.workers.max"] = most
    if config.cluster.embedding_server.memory == "auto":
        whole = worker_memory(config)
        asked = config.cluster.worker.memory
        rest = whole if asked == "auto" else max(0, whole - int(asked))
        share = min(_SHARDS_SHARE * whole, rest) // math.ceil(config.train.embedding_servers / least)
        changes["cluster.embedding_server.memory"] = max(1 << 20, int(share))
    return changes


def worker_range(config: Config) -> tuple[int, int]:
    """Worker pods at least and at most; without a most, no more than at least."""
    section = config.train.workers
    return section.min, section.max or section.min


def worker_cpus(config: Config) -> int:
    """CPUs that a worker pod declares to Ray: for its worker, and its part of the shards. Prepare's pieces take one."""
    least, _ = worker_range(config)
    shards = math.ceil(config.train.embedding_servers / least) * config.cluster.embedding_server.cpus
    return max(1, math.ceil(config.cluster.worker.cpus + shards))


def worker_memory(config: Config) -> int:
    """Bytes that a worker pod declares to Ray."""
    return int(amount(config.deploy.resources.ray_worker.memory_limit))


# ── pods ───────────────────────────────────────────────────────────────────────────────────────


def head(plan: DeployPlan, *, restart: str | None = None) -> Object:
    """A pod with Ray's head. `ray start` ends when one of its processes does, and the pod starts it anew."""
    command = [
        "ray",
        "start",
        "--head",
        "--block",
        "--node-ip-address=$(POD_IP)",
        f"--port={HEAD_PORTS['gcs']}",
        *_ports(HEAD_PORTS),
        "--num-cpus=0",
        f"--memory={NO_MEMORY}",
        f"--object-store-memory={_SMALLEST_STORE}",
        "--include-dashboard=false",
        "--no-monitor",  # of Ray's own autoscaler
        *_COMMON_OPTIONS,
    ]
    return _with_priority(
        plan,
        pod(
            plan,
            "ray-head",
            command,
            resources=plan.deploy.resources.ray_head,
            ports=HEAD_PORTS,
            probes=_readiness("gcs"),
            ray=True,
            extra_env=[_POD_IP],
            restart=restart,
        ),
    )


def worker(plan: DeployPlan, *, restart: str | None = None) -> Object:
    """A pod with a node of Ray. It reads the click logs too: prepare's pieces run here."""
    command = [
        "ray",
        "start",
        "--block",
        f"--address={head_address(plan.config)}",
        "--node-ip-address=$(POD_IP)",
        *_ports(WORKER_PORTS),
        f"--num-cpus={worker_cpus(plan.config)}",
        f"--memory={worker_memory(plan.config)}",
        f"--object-store-memory={OBJECT_STORE}",
        *_COMMON_OPTIONS,
    ]
    template = pod(
        plan,
        "ray-worker",
        command,
        resources=plan.deploy.resources.ray_worker,
        ports=WORKER_PORTS,
        probes=_readiness("node-manager"),
        ray=True,
        data=True,
        extra_env=[_POD_IP],
        restart=restart,
        wait_for=head_address(plan.config),
    )
    return _with_priority(plan, template)


def driver_role(plan: DeployPlan) -> str:
    return "learner" if plan.deploy.workflow.follow else "pipeline"


def driver_command(plan: DeployPlan) -> list[str]:
    """The stages, or hours as they arrive."""
    follow = ["--follow"] if plan.deploy.workflow.follow else []
    return [
        "clickline",
        "up",
        *follow,
        "--no-serve",
        "--no-studio",
    ]  # nobody outside reaches a page of this pod


def driver(
    plan: DeployPlan,
    command: list[str],
    *,
    ray: bool = True,
    restart: str | None = None,
    calls_predictors: bool = False,
) -> Object:
    """A pod that runs stages; with training on Ray it is a node of it that has nothing to give. `ray`: whether the
    command needs it; `calls_predictors`: whether it asks predictors."""
    on_ray = plan.on_ray and ray
    template = pod(
        plan,
        driver_role(plan),
        command,
        resources=plan.deploy.resources.pipeline,
        ray=on_ray,
        data=True,
        restart=restart,
        wait_for=head_address(plan.config) if on_ray else None,
        calls_predictors=calls_predictors,
    )
    return _with_priority(plan, template)


def _ports(ports: dict[str, int]) -> list[str]:
    return [f"--{name}-port={ports[name]}" for name in ("node-manager", "object-manager")]


def _readiness(port: str) -> Object:
    """Whether Ray's own process takes connections. That it lives needs no probe: `ray start --block` ends with it."""
    return {"readinessProbe": tcp_probe(port, failures=3)}


def tcp_probe(port: str, *, failures: int) -> Object:
    return {"tcpSocket": {"port": port}, "periodSeconds": 5, "failureThreshold": failures}


def _with_priority(plan: DeployPlan, template: Object) -> Object:
    if plan.on_ray and plan.deploy.nodes.priority_class is not None:
        template["spec"]["priorityClassName"] = plan.deploy.nodes.priority_class
    return template


# ── what keeps them ────────────────────────────────────────────────────────────────────────────


def ray_service(plan: DeployPlan) -> Object:
    """The head's name. It is there before the head is ready: whoever waits for it asks by name."""
    return plan.object(
        "v1",
        "Service",
        plan.object_name("ray"),
        "ray-head",
        {
            "spec": {
                "clusterIP": "None",
                "publishNotReadyAddresses": True,
                "selector": plan.selector("ray-head"),
                "ports": [{"name": name, "port": port} for name, port in HEAD_PORTS.items()],
            }
        },
    )


def _stateful_set(plan: DeployPlan, role: str, replicas: int | None, template: Object) -> Object:
    """Pods that come back one by one under their names, each without a look at the others. None: a number here would
    undo, with every apply, what the pipeline has asked for."""
    body: dict[str, Any] = {
        **({} if replicas is None else {"replicas": replicas}),
        "serviceName": plan.object_name("ray"),
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": plan.selector(role)},
        "template": template,
    }
    return plan.object("apps/v1", "StatefulSet", plan.object_name(role), role, {"spec": body})
