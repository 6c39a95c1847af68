"""Predictors as a Deployment, and the servers of the sparse table when those are apart.

A predictor is ready once it has loaded a version: before the first publish all of them run and none gets requests. Each
follows the registry by itself, so that a new version needs no rollout.
"""

from __future__ import annotations

from typing import Any

from clickline.config import Config
from clickline.config.deploy_sections import SERVICE_VARIABLE, amount
from clickline.config.sections import unguarded
from clickline.deploy.mlflow_server import tracking_uri
from clickline.deploy.objects import DeployPlan, Object
from clickline.deploy.pods import http_probe, pod

_PRE_STOP_SECONDS = 5
"""Between the word that a pod goes and its SIGTERM: for everyone who still sends requests to hear of it."""
_EXIT_SECONDS = 10
"""Behind the time to drain, for processes to end by themselves."""
_ALL_INTERFACES = ("0.0.0.0", "::")


def serve_overrides(config: Config) -> dict[str, Any]:
    """What of serving must be otherwise in pods, by dotted key. What the user chose stays."""
    found: dict[str, Any] = {}
    if config.serve.host not in _ALL_INTERFACES:
        found["serve.host"] = _ALL_INTERFACES[0]  # of a pod's addresses nobody knows before it is there
        if unguarded(_ALL_INTERFACES[0], config.serve.tls, config.serve.token_file):
            found["serve.allow_unauthenticated"] = (
                True  # the NetworkPolicy guards it; `checks` says what is missing beside it
            )
    if config.serve.processes is None:
        takes = config.deploy.resources.predictor
        found["serve.processes"] = max(
            1, int(amount(takes.cpu_limit or takes.cpu))
        )  # not one a core of the node
    role = config.deploy.serving.lookup
    if role is not None:
        chosen = {} if config.serve.lookup is None else config.serve.lookup.model_dump(mode="json")
        found["serve.lookup"] = {
            **chosen,
            "shards": _addresses(config.name, config.publish.shards, role.replicas, config.serve.lookup_port),
        }
    if config.deploy.tracking.enabled and config.tracking.uri is None:
        found["tracking.uri"] = tracking_uri(config.name, config.deploy.tracking.port)
    return found


def _addresses(name: str, shards: int, replicas: int, port: int) -> list[list[str]]:
    """Of each shard, as its pods are called: pod n holds shard n modulo shards."""
    return [
        [f"{name}-lookup-{shard + copy * shards}.{name}-lookup:{port}" for copy in range(replicas)]
        for shard in range(shards)
    ]


# ── predictors ─────────────────────────────────────────────────────────────────────────────────


def predictors(plan: DeployPlan) -> list[Object]:
    """The Deployment with all that belongs to it, and the lookup servers if there are any."""
    role, name, section = "predictor", plan.object_name("predictor"), plan.deploy.serving
    scales = section.max_replicas is not None and section.max_replicas > section.replicas
    spec: Object = {
        # A number here would undo, with every apply, what the autoscaler has chosen.
        **({} if scales else {"replicas": section.replicas}),
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
        "progressDeadlineSeconds": 3600,  # the first predictors are ready with the first version
        "selector": {"matchLabels": plan.selector(role)},
        "template": predictor_pod(plan),
    }
    made = [
        plan.object("apps/v1", "Deployment", name, role, {"spec": spec}),
        plan.object("v1", "Service", name, role, {"spec": _service_spec(plan)}),
        _disruption_budget(plan, role),
    ]
    if scales:
        made.append(
            plan.object("autoscaling/v2", "HorizontalPodAutoscaler", name, role, _autoscaler_spec(plan))
        )
    return made + lookup_servers(plan)


def predictor_pod(plan: DeployPlan) -> Object:
    """The template of a predictor's pods."""
    role, serve = "predictor", plan.config.serve
    template = pod(
        plan,
        role,
        ["clickline", "serve"],
        resources=plan.deploy.resources.predictor,
        ports={"http": serve.http_port, "grpc": serve.grpc_port, "metrics": serve.metrics_port},
        probes=_probes(plan),
        writes_home=False,
        extra_env=[{"name": SERVICE_VARIABLE, "value": _service_host(plan)}],
        grace=_PRE_STOP_SECONDS + serve.drain_timeout + _EXIT_SECONDS,
        pre_stop={"exec": {"command": ["sleep", str(_PRE_STOP_SECONDS)]}},
    )
    return _with_spread(plan, role, _with_scrape_annotations(plan, template))


def _service_host(plan: DeployPlan) -> str:
    """Under which name clients of the cluster reach the predictors; that of Knative has ports of its own."""
    if plan.deploy.serving.kind == "knative":
        return ""
    return f"{plan.object_name('predictor')}.{plan.deploy.namespace}.svc"


