"""Renders clickline.yaml to Kubernetes objects, and to files for kubectl and kustomize.

DIR/kustomization.yaml      the configured deployment: base + chosen
DIR/base/                   what all variants share
DIR/chosen/                 the rest of the configured deployment
DIR/overlays/…              variants of it: trained in one pod or as configured; with NFS or with claims
DIR/tools/data-pod.yaml     a pod to copy click logs into the data volume with
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from clickline.config import Config, load_config, resolved
from clickline.config.deploy_sections import DataVolume, DeploySection, Volume
from clickline.deploy.argo import workflow_objects
from clickline.deploy.claims import storage_objects
from clickline.deploy.config_checks import config_mistakes, config_notes
from clickline.deploy.knative import knative_service
from clickline.deploy.kuberay import ray_job_for
from clickline.deploy.mlflow_server import tracking_server
from clickline.deploy.objects import WORKING_FOLDER, DeployPlan, Object, to_yaml
from clickline.deploy.pipeline_jobs import pipeline_objects
from clickline.deploy.pods import SCRATCH, claim_name, data_folder, data_pod
from clickline.deploy.predictors import predictors, serve_overrides
from clickline.deploy.ray_pods import cluster_overrides, driver_command, ray_cluster, uses_operator
from clickline.deploy.rbac import access_objects
from clickline.deploy.volcano import volcano_job
from clickline.errors import ConfigError

_ABSENT_NFS = {"server": "nfs.invalid", "path": "/clickline"}


@dataclass(frozen=True)
class Rendered:
    """A rendered deployment: its objects, its files, and notes about it."""

    name: str
    namespace: str
    objects: list[Object]
    """The objects that `apply` applies, in this order."""
    files: dict[str, str]
    notes: list[str]
    data_pod_objects: list[Object]
    """A pod that mounts the data volume, preceded by the objects that it needs."""
    data_folder: str | None
    """The mount path of the data volume in pods; None if there is none."""
    local_folder: Path
    """The local folder that corresponds to the data volume."""


def render(config_file: Path, overrides: Sequence[str] = ()) -> Rendered:
    """Render a deployment. Raises ConfigError with all mistakes of the config."""
    local = load_config(config_file, overrides)
    config = pod_config(config_file, overrides)
    plan = DeployPlan(config, _user_files(local, config), config_text(config))
    mistakes = config_mistakes(plan)
    if mistakes:
        raise ConfigError(mistakes)
    chosen = _objects(plan)
    others = {name: _objects(one) for name, one in _variants(config_file, overrides, plan).items()}
    return Rendered(
        plan.name,
        config.deploy.namespace,
        chosen,
        _layout(plan, chosen, others),
        config_notes(plan),
        _data_pod_objects(plan),
        data_folder(plan) if claim_name(plan, "data") is not None else None,
        Path(local.deploy.storage.data.mount or config_file.absolute().parent / "data"),
    )


def write_files(files: Mapping[str, str], folder: Path) -> None:
    """Write the files, and remove those of an earlier render that no longer exist: `kubectl apply -f` would still apply
    them."""
    known = {folder / name for name in files}
    for old in [
        *folder.glob("base/*.yaml"),
        *folder.glob("chosen/*.yaml"),
        *folder.glob("overlays/*/*.yaml"),
    ]:
        if old not in known:
            old.unlink()
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")


# ── the config in the pods ─────────────────────────────────────────────────────────────────────


def pod_config(config_file: Path, overrides: Sequence[str]) -> Config:
    """The config as the pods use it: relative to their working folder, and with the changes that a cluster needs."""
    folder = Path(WORKING_FOLDER)
    config = load_config(config_file, overrides, folder=folder)
    changes: dict[str, Any] = {
        "cache.dir": "/cache" if config.deploy.storage.cache else str(SCRATCH / "cache"),
        **serve_overrides(config),
        **cluster_overrides(config),
    }
    more = [f"{key}={setting_text(value)}" for key, value in changes.items()]
    return load_config(config_file, [*overrides, *more], folder=folder)


def config_text(config: Config) -> str:
    """The config's YAML without the `deploy` section: a change of that section alone must not replace all pods."""
    return resolved(config.model_copy(update={"deploy": DeploySection()}))


def setting_text(value: Any) -> str:
    """A value as --set takes it."""
    return value if isinstance(value, str) else json.dumps(value)


def _user_files(local: Config, config: Config) -> dict[str, str]:
    """The user's Python files, by their path in the pods."""
    pairs = ((local.model.file, config.model.file), (local.data.reader, config.data.reader))
    return {
        path: Path(source).read_text(encoding="utf-8")
        for source, path in pairs
        if source is not None and path is not None
    }


