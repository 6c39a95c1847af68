"""Volumes of ours that outlive their claims.

A volume is reserved for one claim, by the claim's uid. When the claim goes, by `kubectl delete namespace` for example,
the volume stays reserved for it (phase Released), and a new claim of the same name waits for ever. The uid was written
by the cluster, so an apply does not take it away.
"""

from __future__ import annotations

from typing import NamedTuple

from clickline.deploy.kube_client import Kube, describe
from clickline.deploy.objects import Object
from clickline.errors import ClusterError


class VolumeInUse(ClusterError):
    """A volume that another claim has."""


class ReservedClaim(NamedTuple):
    """The claim that a volume is reserved for."""

    namespace: str
    name: str
    gone: bool

    def __str__(self) -> str:
        return f"claim {self.name} of namespace {self.namespace}"


def reserved_claim(kube: Kube, volume: Object) -> ReservedClaim | None:
    """Whose a volume is; None if any claim of the reserved name may have it."""
    held = volume["spec"].get("claimRef") or {}
    if not held.get("uid"):
        return None
    claim = kube.get("v1", "PersistentVolumeClaim", held["name"], held["namespace"])
    gone = claim is None or claim["metadata"]["uid"] != held["uid"]
    return ReservedClaim(held["namespace"], held["name"], gone)


def is_stale_reservation(kube: Kube, item: Object, live: Object) -> bool:
    """Whether the volume `item` waits, as it is `live`, for a claim that is gone. One that another claim has is not
    taken from it: `VolumeTaken`."""
    held, wanted = reserved_claim(kube, live), item["spec"]["claimRef"]
    if held is None or held.gone:
        return held is not None
    if (held.namespace, held.name) != (wanted["namespace"], wanted["name"]):
        raise VolumeInUse(
            f"{describe(item)} is bound to {held}, and is needed for claim {wanted['name']} of namespace "
            f"{wanted['namespace']}. Rename the deployment (name:) or choose another deploy.namespace; or, if nobody "
            f"needs that claim any more: kubectl -n {held.namespace} delete persistentvolumeclaim {held.name}, and "
            "try again (the files stay)."
        )
    return False


def release_volume(kube: Kube, volume: Object) -> None:
    """Let a new claim have a volume whose claim is gone. What lies on it stays. Refused if the volume has changed since
    it was looked at."""
    version = volume["metadata"].get("resourceVersion")
    changes = {"spec": {"claimRef": {"uid": None, "resourceVersion": None}}}
    kube.patch(volume, {"metadata": {"resourceVersion": version}, **changes} if version else changes)