def _probes(plan: DeployPlan) -> dict[str, Object]:
    """Of predictors and lookup servers alike. The start may wait for a busy node, and for kernels to compile."""
    tls = plan.config.serve.tls is not None
    live = http_probe("/healthz", "metrics", tls=tls, timeoutSeconds=5)
    ready = http_probe("/readyz", "metrics", tls=tls, timeoutSeconds=5)
    return {
        "startupProbe": {**live, "periodSeconds": 3, "failureThreshold": 200},
        "readinessProbe": {**ready, "periodSeconds": 3, "failureThreshold": 2},
        "livenessProbe": {**live, "periodSeconds": 10, "failureThreshold": 6},
    }


def _with_scrape_annotations(plan: DeployPlan, template: Object) -> Object:
    """Annotations that a Prometheus without an operator looks for; one with an operator takes the port by its name."""
    serve = plan.config.serve
    template["metadata"]["annotations"] |= {
        "prometheus.io/scrape": "true",
        "prometheus.io/scheme": "http" if serve.tls is None else "https",
        "prometheus.io/port": str(serve.metrics_port),
        "prometheus.io/path": "/metrics",
    }
    return template


def _with_spread(plan: DeployPlan, role: str, template: Object) -> Object:
    """Over the nodes, as far as there are several."""
    template["spec"]["topologySpreadConstraints"] = [
        {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": plan.selector(role)},
        }
    ]
    return template


def _service_spec(plan: DeployPlan) -> Object:
    section, serve = plan.deploy.serving, plan.config.serve
    plain = serve.tls is None
    ports: list[Object] = [
        {"name": "http", "port": serve.http_port, "appProtocol": "http" if plain else "https"},
        {"name": "grpc", "port": serve.grpc_port, "appProtocol": "kubernetes.io/h2c" if plain else "https"},
    ]
    for port, node_port in zip(ports, (section.http_node_port, section.grpc_node_port), strict=True):
        port["targetPort"] = port["name"]
        if node_port is not None:
            port["nodePort"] = node_port
    return {"type": section.service, "selector": plan.selector("predictor"), "ports": ports}


def _autoscaler_spec(plan: DeployPlan) -> Object:
    section = plan.deploy.serving
    target = {"type": "Utilization", "averageUtilization": section.cpu_target}
    return {
        "spec": {
            "scaleTargetRef": {
                "apiVersion": "apps/v1",
                "kind": "Deployment",
                "name": plan.object_name("predictor"),
            },
            "minReplicas": section.replicas,
            "maxReplicas": section.max_replicas,
            "metrics": [{"type": "Resource", "resource": {"name": "cpu", "target": target}}],
        }
    }


def _disruption_budget(plan: DeployPlan, role: str) -> Object:
    """A node that is emptied takes one pod at a time; one that is not ready anyway does not hold it up."""
    spec = {
        "maxUnavailable": 1,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": plan.selector(role)},
    }
    return plan.object("policy/v1", "PodDisruptionBudget", plan.object_name(role), role, {"spec": spec})


# ── lookup servers ─────────────────────────────────────────────────────────────────────────────


def lookup_servers(plan: DeployPlan) -> list[Object]:
    """The sparse table in servers of its own; empty when it is mapped in each predictor."""
    section, serve, shards = plan.deploy.serving.lookup, plan.config.serve, plan.config.publish.shards
    if section is None:
        return []
    role, name = "lookup", plan.object_name("lookup")
    index = {"fieldRef": {"fieldPath": "metadata.labels['apps.kubernetes.io/pod-index']"}}
    template = pod(
        plan,
        role,
        ["/bin/sh", "-c", f"exec clickline lookup --shard $((POD_INDEX % {shards}))"],
        resources=plan.deploy.resources.lookup,
        ports={"lookup": serve.lookup_port, "metrics": serve.metrics_port},
        probes=_probes(plan),
        writes_home=False,
        extra_env=[{"name": "POD_INDEX", "valueFrom": index}],
        grace=_PRE_STOP_SECONDS + serve.drain_timeout + _EXIT_SECONDS,
        pre_stop={"exec": {"command": ["sleep", str(_PRE_STOP_SECONDS)]}},
    )
    spec = {
        "replicas": shards * section.replicas,
        "serviceName": name,
        "podManagementPolicy": "Parallel",  # no shard waits for another
        "selector": {"matchLabels": plan.selector(role)},
        "template": _with_spread(plan, role, _with_scrape_annotations(plan, template)),
    }
    service = {
        "clusterIP": "None",
        # Predictors find out by themselves which replica answers; a name that comes and goes would be slower.
        "publishNotReadyAddresses": True,
        "selector": plan.selector(role),
        "ports": [{"name": "lookup", "port": serve.lookup_port, "targetPort": "lookup"}],
    }
    return [
        plan.object("apps/v1", "StatefulSet", name, role, {"spec": spec}),
        plan.object("v1", "Service", name, role, {"spec": service}),
        _disruption_budget(plan, role),
    ]
