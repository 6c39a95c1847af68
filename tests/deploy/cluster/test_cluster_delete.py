"""deploy delete: deletes everything of the deployment, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from ads_objects import ADS, RecordedProgress, item, labels, ours, pod
from api_server import ApiServer, Fault

from clickline.deploy.apply import DeleteResult, apply, delete_objects, find_objects
from clickline.deploy.kube_client import Kube
from clickline.errors import ClusterError
from clickline.progress import Progress


def deployed(kube: Kube, *more: dict[str, Any]) -> None:
    done = apply(kube, ADS, [*ours(), *more], prune=False, progress=Progress())
    assert not done.failed


def removed(
    kube: Kube, *, with_data: bool = False, progress: Progress | None = None, seconds: float = 20
) -> DeleteResult:
    there = find_objects(kube, ADS)
    return delete_objects(
        kube, ADS, there, with_data=with_data, progress=progress or Progress(), seconds=seconds
    )


def volume(name: str, namespace: str) -> dict[str, Any]:
    claim = {"namespace": namespace, "name": "ads-models"}
    made = item("v1", "PersistentVolume", name, "storage", spec={"claimRef": claim})
    del made["metadata"]["namespace"]
    return made


def test_delete_removes_workloads_and_keeps_data(cluster: ApiServer, kube: Kube) -> None:
    extra = [
        item(api, kind, f"ads-{kind.lower()}", "pipeline", spec={})
        for api, kind in (
            ("batch.volcano.sh/v1alpha1", "Job"),
            ("ray.io/v1", "RayJob"),
            ("batch/v1", "CronJob"),
        )
    ]
    deployed(kube, *extra, volume("shop-ads-models", "shop"))
    done = removed(kube)
    assert done.kept == [
        "Namespace shop",
        "PersistentVolume shop-ads-models",
        "PersistentVolumeClaim ads-models",
    ]
    left = {(key[1], key[3]) for key in cluster.objects if key[3].startswith("ads-")}
    assert left == {("PersistentVolumeClaim", "ads-models")}
    assert len(done.removed) == 8


def test_delete_with_data_also_removes_volumes_and_namespace(bare: ApiServer, kube: Kube) -> None:
    deployed(kube, volume("shop-ads-models", "shop"))
    done = removed(kube, with_data=True)
    assert done.kept == [] and done.removed[-1] == "Namespace shop"
    assert (
        bare.names("Namespace") == bare.names("PersistentVolume") == bare.names("PersistentVolumeClaim") == []
    )


def test_delete_spares_foreign_objects(bare: ApiServer, kube: Kube) -> None:
    deployed(kube)
    theirs = item("v1", "ConfigMap", "theirs", "config")
    theirs["metadata"]["labels"] = labels("config", "ads2")
    by_hand = item("v1", "ConfigMap", "by-hand", "config")
    del by_hand["metadata"]["labels"]["app.kubernetes.io/managed-by"]
    for one in (theirs, by_hand, volume("other-ads-models", "other")):
        bare.put(one)
    done = removed(kube, with_data=True)
    assert bare.names("ConfigMap") == ["by-hand", "kube-root-ca.crt", "theirs"]
    assert bare.names("PersistentVolume") == ["other-ads-models"]
    assert done.kept == ["Namespace shop"]
    assert done.notes == ["namespace shop stays: it also holds ConfigMap theirs, ConfigMap by-hand"]


def test_delete_keeps_an_existing_namespace(bare: ApiServer, kube: Kube) -> None:
    bare.namespace("shop")
    inside = [one for one in ours() if one["kind"] != "Namespace"]
    apply(kube, ADS, inside, prune=False, progress=Progress())
    removed(kube, with_data=True)
    assert bare.names("Namespace") == ["shop"]


def test_delete_keeps_a_namespace_that_cannot_be_listed(bare: ApiServer, kube: Kube) -> None:
    deployed(kube)
    bare.faults.append(Fault("list", "secrets"))
    done = removed(kube, with_data=True)
    assert done.notes == ["namespace shop stays: this user may not list secrets in it"]
    assert bare.names("Namespace") == ["shop"]


def test_delete_returns_when_objects_and_pods_are_gone(
    bare: ApiServer, kube: Kube, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clickline.progress.SLOW_SECONDS", 0.0)
    deployed(kube)
    owner = bare.one("Deployment", "ads-predictor")
    assert owner is not None
    child = pod("ads-predictor-1", "predictor", "Running")
    child["metadata"]["ownerReferences"] = [{"uid": owner["metadata"]["uid"]}]
    bare.put(child)
    bare.linger["ads-predictor"] = 2
    progress = RecordedProgress()
    done = removed(kube, progress=progress)
    assert "Deployment ads-predictor" in done.removed and bare.names("Pod") == []
    assert any("left: " in note and "ads-predictor" in note for note in progress.notes)
    assert not any("Pod" in one for one in done.removed)  # deleted with its owner


def test_delete_names_objects_that_stay(bare: ApiServer, kube: Kube) -> None:
    deployed(kube)
    bare.linger["ads-pipeline"] = 1000
    with pytest.raises(ClusterError, match=r"Job ads-pipeline: not gone after 1 s.* finalizer"):
        removed(kube, seconds=1)


def test_delete_waits_for_pods_that_outlive_their_owner(bare: ApiServer, kube: Kube) -> None:
    deployed(kube)
    child = pod("ads-predictor-1", "predictor", "Running")
    child["metadata"]["ownerReferences"] = [{"uid": "of a controller that is slow"}]
    bare.put(child)
    with pytest.raises(ClusterError, match="Pod ads-predictor-1: not gone after 1 s"):
        removed(kube, seconds=1)


def test_delete_reports_kinds_that_cannot_be_listed(bare: ApiServer, kube: Kube) -> None:
    deployed(kube)
    bare.faults.append(Fault("list", "persistentvolumes"))
    done = removed(kube)
    assert len(done.notes) == 1 and "could not look for objects of kind PersistentVolume" in done.notes[0]
    assert bare.names("Deployment") == []


def test_delete_is_idempotent(bare: ApiServer, kube: Kube) -> None:
    deployed(kube)
    removed(kube, with_data=True)
    assert removed(kube, with_data=True).removed == []


def test_quick_delete_shows_no_progress(bare: ApiServer, kube: Kube, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clickline.progress.SLOW_SECONDS", 600.0)
    progress = RecordedProgress()
    deployed(kube)
    removed(kube, progress=progress)
    assert progress.titles == []
