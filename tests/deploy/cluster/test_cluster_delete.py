"""deploy delete: all that is ours goes, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from ads_objects import item, labels, ours, pod
from api_server import ApiServer, Fault

from clickline.deploy.apply import DeleteResult, apply, delete_objects, find_objects
from clickline.deploy.kube_client import Kube
from clickline.errors import ClusterError
from clickline.progress import Progress


class Notes(Progress):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, figures: str) -> None:
        self.notes.append(figures)


def deployed(kube: Kube, *more: dict[str, Any]) -> None:
    done = apply(kube, [*ours(), *more], name="ads", namespace="shop", prune=False, progress=Progress())
    assert not done.failed


def removed(
    kube: Kube, *, with_data: bool = False, progress: Progress | None = None, seconds: float = 20
) -> DeleteResult:
    there = find_objects(kube, name="ads", namespace="shop")
    return delete_objects(
        kube,
        there,
        name="ads",
        namespace="shop",
        with_data=with_data,
        progress=progress or Progress(),
        seconds=seconds,
    )


def volume(name: str, namespace: str) -> dict[str, Any]:
    claim = {"namespace": namespace, "name": "ads-models"}
    made = item("v1", "PersistentVolume", name, "storage", spec={"claimRef": claim})
    del made["metadata"]["namespace"]
    return made


def test_what_runs_goes_and_data_stays(cluster: ApiServer, kube: Kube) -> None:
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


def test_with_data_all_of_it_goes_and_the_namespace_too(bare: ApiServer, kube: Kube) -> None:
    deployed(kube, volume("shop-ads-models", "shop"))
    done = removed(kube, with_data=True)
    assert done.kept == [] and done.removed[-1] == "Namespace shop"
    assert (
        bare.names("Namespace") == bare.names("PersistentVolume") == bare.names("PersistentVolumeClaim") == []
    )


def test_nothing_of_others_is_touched(bare: ApiServer, kube: Kube) -> None:
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


def test_a_namespace_that_was_there_before_stays(bare: ApiServer, kube: Kube) -> None:
    bare.namespace("shop")
    inside = [one for one in ours() if one["kind"] != "Namespace"]
    apply(kube, inside, name="ads", namespace="shop", prune=False, progress=Progress())
    removed(kube, with_data=True)
    assert bare.names("Namespace") == ["shop"]


def test_a_namespace_that_cannot_be_looked_through_stays(bare: ApiServer, kube: Kube) -> None:
    deployed(kube)
    bare.faults.append(Fault("list", "secrets"))
    done = removed(kube, with_data=True)
    assert done.notes == ["namespace shop stays: this user may not list secrets in it"]
    assert bare.names("Namespace") == ["shop"]


def test_it_returns_when_all_is_gone_with_the_pods(
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
    progress = Notes()
    done = removed(kube, progress=progress)
    assert "Deployment ads-predictor" in done.removed and bare.names("Pod") == []
    assert any("left: " in note and "ads-predictor" in note for note in progress.notes)
    assert not any("Pod" in one for one in done.removed)  # it went with its owner


def test_what_does_not_go_is_named_after_a_time(bare: ApiServer, kube: Kube) -> None:
    deployed(kube)
    bare.linger["ads-pipeline"] = 1000
    with pytest.raises(ClusterError, match=r"Job ads-pipeline: not gone after 1 s.* finalizer"):
        removed(kube, seconds=1)


def test_pods_that_outlive_their_owner_are_waited_for(bare: ApiServer, kube: Kube) -> None:
    deployed(kube)
    child = pod("ads-predictor-1", "predictor", "Running")
    child["metadata"]["ownerReferences"] = [{"uid": "of a controller that is slow"}]
    bare.put(child)
    with pytest.raises(ClusterError, match="Pod ads-predictor-1: not gone after 1 s"):
        removed(kube, seconds=1)


def test_kinds_that_may_not_be_listed_are_told(bare: ApiServer, kube: Kube) -> None:
    deployed(kube)
    bare.faults.append(Fault("list", "persistentvolumes"))
    done = removed(kube)
    assert len(done.notes) == 1 and "could not look for objects of kind PersistentVolume" in done.notes[0]
    assert bare.names("Deployment") == []


def test_twice_is_fine(bare: ApiServer, kube: Kube) -> None:
    deployed(kube)
    removed(kube, with_data=True)
    assert removed(kube, with_data=True).removed == []


def test_what_is_done_in_no_time_shows_no_progress(
    bare: ApiServer, kube: Kube, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clickline.progress.SLOW_SECONDS", 600.0)

    class Begun(Progress):
        titles: tuple[str, ...] = ()

        def begin(self, title: str, *, total_bytes: int | None = None, total_rows: int | None = None) -> None:
            self.titles += (title,)

    progress = Begun()
    deployed(kube)
    removed(kube, progress=progress)
    assert progress.titles == ()
