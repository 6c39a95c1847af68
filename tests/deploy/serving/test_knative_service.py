"""The Knative Service: only fields that Knative allows, and a reproducible traffic split."""

from __future__ import annotations

from typing import Any

import pytest
from serving_plans import EVERY_WAY, objects, plan, the

from clickline.deploy.config_checks import config_mistakes, config_notes
from clickline.deploy.knative import feature_flags, revision

KNATIVE = [way for way in EVERY_WAY if way.startswith("knative")]

# Fields that Knative's webhook allows with default flags (its field masks), as far as we use them.
_POD = {"automountServiceAccountToken", "containers", "enableServiceLinks", "imagePullSecrets"}
_POD |= {"serviceAccountName", "volumes"}
_CONTAINER = {
    "args",
    "command",
    "env",
    "envFrom",
    "image",
    "imagePullPolicy",
    "livenessProbe",
    "name",
    "ports",
}
_CONTAINER |= {"readinessProbe", "resources", "securityContext", "startupProbe", "volumeMounts", "workingDir"}
_CONTAINER |= {"terminationMessagePolicy"}
_SECURITY = {
    "allowPrivilegeEscalation",
    "capabilities",
    "readOnlyRootFilesystem",
    "runAsNonRoot",
    "runAsUser",
}
_SECURITY |= {"seccompProfile"}
_BY_FLAG = {
    "nodeSelector": "kubernetes.podspec-nodeselector",
    "tolerations": "kubernetes.podspec-tolerations",
}


def _service(*overrides: str) -> dict[str, Any]:
    made = objects(plan("deploy.serving.kind=knative", *overrides))
    return the("Service", [one for one in made if one["apiVersion"] == "serving.knative.dev/v1"])


@pytest.mark.parametrize("way", KNATIVE)
def test_pod_uses_only_allowed_or_flagged_fields(way: str) -> None:
    one = plan(*EVERY_WAY[way])
    spec = _service(*EVERY_WAY[way])["spec"]["template"]["spec"]
    needed = {flag for key, flag in _BY_FLAG.items() if key in spec}
    assert spec.keys() <= _POD | _BY_FLAG.keys()
    (container,) = spec["containers"]
    assert container.keys() <= _CONTAINER
    assert container["securityContext"].keys() <= _SECURITY
    (port,) = container["ports"]
    assert port["name"] in ("http1", "h2c")
    mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
    for volume in spec["volumes"]:
        kind = (volume.keys() - {"name"}).pop()
        if kind == "persistentVolumeClaim":
            needed.add("kubernetes.podspec-persistent-volume-claim")
            assert volume[kind]["readOnly"] is True
        assert kind in ("configMap", "emptyDir", "persistentVolumeClaim", "secret")
        assert kind == "emptyDir" or mounts[volume["name"]]["readOnly"] is True
    for variable in container["env"]:
        assert variable["name"] not in ("PORT", "K_SERVICE", "K_CONFIGURATION", "K_REVISION")
        assert "valueFrom" not in variable
    assert set(feature_flags(one)) == needed
    assert all(any(flag in note for note in config_notes(one)) for flag in needed)


def test_without_volumes_no_feature_flag_is_needed() -> None:
    assert feature_flags(plan("deploy.serving.kind=knative", *EVERY_WAY["stores only"])) == []


def test_scale_and_concurrency_are_annotations() -> None:
    template = _service(
        "deploy.serving.replicas=0", "deploy.serving.max_replicas=7", "deploy.serving.concurrency=12"
    )
    annotations = template["spec"]["template"]["metadata"]["annotations"]
    assert annotations["autoscaling.knative.dev/min-scale"] == "0"
    assert annotations["autoscaling.knative.dev/max-scale"] == "7"
    assert annotations["autoscaling.knative.dev/target"] == "12"


def test_all_requests_go_to_the_newest_revision_without_a_canary() -> None:
    assert _service()["spec"]["traffic"] == [{"latestRevision": True, "percent": 100}]
    stable, canary = _service("deploy.serving.canary={stable: ads-predictor-0123abcd, percent: 20}")["spec"][
        "traffic"
    ]
    assert (stable["revisionName"], stable["percent"]) == ("ads-predictor-0123abcd", 80)
    assert (canary["latestRevision"], canary["percent"]) == (True, 20)


def test_revision_name_is_a_hash_of_its_content() -> None:
    one = plan("deploy.serving.kind=knative")
    name = _service()["spec"]["template"]["metadata"]["name"]
    assert name == revision(one) and name.startswith("ads-predictor-")
    changed = [
        revision(plan("deploy.serving.kind=knative", more))
        for more in ("serve.queue_size=9", "deploy.image=a:2")
    ]
    assert len({name, *changed}) == 3


def test_changing_traffic_creates_no_revision() -> None:
    shares = [
        f"deploy.serving.canary={{stable: ads-predictor-0123abcd, percent: {percent}}}"
        for percent in (10, 50)
    ]
    assert {revision(plan("deploy.serving.kind=knative", share)) for share in shares} == {
        revision(plan("deploy.serving.kind=knative"))
    }


def test_canary_of_the_same_revision_is_rejected() -> None:
    same = revision(plan("deploy.serving.kind=knative"))
    (mistake,) = config_mistakes(
        plan("deploy.serving.kind=knative", f"deploy.serving.canary={{stable: {same}}}")
    )
    assert mistake.key == "deploy.serving.canary.stable"
    assert "nothing to compare" in mistake.problem
