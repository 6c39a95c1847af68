"""Access: the namespace, the pods' service account and its Role, and network policies.

Only ingress is restricted. Egress (object stores, DNS, MLflow) differs in every cluster and is mostly known by host
name, which a NetworkPolicy cannot express; our own list would break more than it protects.
"""

from __future__ import annotations

from clickline.deploy.argo import argo_rules
from clickline.deploy.knative import queue_ports
from clickline.deploy.objects import DeployPlan, Object, instance_labels
from clickline.deploy.ray_lifecycle import scale_rules

_TRAINING = ("pipeline", "trainer", "ray-head", "ray-worker")
_RAY_DASHBOARD = 8265
_STANDARD = "pod-security.kubernetes.io"


def access_objects(plan: DeployPlan) -> list[Object]:
    """The namespace, service account, Role and network policies."""
    objects = [_namespace(plan)] if plan.deploy.create_namespace else []
    objects.append(plan.object("v1", "ServiceAccount", "access", automountServiceAccountToken=False))
    allowed = [*argo_rules(plan), *scale_rules(plan)]
    if allowed:
        objects += _role_objects(plan, allowed)
    if plan.deploy.network_policy:
        objects += _network_policies(plan)
    return objects


def _namespace(plan: DeployPlan) -> Object:
    namespace = plan.object("v1", "Namespace", "access", name=plan.deploy.namespace, namespaced=False)
    namespace["metadata"]["labels"] |= {
        f"{_STANDARD}/{mode}": "restricted" for mode in ("enforce", "audit", "warn")
    }
    return namespace


def _role_objects(plan: DeployPlan, allowed: list[Object]) -> list[Object]:
    """The Role of the pods that call the Kubernetes API, and its binding."""
    api, name = "rbac.authorization.k8s.io", plan.object_name("access")
    role = {"apiGroup": api, "kind": "Role", "name": name}
    subjects = [{"kind": "ServiceAccount", "name": name, "namespace": plan.deploy.namespace}]
    return [
        plan.object(f"{api}/v1", "Role", "access", rules=allowed),
        plan.object(f"{api}/v1", "RoleBinding", "access", roleRef=role, subjects=subjects),
    ]


# ── network policies ───────────────────────────────────────────────────────────────────────────


def _network_policies(plan: DeployPlan) -> list[Object]:
    serve, deploy = plan.config.serve, plan.deploy
    objects = [_policy(plan, "deny", _pods(plan), [])]
    if plan.on_ray:  # Ray opens random ports
        training = _pods(plan, *_TRAINING)
        objects.append(_policy(plan, "training", training, [_from(training)]))
    if plan.on_ray and deploy.training.kind == "kuberay":
        # The operator polls the job's status on the head, from a namespace of its own.
        ingress = {"from": [{"namespaceSelector": {}}], **_ports(_RAY_DASHBOARD)}
        objects.append(_policy(plan, "operator", _pods(plan, "ray-head"), [ingress]))
    ports = [serve.http_port, serve.grpc_port, serve.metrics_port]
    if serve.brpc_port is not None:
        ports.append(serve.brpc_port)
    if deploy.serving.kind == "knative":
        ports += queue_ports(plan)
    objects.append(_policy(plan, "predictor", _pods(plan, "predictor"), [_ports(*ports)]))
    if deploy.serving.lookup is not None:
        ingress = _from(_pods(plan, "predictor"), serve.lookup_port)
        objects.append(_policy(plan, "lookup", _pods(plan, "lookup"), [ingress, _ports(serve.metrics_port)]))
    if deploy.tracking.enabled:
        ingress = _from(_pods(plan), deploy.tracking.port)
        objects.append(_policy(plan, "tracking", _pods(plan, "tracking"), [ingress]))
    return objects


def _policy(plan: DeployPlan, name: str, pods: Object, ingress: list[Object]) -> Object:
    spec = {"podSelector": pods, "policyTypes": ["Ingress"], "ingress": ingress}
    return plan.object(
        "networking.k8s.io/v1", "NetworkPolicy", "access", name=plan.object_name(name), spec=spec
    )


def _pods(plan: DeployPlan, *roles: str) -> Object:
    """A selector of the pods of some roles, or of all pods of this deployment."""
    selector: Object = {"matchLabels": instance_labels(plan.name)}
    if roles:
        one_of = {"key": "app.kubernetes.io/component", "operator": "In", "values": list(roles)}
        selector["matchExpressions"] = [one_of]
    return selector


def _from(pods: Object, *ports: int) -> Object:
    return {"from": [{"podSelector": pods}], **(_ports(*ports) if ports else {})}


def _ports(*ports: int) -> Object:
    return {"ports": [{"protocol": "TCP", "port": port} for port in ports]}
