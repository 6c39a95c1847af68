"""Ray from core objects: a head and workers, each of which is restarted on its own.

    StatefulSet <name>-ray-head      the control plane; runs no tasks
    StatefulSet <name>-ray-worker    trainers and embedding servers, tasks of prepare; one training worker per pod
    Service     <name>-ray           a stable host name of the head

The driver joins from a pod of its own. Volcano and KubeRay start the same pods in another way.
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
"""Besides these, processes of Ray and of training open random ports among each other."""

NO_MEMORY = 1
"""Bytes that a node without work declares: an embedding server, which requests memory, is never placed there."""

OBJECT_STORE = 256 << 20
"""Bytes of a worker's object store, in /dev/shm. Batches go from process to process; little passes through here."""

_SMALLEST_STORE = 75 << 20  # with which Ray starts
_SHARDS_SHARE = 0.6  # of a pod's memory, as training assumes by default
_COMMON_OPTIONS = (
    "--disable-usage-stats",
    "--include-log-monitor=false",
)  # output goes to our own log files
_POD_IP = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}


def ray_cluster(plan: DeployPlan) -> list[Object]:
    """Ray from core objects."""
    _, most = worker_range(plan.config)
    temporary = ray_is_temporary(plan)
    return [
        ray_service(plan),
        _stateful_set(plan, "ray-head", None if temporary else 1, head(plan)),
        _stateful_set(plan, "ray-worker", None if temporary else most, worker(plan)),
    ]


def ray_is_temporary(plan: DeployPlan) -> bool:
    """Whether Ray runs only while a pipeline does (`ray_lifecycle`). A trainer runs continuously."""
    return plan.on_ray and not uses_operator(plan.config) and not plan.deploy.workflow.follow


def uses_operator(config: Config) -> bool:
    """Whether Volcano or KubeRay runs driver and Ray. Follow mode runs continuously, and uses Ray only for the hours
    before it: it is not a job, so core objects run it."""
    return (
        config.train.mode == "cluster"
        and config.deploy.training.kind != "plain"
        and not config.deploy.workflow.follow
    )


def head_address(config: Config) -> str:
    """The `cluster.address` in the pods. KubeRay runs the driver on the head."""
    if uses_operator(config) and config.deploy.training.kind == "kuberay":
        return "auto"
    return f"{config.name}-ray-head-0.{config.name}-ray:{HEAD_PORTS['gcs']}"


def cluster_overrides(config: Config) -> dict[str, object]:
    """Cluster settings that pods need, by dotted key. The user's own settings are kept, except the address.

    Every worker pod has room for one worker, so there are no more workers than pods. An embedding server requests
    memory, which only worker pods declare: it is never placed on the head or beside the driver.
    """
    if config.train.mode != "cluster":
        return {}
    least, most = worker_range(config)
    changes: dict[str, object] = {"cluster.address": head_address(config)}
    if config.train.workers.max is None:
        changes["train.workers.max"] = most
    if config.cluster.embedding_server.memory == "auto":
        memory = worker_memory(config)
        requested = config.cluster.worker.memory
        rest = memory if requested == "auto" else max(0, memory - int(requested))
        share = min(_SHARDS_SHARE * memory, rest) // math.ceil(config.train.embedding_servers / least)
        changes["cluster.embedding_server.memory"] = max(1 << 20, int(share))
    return changes


def worker_range(config: Config) -> tuple[int, int]:
    """The minimum and maximum number of worker pods; without a maximum, the minimum is both."""
    section = config.train.workers
    return section.min, section.max or section.min


def worker_cpus(config: Config) -> int:
    """CPUs that a worker pod declares to Ray: for its worker and its embedding servers. A task of prepare takes one."""
    least, _ = worker_range(config)
    shards = math.ceil(config.train.embedding_servers / least) * config.cluster.embedding_server.cpus
    return max(1, math.ceil(config.cluster.worker.cpus + shards))


def worker_memory(config: Config) -> int:
    """Bytes that a worker pod declares to Ray."""
    return int(amount(config.deploy.resources.ray_worker.memory_limit))


# ── pods ───────────────────────────────────────────────────────────────────────────────────────


