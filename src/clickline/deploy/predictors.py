"""Predictors as a Deployment, and lookup servers for the sparse table if configured.

A predictor is ready once it has loaded a version: before the first publish all of them run but get no requests. Each
one polls the registry, so that a new version needs no rollout.
"""

from __future__ import annotations

from typing import Any

from clickline.config import Config
from clickline.config.deploy_sections import SERVICE_VARIABLE, Resources, amount
from clickline.config.sections import unguarded
from clickline.deploy.mlflow_server import tracking_uri
from clickline.deploy.objects import DeployPlan, Object
from clickline.deploy.pods import http_probe, pod

_PRE_STOP_SECONDS = 5
"""Between a pod's removal from its Service and SIGTERM, so that clients stop sending requests to it first."""
_EXIT_SECONDS = 10
"""After the drain timeout, for processes to exit."""
_ALL_INTERFACES = ("0.0.0.0", "::")


def serve_overrides(config: Config) -> dict[str, Any]:
    """Serving settings that pods need, by dotted key. The user's own settings are kept."""
    overrides: dict[str, Any] = {}
    if config.serve.host not in _ALL_INTERFACES:
        overrides["serve.host"] = _ALL_INTERFACES[0]  # a pod's address is unknown beforehand
        if unguarded(_ALL_INTERFACES[0], config.serve.tls, config.serve.token_file):
            overrides["serve.allow_unauthenticated"] = True  # the NetworkPolicy protects it
    if config.serve.processes is None:
        resources = config.deploy.resources.predictor
        overrides["serve.processes"] = max(
            1, int(amount(resources.cpu_limit or resources.cpu))
        )  # not one per core of the node
    role = config.deploy.serving.lookup
    if role is not None:
        chosen = {} if config.serve.lookup is None else config.serve.lookup.model_dump(mode="json")
        overrides["serve.lookup"] = {
            **chosen,
            "shards": _addresses(config.name, config.publish.shards, role.replicas, config.serve.lookup_port),
        }
    if config.deploy.tracking.enabled and config.tracking.uri is None:
        overrides["tracking.uri"] = tracking_uri(config.name, config.deploy.tracking.port)
    return overrides


def _addresses(name: str, shards: int, replicas: int, port: int) -> list[list[str]]:
    """The addresses of each shard's pods: pod n has shard n modulo shards."""
    return [
        [f"{name}-lookup-{shard + copy * shards}.{name}-lookup:{port}" for copy in range(replicas)]
        for shard in range(shards)
    ]


# ── predictors ─────────────────────────────────────────────────────────────────────────────────


def predictors(plan: DeployPlan) -> list[Object]:
    """The Deployment with its Service, budget and autoscaler, and the lookup servers if there are any."""
    role, section = "predictor", plan.deploy.serving
    scales = section.max_replicas is not None and section.max_replicas > section.replicas
    spec: Object = {
        # With a number here, every apply would undo the autoscaler's choice.
        **({} if scales else {"replicas": section.replicas}),
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
        "progressDeadlineSeconds": 3600,  # the first predictors become ready with the first version
    }
    objects = [
        plan.workload("Deployment", role, predictor_pod(plan), **spec),
        plan.object("v1", "Service", role, spec=_service_spec(plan)),
        _disruption_budget(plan, role),
    ]
    if scales:
        objects.append(_autoscaler(plan, role))
    return objects + lookup_servers(plan)


def predictor_pod(plan: DeployPlan) -> Object:
    """The pod template of the predictors."""
    serve = plan.config.serve
    return _serving_pod(
        plan,
        "predictor",
        ["clickline", "serve"],
        resources=plan.deploy.resources.predictor,
        ports={
            "http": serve.http_port,
            "grpc": serve.grpc_port,
            **({} if serve.brpc_port is None else {"brpc": serve.brpc_port}),
            "metrics": serve.metrics_port,
        },
        variable={"name": SERVICE_VARIABLE, "value": _service_host(plan)},
    )


def _serving_pod(
    plan: DeployPlan,
    role: str,
    command: list[str],
    *,
    resources: Resources,
    ports: dict[str, int],
    variable: Object,
) -> Object:
    """The pod template of predictors or lookup servers: drained before it ends, and spread over the nodes."""
    serve = plan.config.serve
    template = pod(
        plan,
        role,
        command,
        resources=resources,
        ports=ports,
        probes=_probes(plan),
        writes_home=False,
        extra_env=[variable],
        grace=_PRE_STOP_SECONDS + serve.drain_timeout + _EXIT_SECONDS,
        pre_stop={"exec": {"command": ["sleep", str(_PRE_STOP_SECONDS)]}},
    )
    # For a Prometheus without an operator; one with an operator finds the port by its name.
    template["metadata"]["annotations"] |= {
        "prometheus.io/scrape": "true",
        "prometheus.io/scheme": "http" if serve.tls is None else "https",
        "prometheus.io/port": str(serve.metrics_port),
        "prometheus.io/path": "/metrics",
    }
    template["spec"]["topologySpreadConstraints"] = [
        {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": plan.selector(role)},
        }
    ]
    return template


