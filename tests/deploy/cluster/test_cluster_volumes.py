"""Volumes that outlive their claims: a deployment that is applied again after its namespace was deleted finds its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ads_objects import ADS
from api_server import ApiServer, Fault

from clickline.deploy.apply import ApplyResult, apply
from clickline.deploy.deploy_status import fetch_status, summarize
from clickline.deploy.kube_client import Kube
from clickline.deploy.render import render
from clickline.errors import ClusterError
from clickline.progress import Progress

STORED = {
    "nfs": "{kind: nfs, server: files.example, path: /exports/ads}",
    "host": "{kind: host, path: /srv/ads}",
}


@pytest.fixture(params=sorted(STORED))
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> list[dict[str, Any]]:
    """A complete deployment with NFS or host volumes."""
    kind = STORED[request.param]
    file = tmp_path / "clickline.yaml"
    file.write_text(
        "name: ads\ndata: {format: criteo, train: data/train.tsv, eval: data/eval.tsv}\n"
        f"deploy: {{namespace: shop, storage: {{data: {kind}, models: {kind}}}}}\n"
    )
    return render(file).objects


def run(kube: Kube, objects: list[dict[str, Any]]) -> ApplyResult:
    return apply(kube, ADS, objects, prune=False, progress=Progress())


def claims(kube: Kube) -> dict[str, tuple[str, str]]:
    found = summarize(fetch_status(kube, ADS))
    return {one["claim"]: (one["state"], one["why"]) for one in found["claims"]}


def deploy_and_lose_the_namespace(api: ApiServer, kube: Kube, objects: list[dict[str, Any]]) -> None:
    run(kube, objects)
    api.bind_volumes()
    assert {state for state, _ in claims(kube).values()} == {"Bound"}
    api.delete(("v1", "Namespace", "", "shop"), None)
    api.bind_volumes()
    volume = api.one("PersistentVolume", "shop-ads-data")
    assert volume is not None and volume["status"]["phase"] == "Released"


def test_released_volumes_are_bound_again_after_namespace_deletion(
    bare: ApiServer, kube: Kube, objects: list[dict[str, Any]]
) -> None:
    deploy_and_lose_the_namespace(bare, kube, objects)
    done = run(kube, objects)
    bare.bind_volumes()
    assert claims(kube) == {"ads-data": ("Bound", ""), "ads-models": ("Bound", "")}
    assert [one for one in done.changed if "Volume" in one] == [
        "PersistentVolume shop-ads-data",
        "PersistentVolume shop-ads-models",
    ]
    assert any("PersistentVolume shop-ads-data was still reserved" in note for note in done.notes)
    assert ("delete", "PersistentVolume", "shop-ads-data") not in bare.writes
    assert run(kube, objects).changed == []


def test_pending_claim_gets_a_released_volume(
    bare: ApiServer, kube: Kube, objects: list[dict[str, Any]]
) -> None:
    deploy_and_lose_the_namespace(bare, kube, objects)
    bare.namespace("shop", {"app.kubernetes.io/managed-by": "clickline", "app.kubernetes.io/instance": "ads"})
    for one in objects:  # what `kubectl apply -k` does
        if one["kind"] == "PersistentVolumeClaim":
            kube.apply(one)
    bare.bind_volumes()
    state, why = claims(kube)["ads-data"]
    assert state == "Pending"
    assert "volume shop-ads-data is still reserved for a deleted claim" in why
    assert "clickline deploy apply" in why
    run(kube, objects)
    bare.bind_volumes()
    assert claims(kube)["ads-data"] == ("Bound", "")


def test_volume_of_another_claim_is_a_conflict_before_any_change(
    bare: ApiServer, kube: Kube, objects: list[dict[str, Any]]
) -> None:
    run(kube, objects)
    bare.namespace("elsewhere")
    place = {"name": "mine", "namespace": "elsewhere"}
    claim = bare.put({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": place, "spec": {}})
    volume = bare.one("PersistentVolume", "shop-ads-data")
    assert volume is not None
    volume["spec"]["claimRef"] |= {**place, "uid": claim["metadata"]["uid"]}
    bare.writes.clear()
    with pytest.raises(ClusterError) as refused:
        run(kube, objects)
    words = str(refused.value)
    assert "PersistentVolume shop-ads-data is bound to claim mine of namespace elsewhere" in words
    assert "claim ads-data of namespace shop" in words and "Nothing was changed." in words
    assert bare.writes == []


def test_volume_that_changes_during_release_is_left_alone(
    bare: ApiServer, kube: Kube, objects: list[dict[str, Any]]
) -> None:
    deploy_and_lose_the_namespace(bare, kube, objects)
    bare.faults.append(
        Fault("patch", "persistentvolumes", 409, "Operation cannot be fulfilled: modified", dry_run=False)
    )
    done = run(kube, objects)
    assert "modified" in done.failed["PersistentVolume shop-ads-data"]


# ── why a claim waits ──────────────────────────────────────────────────────────────────────────


def waiting(api: ApiServer, **spec: Any) -> None:
    api.namespace("shop")
    labels = {"app.kubernetes.io/name": "clickline", "app.kubernetes.io/instance": "ads"}
    metadata = {"name": "ads-data", "namespace": "shop", "labels": labels}
    body = {"spec": spec, "status": {"phase": "Pending"}}
    api.put({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, **body})


def tell(api: ApiServer, reason: str, message: str, kind: str = "Normal") -> None:
    about = {"kind": "PersistentVolumeClaim", "name": "ads-data"}
    metadata = {"name": f"ads-data.{reason}", "namespace": "shop"}
    more = {"reason": reason, "message": message, "lastTimestamp": "2026-11-16T10:00:00Z"}
    event = {"apiVersion": "v1", "kind": "Event", "metadata": metadata, "type": kind}
    api.put({**event, "involvedObject": about, **more})


def test_pending_claim_shows_the_clusters_message(bare: ApiServer, kube: Kube) -> None:
    words = "no persistent volumes available for this claim and no storage class is set"
    waiting(bare)
    tell(bare, "FailedBinding", words)
    assert claims(kube)["ads-data"] == ("Pending", f"FailedBinding: {words}")
    found = summarize(fetch_status(kube, ADS))
    assert found["errors"] == []  # the event is not a warning


def test_claim_with_a_missing_volume_names_it(bare: ApiServer, kube: Kube) -> None:
    waiting(bare, volumeName="shop-ads-data")
    assert claims(kube)["ads-data"] == (
        "Pending",
        "volume shop-ads-data does not exist: `clickline deploy apply` creates it",
    )


def test_forbidden_volumes_fall_back_to_events(bare: ApiServer, kube: Kube) -> None:
    waiting(bare, volumeName="shop-ads-data")
    tell(bare, "FailedBinding", 'volume "shop-ads-data" already bound to a different claim.', "Warning")
    bare.faults.append(Fault("get", "persistentvolumes"))
    assert "already bound to a different claim" in claims(kube)["ads-data"][1]