def head(plan: DeployPlan, *, restart: str | None = None) -> Object:
    """The pod of Ray's head. `ray start` exits if one of its processes does, and the pod restarts it."""
    options = [
        "--head",
        "--block",
        "--node-ip-address=$(POD_IP)",
        f"--port={HEAD_PORTS['gcs']}",
        *_ports(HEAD_PORTS),
        "--num-cpus=0",
        f"--memory={NO_MEMORY}",
        f"--object-store-memory={_SMALLEST_STORE}",
        "--include-dashboard=false",
        "--no-monitor",  # Ray's own autoscaler
    ]
    resources = plan.deploy.resources.ray_head
    return _ray_pod(plan, "ray-head", options, HEAD_PORTS, "gcs", resources=resources, restart=restart)


def worker(plan: DeployPlan, *, restart: str | None = None) -> Object:
    """The pod of a Ray worker node. It also reads the click logs: the tasks of prepare run here."""
    address = head_address(plan.config)
    options = [
        "--block",
        f"--address={address}",
        "--node-ip-address=$(POD_IP)",
        *_ports(WORKER_PORTS),
        f"--num-cpus={worker_cpus(plan.config)}",
        f"--memory={worker_memory(plan.config)}",
        f"--object-store-memory={OBJECT_STORE}",
    ]
    more = {"data": True, "restart": restart, "wait_for": address}
    resources = plan.deploy.resources.ray_worker
    return _ray_pod(plan, "ray-worker", options, WORKER_PORTS, "node-manager", resources=resources, **more)


def _ray_pod(
    plan: DeployPlan, role: str, options: list[str], ports: dict[str, int], ready: str, **more: Any
) -> Object:
    """A node of the Ray cluster. It is ready once Ray's own process accepts connections. Liveness needs no probe: `ray
    start --block` exits with it."""
    command = ["ray", "start", *options, *_COMMON_OPTIONS]
    probes = {"readinessProbe": tcp_probe(ready, failures=3)}
    template = pod(plan, role, command, ports=ports, probes=probes, ray=True, extra_env=[_POD_IP], **more)
    return _with_priority(plan, template)


def driver_role(plan: DeployPlan) -> str:
    return "trainer" if plan.deploy.workflow.follow else "pipeline"


def driver_command(plan: DeployPlan) -> list[str]:
    """The command that runs the stages, or follows new hours of logs."""
    follow = ["--follow"] if plan.deploy.workflow.follow else []
    return [
        "clickline",
        "up",
        *follow,
        "--no-serve",
        "--no-studio",
    ]  # no page of this pod can be reached from outside


def driver(
    plan: DeployPlan,
    command: list[str],
    *,
    ray: bool = True,
    restart: str | None = None,
    calls_predictors: bool = False,
) -> Object:
    """The pod that runs stages; with training on Ray it joins as a node without resources. `ray`: the command needs
    Ray; `calls_predictors`: it sends requests to predictors."""
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


def tcp_probe(port: str, *, failures: int) -> Object:
    return {"tcpSocket": {"port": port}, "periodSeconds": 5, "failureThreshold": failures}


def _with_priority(plan: DeployPlan, template: Object) -> Object:
    if plan.on_ray and plan.deploy.nodes.priority_class is not None:
        template["spec"]["priorityClassName"] = plan.deploy.nodes.priority_class
    return template


# ── Service and StatefulSets ───────────────────────────────────────────────────────────────────


def ray_service(plan: DeployPlan) -> Object:
    """The Service of the head. It resolves before the head is ready, for the pods that wait for it."""
    ports: list[Object] = [{"name": name, "port": port} for name, port in HEAD_PORTS.items()]
    return plan.headless_service(plan.object_name("ray"), "ray-head", ports)


def _stateful_set(plan: DeployPlan, role: str, replicas: int | None, template: Object) -> Object:
    """A StatefulSet whose pods restart independently. Without `replicas` an apply does not undo the scaling of the
    pipeline."""
    size = {} if replicas is None else {"replicas": replicas}
    service = plan.object_name("ray")
    return plan.workload(
        "StatefulSet", role, template, **size, serviceName=service, podManagementPolicy="Parallel"
    )
