"""A cluster per test: an API server, its kubeconfig and a client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from api_server import CORE, OPERATORS, ApiServer, make_certificate, serving

from clickline.deploy.kube_client import Kube, connect


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_certificate(tmp_path_factory.mktemp("certificate"))


@pytest.fixture
def bare(
    certificate: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ApiServer]:
    """A cluster without operators; KUBECONFIG names it."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with serving(CORE, certificate) as api:
        _furnish(api)
        monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig(tmp_path / "kubeconfig")))
        yield api


@pytest.fixture
def cluster(bare: ApiServer) -> ApiServer:
    """A cluster with Volcano, KubeRay, Argo and Knative."""
    bare.kinds.update(OPERATORS)
    return bare


@pytest.fixture
def kube(bare: ApiServer) -> Iterator[Kube]:
    with connect() as client:
        yield client


def _furnish(api: ApiServer) -> None:
    default = {"storageclass.kubernetes.io/is-default-class": "true"}
    metadata = {"name": "standard", "annotations": default}
    api.put({"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": metadata})
