"""Where data and models lie: claims, and the volumes behind them where nobody else makes those.

A pod only ever names a claim. NFS servers and folders of a node become volumes of the cluster that are bound to their
claim by name, so that no class and no other claim gets between them; they are kept when the claim goes (Retain).
"""

from __future__ import annotations

from typing import Any

from clickline.config.deploy_sections import Volume
from clickline.deploy.objects import DeployPlan, Object
from clickline.deploy.pods import claim_name


def storage_objects(plan: DeployPlan) -> list[Object]:
    """The claims of data, models and cache, with their volumes."""
    made = [*_volume_objects(plan, "data"), *_volume_objects(plan, "models")]
    if plan.deploy.storage.cache is not None:
        made += _node_cache(plan)
    return made


def _volume_objects(plan: DeployPlan, volume: str) -> list[Object]:
    section: Volume = getattr(plan.deploy.storage, volume)
    name = claim_name(plan, volume)
    match section.kind:
        case "new":
            chosen = {"storageClassName": section.storage_class} if section.storage_class else {}
            access = section.access or "ReadWriteOnce"
            return [_claim(plan, plan.object_name(volume), access, section.size, chosen)]
        case "nfs":
            source = {"nfs": {"server": section.server, "path": section.path}}
        case "host":
            source = {"hostPath": {"path": section.path, "type": "DirectoryOrCreate"}}
        case _:  # a claim of the user's, or none
            return []
    assert name is not None
    return _bound_volume(plan, name, "ReadWriteMany", section.size, source)


def _node_cache(plan: DeployPlan) -> list[Object]:
    """A folder of one node. The scheduler sends whoever mounts it there."""
    cache = plan.deploy.storage.cache
    assert cache is not None
    there = {"key": "kubernetes.io/hostname", "operator": "In", "values": [cache.node]}
    source = {
        "local": {"path": cache.path},
        "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [there]}]}},
    }
    size = -(-plan.config.cache.size // 2**20)
    return _bound_volume(plan, plan.object_name("cache"), "ReadWriteOnce", f"{size}Mi", source)


def _bound_volume(
    plan: DeployPlan, name: str, access: str, size: str, source: dict[str, Any]
) -> list[Object]:
    """A volume and its claim, made for each other."""
    volume = (
        f"{plan.deploy.namespace}-{name}"  # it lies in no namespace, and others may have a claim of this name
    )
    spec = {
        "capacity": {"storage": size},
        "accessModes": [access],
        "persistentVolumeReclaimPolicy": "Retain",
        "storageClassName": "",
        "claimRef": {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "namespace": plan.deploy.namespace,
            "name": name,
        },
        **source,
    }
    return [
        plan.object("v1", "PersistentVolume", volume, "storage", {"spec": spec}, namespaced=False),
        _claim(plan, name, access, size, {"storageClassName": "", "volumeName": volume}),
    ]


def _claim(plan: DeployPlan, name: str, access: str, size: str, more: dict[str, Any]) -> Object:
    spec = {"accessModes": [access], "resources": {"requests": {"storage": size}}, **more}
    return plan.object("v1", "PersistentVolumeClaim", name, "storage", {"spec": spec})
