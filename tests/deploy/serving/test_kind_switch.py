"""Switching between the two kinds of serving: both create a Kubernetes Service of the same name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clickline.config import Config
from clickline.deploy.apply import ApplyResult, apply
from clickline.deploy.kube_client import Kube, connect
from clickline.deploy.render import Rendered, render
from clickline.errors import ClusterError
from clickline.progress import Progress
from deploy.cluster.api_server import CORE, OPERATORS, ApiServer, Fault, make_certificate, serving

_KNATIVE = "deploy.serving.kind=knative"


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with serving({**CORE, **OPERATORS}, make_certificate(tmp_path)) as server:
        default = {"storageclass.kubernetes.io/is-default-class": "true"}
        metadata = {"name": "standard", "annotations": default}
        server.put({"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": metadata})
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path / "kubeconfig")))
        yield server


@pytest.fixture
def kube(api: ApiServer) -> Iterator[Kube]:
    with connect() as client:
        yield client


def _rendered(folder: Path, *overrides: str) -> Rendered:
    file = folder / "clickline.yaml"
    file.write_text("name: ads\ndata: {train: data/train.tsv}\n")
    return render(file, overrides)


def _apply(kube: Kube, made: Rendered) -> ApplyResult:
    config = Config.model_validate({"name": made.name, "data": {"train": "x"}})
    return apply(kube, config, made.objects, prune=False, progress=Progress())


def _as_knative_does(api: ApiServer) -> None:
    """The Kubernetes Service of a Route, with the labels that the Route inherits."""
    ours = api.objects["serving.knative.dev/v1", "Service", "clickline", "ads-predictor"]
    route = {"apiVersion": "serving.knative.dev/v1", "kind": "Route", "name": "ads-predictor", "uid": "1"}
    metadata: dict[str, Any] = {
        "name": "ads-predictor",
        "namespace": "clickline",
        "labels": ours["metadata"]["labels"],
        "ownerReferences": [{**route, "controller": True}],
    }
    spec = {"type": "ExternalName", "externalName": "ads-predictor.clickline.svc.cluster.local"}
    api.put({"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec})


def test_service_with_the_name_that_knative_needs_is_reported_before_any_change(
    api: ApiServer, kube: Kube, tmp_path: Path
) -> None:
    _apply(kube, _rendered(tmp_path))
    before = list(api.writes)
    knative = _rendered(tmp_path, _KNATIVE)
    with pytest.raises(ClusterError, match="kubectl -n clickline delete service ads-predictor"):
        _apply(kube, knative)
    assert api.writes == before
    del api.objects["v1", "Service", "clickline", "ads-predictor"]
    assert not _apply(kube, knative).failed
    _as_knative_does(api)
    assert _apply(kube, knative).created == []


def test_service_created_by_knative_is_not_a_conflict(api: ApiServer, kube: Kube, tmp_path: Path) -> None:
    _apply(kube, _rendered(tmp_path, _KNATIVE))
    _as_knative_does(api)
    before = list(api.writes)
    with pytest.raises(ClusterError, match="it belongs to Route ads-predictor"):
        _apply(kube, _rendered(tmp_path))
    assert api.writes == before


def test_knative_without_claim_support_is_reported(api: ApiServer, kube: Kube, tmp_path: Path) -> None:
    words = (
        'admission webhook "validation.webhook.serving.knative.dev" denied the request: validation failed: Persistent '
        "volume claim support is disabled, but found persistent volume claim ads-models"
    )
    made = _rendered(tmp_path, _KNATIVE)
    (service,) = (one for one in made.objects if one["apiVersion"] == "serving.knative.dev/v1")
    api.faults.append(Fault("patch", "services", 400, words, name=service["metadata"]["name"], dry_run=True))
    with pytest.raises(ClusterError, match=r"or set deploy\.serving\.kind: deployment"):
        _apply(kube, made)
    assert api.one("Namespace", "clickline") is None
