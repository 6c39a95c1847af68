"""Plans of deployments as `render` creates them, and the objects for serving, storage, tracking and access."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from clickline.deploy.claims import storage_objects
from clickline.deploy.knative import knative_service
from clickline.deploy.mlflow_server import tracking_server
from clickline.deploy.objects import DeployPlan
from clickline.deploy.predictors import predictors
from clickline.deploy.rbac import access_objects
from clickline.deploy.render import config_text, pod_config

_CONFIG = "name: ads\ndata: {train: data/train.tsv, eval: data/eval.tsv}\n"
_TLS = "serve.tls={certificate: tls.crt, key: tls.key, ca: ca.crt}"
_TLS_FILES = "deploy.secrets.files={tls.crt: web/tls.crt, tls.key: web/tls.key, ca.crt: web/ca.crt}"

EVERY_WAY = {
    "as it is": (),
    "fixed number": ("deploy.serving.max_replicas=null", "deploy.serving.replicas=1"),
    "node ports": ("deploy.serving={service: NodePort, http_node_port: 30501, grpc_node_port: 30500}",),
    "load balancer": ("deploy.serving.service=LoadBalancer",),
    "lookup": ("deploy.serving.lookup={replicas: 2}", "publish.shards=3"),
    "tls": (_TLS, _TLS_FILES, "deploy.serving.lookup={}"),
    "tracking": ("deploy.tracking.enabled=true",),
    "tracking of another image": ("deploy.tracking={enabled: true, image: mlflow:3.1.0, port: 5500}",),
    "nfs": (
        "deploy.storage.data={kind: nfs, server: files, path: /exports/ads}",
        "deploy.storage.models={kind: nfs, server: files, path: /exports/models}",
    ),
    "host folders": (
        "deploy.storage.data={kind: host, path: /srv/ads}",
        "deploy.storage.models={kind: host, path: /srv/models}",
    ),
    "own claims": (
        "deploy.storage.data={kind: existing, claim: logs}",
        "deploy.storage.models={kind: existing, claim: versions}",
    ),
    "stores only": (
        "data.train=s3://ads/train/*",
        "data.eval=s3://ads/eval/*",
        "publish.registry=s3://ads/registry",
        "deploy.storage={data: {kind: none}, models: {kind: none}}",
        "deploy.secrets.environment=[s3]",
    ),
    "node cache": ("data.train=s3://ads/*", "deploy.storage.cache={node: worker-1, path: /srv/cache}"),
    "a class": ("deploy.storage.models={storage_class: fast, access: ReadWriteMany, size: 100Gi}",),
    "a namespace of yours": ("deploy={namespace: ads, create_namespace: false, network_policy: false}",),
    "chosen nodes": (
        "deploy.nodes={selector: {disk: fast}, tolerations: [{key: spot, operator: Exists}]}",
        "deploy.pull_secrets=[registry]",
        "deploy.resources.predictor={cpu: '2', cpu_limit: '4', memory_limit: 8Gi}",
    ),
    "ray": ("train.mode=cluster", "train.workers.max=3"),
    "kuberay": ("train.mode=cluster", "deploy.training.kind=kuberay"),
    "argo": ("deploy.workflow.kind=argo",),
    "knative": ("deploy.serving.kind=knative",),
    "knative grpc": ("deploy.serving={kind: knative, protocol: grpc, replicas: 0, lookup: {}}",),
    "knative canary": (
        "deploy.serving={kind: knative, canary: {stable: ads-predictor-0123abcd, percent: 20}}",
    ),
    "knative everything": (
        "deploy.serving={kind: knative, max_replicas: null, replicas: 0}",
        "deploy.nodes={selector: {disk: fast}, tolerations: [{key: spot, operator: Exists}]}",
        "deploy.pull_secrets=[registry]",
        "deploy.secrets={environment: [s3], files: {token: web/token}}",
        "serve.token_file=token",
    ),
}


def plan(*overrides: str, text: str = _CONFIG, files: Mapping[str, str] | None = None) -> DeployPlan:
    """The config in the pods, with the overrides of a cluster."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(text)
        file.flush()

        config = pod_config(Path(file.name), overrides)
    return DeployPlan(config, files or {}, config_text(config))


def as_overrides(changes: Mapping[str, Any]) -> list[str]:
    """Overrides as the config loader reads them."""
    return [
        f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in changes.items()
    ]


def objects(one: DeployPlan) -> list[dict[str, Any]]:
    """The objects of these modules."""
    serving = knative_service if one.deploy.serving.kind == "knative" else predictors
    tracked = tracking_server(one) if one.deploy.tracking.enabled else []
    return [*access_objects(one), *storage_objects(one), *tracked, *serving(one)]


def the(kind: str, made: list[dict[str, Any]], name: str | None = None) -> dict[str, Any]:
    """The only object of its kind, or of its kind and name."""
    found = [one for one in made if one["kind"] == kind and name in (None, one["metadata"]["name"])]
    assert len(found) == 1, [(one["kind"], one["metadata"]["name"]) for one in made]
    return found[0]


def templates(made: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Pod templates by kind and name of their workload."""
    return {
        f"{one['kind']}/{one['metadata']['name']}": one["spec"]["template"]
        for one in made
        if "template" in one.get("spec", {})
    }


def containers(template: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    yield from template["spec"].get("initContainers", ())
    yield from template["spec"]["containers"]


def labelled(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a selector matches these labels."""
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items()) and all(
        labels.get(one["key"]) in one["values"] for one in selector.get("matchExpressions", ())
    )
