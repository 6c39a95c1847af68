"""The client: how it finds the cluster, and its messages if that fails or a request is rejected."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import pytest
from ads_objects import deployment, item, labels
from api_server import ApiServer, Fault

from clickline.deploy.kube_client import ApiError, Kube, connect
from clickline.errors import ClusterError


def test_missing_kubeconfig_is_reported_with_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(
        ClusterError, match=r"no kubeconfig was found: .*/none does not exist. Set KUBECONFIG"
    ):
        connect()


def test_unknown_context_is_reported_with_the_existing_ones(bare: ApiServer) -> None:
    with pytest.raises(ClusterError, match=r"has no context 'tset'. Allowed: test\."):
        connect("tset")


@pytest.mark.parametrize("text", ["", "just words", "a: [1,", "clusters: []\n"])
def test_invalid_kubeconfig_is_reported(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "kubeconfig"
    file.write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(file))
    with pytest.raises(ClusterError, match=str(file)):
        connect()


def test_context_without_its_cluster_is_reported(
    bare: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = bare.kubeconfig(tmp_path / "torn")
    file.write_text(file.read_text().replace("name: small", "name: other"))
    monkeypatch.setenv("KUBECONFIG", str(file))
    with pytest.raises(ClusterError, match=r"torn: .*name small.*\. Choose a context"):
        connect()


def test_pod_without_a_token_gets_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    with pytest.raises(ClusterError, match="automountServiceAccountToken"):
        connect()


def test_unreachable_server_is_reported_at_once_with_its_address(
    bare: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and never listening: every connection is refused
        address = f"https://127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("KUBECONFIG", str(bare.kubeconfig(tmp_path / "dead", server=address)))
        with pytest.raises(ClusterError, match=rf"{address} \(context test\) cannot be reached: .*refused"):
            connect().list("v1", "Pod", "shop")


def test_server_that_is_not_kubernetes_is_reported(
    bare: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare.pages["web", "/api/v1"] = (200, "<html>welcome</html>")
    proxied = f"{bare.url}/api/v1/namespaces/shop/pods/web:80/proxy"
    monkeypatch.setenv("KUBECONFIG", str(bare.kubeconfig(tmp_path / "web", server=proxied)))
    with pytest.raises(ClusterError, match="does not answer as a Kubernetes API does: b'<html>"):
        connect().list("v1", "Pod", "shop")


def test_untrusted_certificate_is_rejected(
    bare: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(bare.kubeconfig(tmp_path / "foreign", trusted=False)))
    with pytest.raises(
        ClusterError, match=r"failed the TLS check: .*certificate.*Check certificate-authority"
    ):
        connect().list("v1", "Pod", "shop")


def test_closed_connection_is_reported(bare: ApiServer, kube: Kube) -> None:
    bare.faults.append(Fault("list", "pods", cut=True))
    with pytest.raises(ClusterError, match=r"closed the connection.*Try again"):
        kube.list("v1", "Pod", "shop")


def test_wrong_credentials_are_reported(
    bare: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(bare.kubeconfig(tmp_path / "old", token="expired")))
    with pytest.raises(ApiError, match=r"does not accept the credentials of context test \(401\)"):
        connect().list("v1", "Pod", "shop")


def test_missing_permission_is_reported_with_verb_resource_and_namespace(bare: ApiServer, kube: Kube) -> None:
    bare.namespace("shop")
    bare.faults.append(Fault("patch", "deployments"))
    with pytest.raises(
        ApiError, match=r"patch deployments.apps in namespace shop \(403\). Ask for this permission"
    ):
        kube.apply(deployment())


def test_apply_get_and_delete_round_trip(bare: ApiServer, kube: Kube) -> None:
    bare.namespace("shop")
    assert kube.live(deployment()) is None
    kube.apply(deployment(), dry_run=True)
    assert bare.names("Deployment") == []
    kube.apply(deployment())
    live = kube.live(deployment())
    assert live is not None and live["spec"]["progressDeadlineSeconds"] == 600
    assert "force=true" in bare.requests[-2] and "fieldValidation=Strict" in bare.requests[-2]
    kube.delete(live)
    assert bare.names("Deployment") == []
    kube.delete(live)  # idempotent


def test_delete_spares_a_recreated_object_of_the_same_name(bare: ApiServer, kube: Kube) -> None:
    bare.namespace("shop")
    old = bare.put(deployment())
    bare.put(deployment())
    kube.delete(old)
    assert bare.names("Deployment") == ["ads-predictor"]


def test_lists_are_paged_and_filtered_by_label(
    bare: ApiServer, kube: Kube, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clickline.deploy.kube_client._PAGE", 2)
    for n in range(5):
        bare.put(item("v1", "ConfigMap", f"ads-{n}", "config"))
    bare.put({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "other", "namespace": "shop"}})
    found = kube.list("v1", "ConfigMap", "shop", labels("config"))
    assert [one["metadata"]["name"] for one in found] == [f"ads-{n}" for n in range(5)]
    assert {(one["apiVersion"], one["kind"]) for one in found} == {("v1", "ConfigMap")}
    assert kube.list("ray.io/v1", "RayJob", "shop") == []


def test_server_warnings_are_kept_once(bare: ApiServer, kube: Kube) -> None:
    bare.namespace("shop")
    bare.warnings["deployments"] = "would violate PodSecurity"
    kube.apply(deployment(), dry_run=True)
    kube.apply(deployment())
    assert kube.warnings == ["would violate PodSecurity"]


def test_kubectl_and_the_client_see_the_same_objects(bare: ApiServer, kube: Kube, tmp_path: Path) -> None:
    """The real kubectl accepts the test server as a cluster."""
    bare.namespace("shop")
    kube.apply(deployment())
    cache = ["--cache-dir", str(tmp_path / "cache")]
    result = subprocess.run(
        [
            "kubectl",
            *cache,
            "-n",
            "shop",
            "get",
            "deployments",
            "-l",
            "app.kubernetes.io/instance=ads",
            "-o",
            "name",
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (result.stdout, result.returncode) == ("deployment.apps/ads-predictor\n", 0), result.stderr