def _service_host(plan: DeployPlan) -> str:
    """The host name of the predictors inside the cluster; empty for Knative, which has ports of its own."""
    if plan.deploy.serving.kind == "knative":
        return ""
    return f"{plan.object_name('predictor')}.{plan.deploy.namespace}.svc"


def _probes(plan: DeployPlan) -> dict[str, Object]:
    """The probes of predictors and lookup servers. Startup may take long on a busy node, or if kernels are compiled."""
    tls = plan.config.serve.tls is not None
    live = http_probe("/healthz", "metrics", tls=tls, timeoutSeconds=5)
    ready = http_probe("/readyz", "metrics", tls=tls, timeoutSeconds=5)
    return {
        "startupProbe": {**live, "periodSeconds": 3, "failureThreshold": 200},
        "readinessProbe": {**ready, "periodSeconds": 3, "failureThreshold": 2},
        "livenessProbe": {**live, "periodSeconds": 10, "failureThreshold": 6},
    }


def _service_spec(plan: DeployPlan) -> Object:
    section, serve = plan.deploy.serving, plan.config.serve
    plain = serve.tls is None
    ports: list[Object] = [
        {"name": "http", "port": serve.http_port, "appProtocol": "http" if plain else "https"},
        {"name": "grpc", "port": serve.grpc_port, "appProtocol": "kubernetes.io/h2c" if plain else "https"},
    ]
    if serve.brpc_port is not None:
        ports.append({"name": "brpc", "port": serve.brpc_port})
    node_ports = (section.http_node_port, section.grpc_node_port, None)
    for port, node_port in zip(ports, node_ports, strict=False):
        port["targetPort"] = port["name"]
        if node_port is not None:
            port["nodePort"] = node_port
    return {"type": section.service, "selector": plan.selector("predictor"), "ports": ports}


def _autoscaler(plan: DeployPlan, role: str) -> Object:
    section = plan.deploy.serving
    target = {"type": "Utilization", "averageUtilization": section.cpu_target}
    spec = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": plan.object_name(role)},
        "minReplicas": section.replicas,
        "maxReplicas": section.max_replicas,
        "metrics": [{"type": "Resource", "resource": {"name": "cpu", "target": target}}],
    }
    return plan.object("autoscaling/v2", "HorizontalPodAutoscaler", role, spec=spec)


def _disruption_budget(plan: DeployPlan, role: str) -> Object:
    """A node drain evicts one pod at a time; pods that are not ready do not block it."""
    spec = {
        "maxUnavailable": 1,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": plan.selector(role)},
    }
    return plan.object("policy/v1", "PodDisruptionBudget", role, spec=spec)


# ── lookup servers ─────────────────────────────────────────────────────────────────────────────


def lookup_servers(plan: DeployPlan) -> list[Object]:
    """Lookup servers for the sparse table; empty if each predictor maps the table itself."""
    section, serve, shards = plan.deploy.serving.lookup, plan.config.serve, plan.config.publish.shards
    if section is None:
        return []
    role, name = "lookup", plan.object_name("lookup")
    index = {"fieldRef": {"fieldPath": "metadata.labels['apps.kubernetes.io/pod-index']"}}
    template = _serving_pod(
        plan,
        role,
        ["/bin/sh", "-c", f"exec clickline lookup --shard $((POD_INDEX % {shards}))"],
        resources=plan.deploy.resources.lookup,
        ports={"lookup": serve.lookup_port, "metrics": serve.metrics_port},
        variable={"name": "POD_INDEX", "valueFrom": index},
    )
    spec = {
        "replicas": shards * section.replicas,
        "serviceName": name,
        "podManagementPolicy": "Parallel",  # no shard waits for another
    }
    ports: list[Object] = [{"name": "lookup", "port": serve.lookup_port, "targetPort": "lookup"}]
    return [
        plan.workload("StatefulSet", role, template, **spec),
        # Also pods that are not ready: predictors detect by themselves which replica responds, faster than DNS.
        plan.headless_service(name, role, ports),
        _disruption_budget(plan, role),
    ]
