"""The claims for data, models and cache, and the volumes behind them where the cluster does not provision those.

Pods only name claims. An NFS export or a folder of a node becomes a PersistentVolume that is bound to its claim by
name, so that no storage class and no other claim can take it. It is retained when the claim is deleted.
"""

from __future__ import annotations

from typing import Any

from clickline.config.deploy_sections import Volume
from clickline.deploy.objects import DeployPlan, Object
from clickline.deploy.pods import claim_name


def storage_objects(plan: DeployPlan) -> list[Object]:
    """The claims of data, models and cache, and their volumes."""
    objects = [*_volume_objects(plan, "data"), *_volume_objects(plan, "models")]
    if plan.deploy.storage.cache is not None:
        objects += _node_cache(plan)
    return objects


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
        case _:  # an existing claim, or none
            return []
    assert name is not None
    return _bound_volume(plan, name, "ReadWriteMany", section.size, source)


def _node_cache(plan: DeployPlan) -> list[Object]:
    """A folder of one node. The scheduler places the pods that mount it there."""
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
    """A volume and its claim, bound to each other."""
    # Volumes have no namespace, and another namespace may have a claim of this name.
    volume = f"{plan.deploy.namespace}-{name}"
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
        plan.object("v1", "PersistentVolume", "storage", name=volume, namespaced=False, spec=spec),
        _claim(plan, name, access, size, {"storageClassName": "", "volumeName": volume}),
    ]


def _claim(plan: DeployPlan, name: str, access: str, size: str, more: dict[str, Any]) -> Object:
    spec = {"accessModes": [access], "resources": {"requests": {"storage": size}}, **more}
    return plan.object("v1", "PersistentVolumeClaim", "storage", name=name, spec=spec)