# ── objects ────────────────────────────────────────────────────────────────────────────────────


def _objects(plan: DeployPlan) -> list[Object]:
    deploy = plan.deploy
    objects = [*access_objects(plan), plan.config_map(), *storage_objects(plan)]
    if deploy.tracking.enabled:
        objects += tracking_server(plan)
    objects += knative_service(plan) if deploy.serving.kind == "knative" else predictors(plan)
    return objects + training_objects(plan)


def training_objects(plan: DeployPlan) -> list[Object]:
    """What runs the pipeline, and Ray if it trains there. Follow mode has no steps and is not a job: core objects."""
    operated, workflow = uses_operator(plan.config), plan.deploy.workflow
    objects = ray_cluster(plan) if plan.on_ray and not operated else []
    if workflow.kind == "argo" and not workflow.follow:
        return objects + workflow_objects(plan)
    if operated and plan.deploy.training.kind == "volcano":
        return volcano_job(plan)
    if operated:
        return [ray_job_for(plan, driver_command(plan))]
    return objects + pipeline_objects(plan)


def _variants(config_file: Path, overrides: Sequence[str], plan: DeployPlan) -> dict[str, DeployPlan]:
    """The plan of each overlay. Their configs differ from the YAML only in how they train."""
    variants = {}
    for way in ("single-node", "pipeline"):
        config = plan.config
        if way == "single-node" and plan.on_ray:
            config = pod_config(config_file, [*overrides, "train.mode=local"])
        text = config_text(config)
        for kind in ("nfs", "pvc"):
            volumes = config.deploy.storage
            stored = volumes.model_copy(
                update={"data": _with_kind(kind, volumes.data), "models": _with_kind(kind, volumes.models)}
            )
            deploy = config.deploy.model_copy(update={"storage": stored})
            if way == "single-node":
                job = deploy.workflow.model_copy(update={"kind": "job"})
                deploy = deploy.model_copy(update={"workflow": job})
            variants[f"{way}-{kind}"] = DeployPlan(
                config.model_copy(update={"deploy": deploy}), plan.files, text
            )
    return variants


def _with_kind(kind: str, volume: Volume) -> Volume:
    """The volume as an overlay has it: on an NFS server, or a claim, new or existing."""
    mounted = {"mount": volume.mount} if isinstance(volume, DataVolume) else {}
    if kind == "pvc":
        return volume if volume.kind in ("new", "existing") else type(volume)(size=volume.size, **mounted)
    return (
        volume
        if volume.kind == "nfs"
        else type(volume)(kind="nfs", size=volume.size, **_ABSENT_NFS, **mounted)
    )


# ── files ──────────────────────────────────────────────────────────────────────────────────────


def _layout(plan: DeployPlan, chosen: list[Object], others: Mapping[str, list[Object]]) -> dict[str, str]:
    """The files. `base` has the objects that all variants share unchanged, so that no variant needs a patch."""
    base = [one for one in chosen if all(one in other for other in others.values())]
    files = {
        **_folder("base", base),
        **_folder("chosen", [one for one in chosen if one not in base]),
        "kustomization.yaml": _kustomization(["base", "chosen"]),
        "tools/data-pod.yaml": to_yaml(_data_pod_objects(plan)),
    }
    for name, objects in others.items():
        own = [one for one in objects if one not in base]
        files |= _folder(f"overlays/{name}", own, "../../base")
    return dict(sorted(files.items()))


def _data_pod_objects(plan: DeployPlan) -> list[Object]:
    """A pod that mounts the data volume, and the objects it needs: logs can be copied before the rest is deployed."""
    needed = [one for one in access_objects(plan) if one["kind"] in ("Namespace", "ServiceAccount")]
    return [*needed, plan.config_map(), *storage_objects(plan), data_pod(plan)]


def _folder(folder: str, objects: Iterable[Object], *below: str) -> dict[str, str]:
    by_role: dict[str, list[Object]] = {}
    for one in objects:
        role = one["metadata"]["labels"]["app.kubernetes.io/component"]
        by_role.setdefault(f"{role}.yaml", []).append(one)
    written = {f"{folder}/{name}": to_yaml(own) for name, own in by_role.items()}
    return {**written, f"{folder}/kustomization.yaml": _kustomization([*below, *sorted(by_role)])}


def _kustomization(resources: list[str]) -> str:
    return yaml.safe_dump(
        {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "resources": resources},
        sort_keys=False,
    )
