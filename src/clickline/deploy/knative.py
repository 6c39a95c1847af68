"""Predictors as a Knative Service, which scales with the requests and can split them between two revisions.

Knative allows less in a pod than Kubernetes does. What it rejects without a feature flag is done in another way here:
the init container's command runs before the server in the same container, the user id is set on the container, and
Knative itself drains requests. `feature_flags` names what still has to be allowed.
"""

from __future__ import annotations

import json
from hashlib import sha256

from clickline.deploy.objects import DeployPlan, Object
from clickline.deploy.predictors import lookup_servers, predictor_pod

RESERVED_PORTS = (8008, 8012, 8013, 8022, 8112, 9090, 9091)
"""Used by Knative's own container in every pod."""

_READY_SECONDS = 3600  # the first predictors become ready with the first version

_FLAGGED_FIELDS = {
    "nodeSelector": "kubernetes.podspec-nodeselector",
    "tolerations": "kubernetes.podspec-tolerations",
}


def knative_service(plan: DeployPlan) -> list[Object]:
    """The Knative Service, and the lookup servers if there are any."""
    canary, template = plan.deploy.serving.canary, _template(plan)
    template["metadata"] = {"name": _revision_name(plan, template), **template["metadata"]}
    newest: Object = {"latestRevision": True, "percent": 100}
    traffic = [newest]
    if canary is not None:
        newest |= {"percent": canary.percent, "tag": "canary"}
        stable = {"revisionName": canary.stable, "percent": 100 - canary.percent, "tag": "stable"}
        traffic = [stable, newest]
    spec = {"template": template, "traffic": traffic}
    service = plan.object("serving.knative.dev/v1", "Service", "predictor", spec=spec)
    return [service, *lookup_servers(plan)]


def revision(plan: DeployPlan) -> str:
    """The name of this config's revision. It is derived from the revision's content, so that applying the same config
    again creates no other, and a canary has another name than the stable revision."""
    return _revision_name(plan, _template(plan))


def feature_flags(plan: DeployPlan) -> list[str]:
    """The keys of Knative's ConfigMap config-features that must be `enabled` for this Service."""
    spec = _template(plan)["spec"]
    needed = [flag for key, flag in _FLAGGED_FIELDS.items() if key in spec]
    if any("persistentVolumeClaim" in volume for volume in spec["volumes"]):
        needed.append("kubernetes.podspec-persistent-volume-claim")
    return sorted(needed)


def queue_ports(plan: DeployPlan) -> list[int]:
    """The ports of Knative's container for requests, probes and the autoscaler, with and without TLS."""
    return [8013 if plan.deploy.serving.protocol == "grpc" else 8012, 8022, 8112, 9090, 9091]


def _revision_name(plan: DeployPlan, template: Object) -> str:
    return f"{plan.object_name('predictor')}-{sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:8]}"


def _template(plan: DeployPlan) -> Object:
    pod = predictor_pod(plan)
    spec = pod["spec"]
    (container,) = spec["containers"]
    (init,) = spec["initContainers"]
    allowed = (
        "env",
        "envFrom",
        "image",
        "imagePullPolicy",
        "name",
        "resources",
        "terminationMessagePolicy",
        "volumeMounts",
        "workingDir",
    )
    inside: Object = {key: container[key] for key in allowed if key in container}
    check = " ".join(init["command"])
    inside["command"] = ["/bin/sh", "-c", f"{check} && exec {' '.join(container['command'])}"]
    inside["ports"] = [_port(plan)]
    inside["securityContext"] = {**container["securityContext"], "runAsUser": plan.deploy.identity.user}
    inside |= _probes(plan)
    kept = ("automountServiceAccountToken", "enableServiceLinks", "imagePullSecrets", "serviceAccountName")
    return {
        "metadata": {
            "labels": pod["metadata"]["labels"],
            "annotations": {**pod["metadata"]["annotations"], **_scale(plan)},
        },
        "spec": {
            **{key: spec[key] for key in (*kept, *_FLAGGED_FIELDS) if key in spec},
            "containers": [inside],
            "volumes": [_volume(volume) for volume in spec["volumes"]],
        },
    }


def _volume(volume: Object) -> Object:
    if "persistentVolumeClaim" in volume:  # writing would need another flag
        return {**volume, "persistentVolumeClaim": {**volume["persistentVolumeClaim"], "readOnly": True}}
    if "secret" in volume:  # without fsGroup the process is not in the files' group
        return {**volume, "secret": {**volume["secret"], "defaultMode": 0o444}}
    return volume


def _port(plan: DeployPlan) -> Object:
    serve = plan.config.serve
    if plan.deploy.serving.protocol == "grpc":
        return {"name": "h2c", "containerPort": serve.grpc_port}
    return {"name": "http1", "containerPort": serve.http_port}


def _probes(plan: DeployPlan) -> dict[str, Object]:
    """Probes on the port of requests, the only one Knative probes. A server without a version is live but not ready."""
    port = _port(plan)["containerPort"]
    ready: Object = {"httpGet": {"path": "/v2/health/ready", "port": port}}
    live: Object = {"httpGet": {"path": "/v2/health/live", "port": port}}
    if plan.deploy.serving.protocol == "grpc":
        ready, live = {"grpc": {"port": port}}, {"tcpSocket": {"port": port}}
    timing = {"timeoutSeconds": 5, "successThreshold": 1}
    patient = {"initialDelaySeconds": 60, "periodSeconds": 10, "failureThreshold": 12}
    return {
        "readinessProbe": {**ready, **timing, "periodSeconds": 3, "failureThreshold": 2},
        "livenessProbe": {**live, **timing, **patient},
    }


def _scale(plan: DeployPlan) -> dict[str, str]:
    section = plan.deploy.serving
    most = section.replicas if section.max_replicas is None else section.max_replicas
    return {
        "autoscaling.knative.dev/min-scale": str(section.replicas),
        "autoscaling.knative.dev/max-scale": str(max(1, most)),
        "autoscaling.knative.dev/metric": "concurrency",
        "autoscaling.knative.dev/target": str(section.concurrency),
        "serving.knative.dev/progress-deadline": f"{_READY_SECONDS}s",
    }
