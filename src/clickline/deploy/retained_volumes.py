"""Releases retained volumes whose claims were deleted.

A volume is reserved for one claim, by the claim's uid. When the claim is deleted, for example by `kubectl delete
namespace`, the volume stays reserved for it (phase Released), and a new claim of the same name stays pending forever.
The cluster wrote the uid, so an apply does not remove it.
"""

from __future__ import annotations

from typing import NamedTuple

from clickline.deploy.kube_client import Kube
from clickline.deploy.objects import Object, describe
from clickline.deploy.prerequisites import Conflict


class ReservedClaim(NamedTuple):
    """The claim that a volume is reserved for."""

    namespace: str
    name: str
    gone: bool

    def __str__(self) -> str:
        return f"claim {self.name} of namespace {self.namespace}"


def reserved_claim(kube: Kube, volume: Object) -> ReservedClaim | None:
    """The claim that a volume is reserved for; None if any claim of the reserved name can bind it."""
    held = volume["spec"].get("claimRef") or {}
    if not held.get("uid"):
        return None
    claim = kube.get("v1", "PersistentVolumeClaim", held["name"], held["namespace"])
    gone = claim is None or claim["metadata"]["uid"] != held["uid"]
    return ReservedClaim(held["namespace"], held["name"], gone)


def is_stale_reservation(kube: Kube, item: Object, live: Object) -> bool:
    """Whether the `live` volume is reserved for a deleted claim. Raises Conflict if another claim has it."""
    held, wanted = reserved_claim(kube, live), item["spec"]["claimRef"]
    if held is None or held.gone:
        return held is not None
    if (held.namespace, held.name) != (wanted["namespace"], wanted["name"]):
        raise Conflict(
            f"{describe(item)} is bound to {held}, and is needed for claim {wanted['name']} of namespace "
            f"{wanted['namespace']}. Rename the deployment (name:) or choose another deploy.namespace; or, if that "
            f"claim is not needed any more: kubectl -n {held.namespace} delete persistentvolumeclaim {held.name}, and "
            "try again (the files stay)."
        )
    return False


def release_volume(kube: Kube, volume: Object) -> None:
    """Let a new claim bind a volume whose claim was deleted; its files stay. The server rejects it if the volume has
    changed since it was read."""
    version = volume["metadata"].get("resourceVersion")
    changes = {"spec": {"claimRef": {"uid": None, "resourceVersion": None}}}
    kube.patch(volume, {"metadata": {"resourceVersion": version}, **changes} if version else changes)
