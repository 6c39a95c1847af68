"""Every variant of serving, storage, tracking and access, validated as an API server would."""

from __future__ import annotations

from typing import Any

import kubernetes_validate
import pytest
import yaml
from serving_plans import EVERY_WAY, as_overrides, containers, labelled, objects, plan, templates, the

from clickline.config import load_config
from clickline.deploy.objects import to_yaml
from clickline.deploy.predictors import serve_overrides
from deploy.schemas.schemas import pod_specs, problems, restricted_problems

WAYS = pytest.mark.parametrize("way", EVERY_WAY)


@WAYS
def test_objects_match_the_schemas_and_unknown_fields_are_rejected(way: str) -> None:
    made = objects(plan(*EVERY_WAY[way]))
    assert [problem for one in made for problem in problems(one)] == []
    for one in made:
        if "spec" in one:
            assert problems({**one, "spec": {**one["spec"], "unheardOf": 1}})
        if not one["apiVersion"].startswith("serving.knative.dev"):
            kubernetes_validate.validate(one, "1.34", strict=True)  # of the cluster that they were tested on


@WAYS
def test_pods_meet_the_standard_that_the_namespace_enforces(way: str) -> None:
    made = objects(plan(*EVERY_WAY[way]))
    assert [wrong for one in made for spec in pod_specs(one) for wrong in restricted_problems(spec)] == []
    for one in made:
        if one["kind"] == "Namespace":
            assert one["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"


@WAYS
def test_same_config_renders_the_same_text(way: str) -> None:
    assert to_yaml(objects(plan(*EVERY_WAY[way]))) == to_yaml(objects(plan(*EVERY_WAY[way])))


@WAYS
def test_every_object_has_labels_and_a_unique_name(way: str) -> None:
    made = objects(plan(*EVERY_WAY[way]))
    for one in made:
        labels = one["metadata"]["labels"]
        assert labels["app.kubernetes.io/instance"] == "ads"
        assert labels["app.kubernetes.io/managed-by"] == "clickline"
        cluster_wide = one["kind"] in ("Namespace", "PersistentVolume")
        assert ("namespace" in one["metadata"]) is not cluster_wide
    names = [(one["apiVersion"], one["kind"], one["metadata"]["name"]) for one in made]
    assert len(names) == len(set(names))


@WAYS
def test_selectors_match_pods_and_ports_exist(way: str) -> None:
    made = objects(plan(*EVERY_WAY[way]))
    made_of = templates(made)
    for owner, template in made_of.items():
        kind, _, name = owner.partition("/")
        one = the(kind, [o for o in made if o["apiVersion"] != "v1"], name)
        if "selector" in one["spec"]:
            assert labelled(one["spec"]["selector"], template["metadata"]["labels"])
        for container in containers(template):
            ports = {port["name"]: port["containerPort"] for port in container.get("ports", ())}
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                handler = container.get(probe, {})
                for how in ("httpGet", "tcpSocket", "grpc"):
                    if how in handler:
                        port = handler[how]["port"]
                        assert port in ports or port in ports.values()
    pods = [template["metadata"]["labels"] for template in made_of.values()]
    for one in made:
        if one["kind"] == "Service" and one["apiVersion"] == "v1":
            chosen = {"matchLabels": one["spec"]["selector"]}
            (template,) = [t for t in made_of.values() if labelled(chosen, t["metadata"]["labels"])]
            named = {p["name"]: p["containerPort"] for c in containers(template) for p in c.get("ports", ())}
            for port in one["spec"]["ports"]:
                assert named[port["targetPort"]] == port["port"]
        if one["kind"] == "PodDisruptionBudget":
            assert sum(labelled(one["spec"]["selector"], labels) for labels in pods) == 1
        if one["kind"] == "HorizontalPodAutoscaler":
            target = one["spec"]["scaleTargetRef"]
            assert "replicas" not in the(target["kind"], made, target["name"])["spec"]


@WAYS
def test_every_mount_has_a_volume_and_every_claim_is_created_or_named(way: str) -> None:
    one = plan(*EVERY_WAY[way])
    made = objects(one)
    claims = {o["metadata"]["name"] for o in made if o["kind"] == "PersistentVolumeClaim"}
    theirs = {one.deploy.storage.data.claim, one.deploy.storage.models.claim}
    for template in templates(made).values():
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        mounted = {mount["name"] for c in containers(template) for mount in c["volumeMounts"]}
        assert mounted == volumes.keys()
        for volume in volumes.values():
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in claims | theirs


# ── storage ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("way", "source"), [("nfs", "nfs"), ("host folders", "hostPath")])
def test_nfs_and_host_volumes_are_bound_to_their_claim_and_retained(way: str, source: str) -> None:
    made = objects(plan(*EVERY_WAY[way]))
    for name in ("ads-data", "ads-models"):
        volume, claim = (
            the("PersistentVolume", made, f"clickline-{name}"),
            the("PersistentVolumeClaim", made, name),
        )
        assert claim["spec"]["volumeName"] == volume["metadata"]["name"]
        reference = volume["spec"]["claimRef"]
        assert (reference["namespace"], reference["name"]) == ("clickline", name)
        assert claim["spec"]["storageClassName"] == volume["spec"]["storageClassName"] == ""
        assert set(claim["spec"]["accessModes"]) <= set(volume["spec"]["accessModes"])
        assert volume["spec"]["persistentVolumeReclaimPolicy"] == "Retain"
        assert source in volume["spec"]


def test_new_claim_uses_the_default_class_unless_one_is_set() -> None:
    claim = the("PersistentVolumeClaim", objects(plan()), "ads-models")["spec"]
    assert claim == {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "10Gi"}}}
    claim = the("PersistentVolumeClaim", objects(plan(*EVERY_WAY["a class"])), "ads-models")["spec"]
    assert claim["storageClassName"] == "fast"
    assert claim["accessModes"] == ["ReadWriteMany"]
    assert claim["resources"] == {"requests": {"storage": "100Gi"}}


@pytest.mark.parametrize("way", ["own claims", "stores only"])
def test_existing_claims_and_object_stores_create_no_claim(way: str) -> None:
    kinds = {one["kind"] for one in objects(plan(*EVERY_WAY[way]))}
    assert not kinds & {"PersistentVolume", "PersistentVolumeClaim"}


def test_cache_volume_is_on_one_node_with_the_configured_size() -> None:
    made = objects(plan(*EVERY_WAY["node cache"], "cache.size=3GiB"))
    volume = the("PersistentVolume", made, "clickline-ads-cache")["spec"]
    (term,) = volume["nodeAffinity"]["required"]["nodeSelectorTerms"]
    assert term["matchExpressions"] == [
        {"key": "kubernetes.io/hostname", "operator": "In", "values": ["worker-1"]}
    ]
    assert volume["local"] == {"path": "/srv/cache"}
    assert volume["capacity"] == {"storage": "3072Mi"}


# ── predictors and lookup servers ──────────────────────────────────────────────────────────────


def test_rollout_keeps_old_predictors_until_new_ones_are_ready() -> None:
    spec = the("Deployment", objects(plan("serve.drain_timeout=30")))["spec"]
    assert spec["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    (_, seconds) = container["lifecycle"]["preStop"]["exec"]["command"]
    assert pod["terminationGracePeriodSeconds"] > int(seconds) + 30
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"


def test_probes_and_ports_use_tls_if_the_server_does() -> None:
    made = objects(plan(*EVERY_WAY["tls"]))
    for owner in ("Deployment", "StatefulSet"):
        template = the(owner, made)["spec"]["template"]
        (container,) = template["spec"]["containers"]
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[probe]["httpGet"]["scheme"] == "HTTPS"
        assert template["metadata"]["annotations"]["prometheus.io/scheme"] == "https"
    service = the("Service", made, "ads-predictor")["spec"]
    assert {port["appProtocol"] for port in service["ports"]} == {"https"}


def test_node_ports_are_configurable() -> None:
    service = the("Service", objects(plan(*EVERY_WAY["node ports"])), "ads-predictor")["spec"]
    assert service["type"] == "NodePort"
    assert {port["name"]: port["nodePort"] for port in service["ports"]} == {"http": 30501, "grpc": 30500}


def test_replicas_are_fixed_or_left_to_the_autoscaler() -> None:
    made = objects(plan("deploy.serving={replicas: 3, max_replicas: 9, cpu_target: 55}"))
    scaler = the("HorizontalPodAutoscaler", made)["spec"]
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (3, 9)
    assert scaler["metrics"][0]["resource"]["target"]["averageUtilization"] == 55
    for fixed in ("null", "3"):
        made = objects(plan(f"deploy.serving={{replicas: 3, max_replicas: {fixed}}}"))
        assert the("Deployment", made)["spec"]["replicas"] == 3
        assert not [one for one in made if one["kind"] == "HorizontalPodAutoscaler"]


def test_predictors_know_the_lookup_pods_of_each_shard() -> None:
    one = plan(*EVERY_WAY["lookup"])
    made = objects(one)
    stateful, service = the("StatefulSet", made)["spec"], the("Service", made, "ads-lookup")["spec"]
    assert stateful["replicas"] == 6
    assert stateful["serviceName"] == "ads-lookup" and service["clusterIP"] == "None"
    assert one.config.serve.lookup is not None
    for shard, addresses in enumerate(one.config.serve.lookup.shards):
        for address in addresses:
            host, port = address.split(":")
            pod, subdomain = host.split(".")
            assert subdomain == "ads-lookup" and int(port) == service["ports"][0]["port"]
            assert int(pod.removeprefix("ads-lookup-")) % 3 == shard
    assert len({a for shard in one.config.serve.lookup.shards for a in shard}) == 6


def test_servers_listen_on_all_interfaces_and_keep_user_settings() -> None:
    config = plan().config
    assert (config.serve.host, config.serve.processes) == ("0.0.0.0", 1)
    assert config.tracking.uri is None
    chosen = plan(
        "serve.host=::",
        "serve.allow_unauthenticated=true",
        "serve.processes=3",
        "tracking.uri=http://mlflow.ml:5000",
        "deploy.serving.lookup={}",
        "serve.lookup={shards: [['elsewhere:1']], timeout_ms: 77}",
    ).config
    assert (chosen.serve.host, chosen.serve.processes) == ("::", 3)
    assert chosen.tracking.uri == "http://mlflow.ml:5000"
    assert chosen.serve.lookup is not None
    assert chosen.serve.lookup.timeout_ms == 77
    assert len(chosen.serve.lookup.shards) == chosen.publish.shards


@pytest.mark.parametrize(
    ("resources", "processes"),
    [("{cpu: 100m}", 1), ("{cpu: 1500m}", 1), ("{cpu: '2'}", 2), ("{cpu: '2', cpu_limit: '6'}", 6)],
)
def test_one_serving_process_per_core_of_the_pod(resources: str, processes: int) -> None:
    assert plan(f"deploy.resources.predictor={resources}").config.serve.processes == processes


def test_overrides_are_accepted_by_the_config_loader(tmp_path: Any) -> None:
    file = tmp_path / "clickline.yaml"
    file.write_text("data: {train: data/x}\ndeploy: {tracking: {enabled: true}, serving: {lookup: {}}}\n")
    changes = serve_overrides(load_config(file))
    loaded = load_config(file, as_overrides(changes))
    assert loaded.tracking.uri == "http://clickline-tracking:5000"
    assert not serve_overrides(loaded).keys() - {"serve.lookup"}


def test_change_of_deploy_alone_restarts_no_predictor() -> None:
    def template(*overrides: str) -> dict[str, Any]:
        found: dict[str, Any] = the("Deployment", objects(plan(*overrides)))["spec"]["template"]
        return found

    assert template() == template("deploy.serving.max_replicas=9", "deploy.resources.pipeline.cpu=1")
    assert template() != template("serve.queue_size=99")


# ── who may talk to whom ───────────────────────────────────────────────────────────────────────


def _allowed(policies: list[dict[str, Any]], sender: str | None, role: str, port: int) -> bool:
    """Whether any policy of the pod allows it, as Kubernetes decides. Sender None is a foreign pod."""

    def labels(of: str) -> dict[str, str]:
        return {
            "app.kubernetes.io/name": "clickline",
            "app.kubernetes.io/instance": "ads",
            "app.kubernetes.io/component": of,
        }

    mine = [p["spec"] for p in policies if labelled(p["spec"]["podSelector"], labels(role))]
    assert mine, "a pod without a policy takes everything"
    for rule in (rule for spec in mine for rule in spec["ingress"]):
        ports = [one["port"] for one in rule.get("ports", ())]
        if ports and port not in ports:
            continue
        if "from" not in rule:
            return True
        for peer in rule["from"]:
            if "namespaceSelector" in peer:
                return True
            if sender is not None and labelled(peer["podSelector"], labels(sender)):
                return True
    return False


def test_network_policies_allow_only_needed_connections() -> None:
    made = objects(plan("train.mode=cluster", "deploy.serving.lookup={}", "deploy.tracking.enabled=true"))
    policies = [one for one in made if one["kind"] == "NetworkPolicy"]
    allowed = [
        (None, "predictor", 8501),
        (None, "predictor", 8500),
        (None, "predictor", 8502),
        (None, "lookup", 8502),
        ("predictor", "lookup", 8600),
        ("pipeline", "ray-head", 6379),
        ("ray-worker", "ray-worker", 45678),
        ("ray-head", "pipeline", 45678),
        ("pipeline", "tracking", 5000),
    ]
    forbidden = [
        (None, "predictor", 8600),
        (None, "lookup", 8600),
        ("pipeline", "lookup", 8600),
        (None, "ray-head", 6379),
        (None, "ray-head", 8265),
        ("predictor", "ray-worker", 45678),
        (None, "tracking", 5000),
        (None, "pipeline", 80),
        (None, "data", 80),
    ]
    assert [way for way in allowed if not _allowed(policies, *way)] == []
    assert [way for way in forbidden if _allowed(policies, *way)] == []


def test_network_policies_let_operators_through() -> None:
    kuberay = [o for o in objects(plan(*EVERY_WAY["kuberay"])) if o["kind"] == "NetworkPolicy"]
    assert _allowed(kuberay, None, "ray-head", 8265)
    assert not _allowed(kuberay, None, "ray-head", 6379)
    for way, port in (("knative", 8012), ("knative grpc", 8013)):
        knative = [o for o in objects(plan(*EVERY_WAY[way])) if o["kind"] == "NetworkPolicy"]
        assert _allowed(knative, None, "predictor", port)
        assert _allowed(knative, None, "predictor", 9090)


def test_service_account_has_no_permissions_without_argo() -> None:
    made = objects(plan())
    assert the("ServiceAccount", made)["automountServiceAccountToken"] is False
    assert not [one for one in made if one["kind"] in ("Role", "RoleBinding")]
    for template in templates(made).values():
        assert template["spec"]["serviceAccountName"] == "ads-access"
        assert template["spec"]["automountServiceAccountToken"] is False
    made = objects(plan(*EVERY_WAY["argo"]))
    role, binding = the("Role", made), the("RoleBinding", made)
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert [one["name"] for one in binding["subjects"]] == [the("ServiceAccount", made)["metadata"]["name"]]
    assert all("*" not in (*rule["verbs"], *rule["resources"]) for rule in role["rules"])


def test_namespace_and_policies_can_be_left_out() -> None:
    kinds = {one["kind"] for one in objects(plan(*EVERY_WAY["a namespace of yours"]))}
    assert not kinds & {"Namespace", "NetworkPolicy"}


# ── tracking ───────────────────────────────────────────────────────────────────────────────────


def test_mlflow_stores_everything_in_the_models_volume() -> None:
    one = plan(*EVERY_WAY["tracking of another image"])
    spec = the("Deployment", objects(one), "ads-tracking")["spec"]
    assert (spec["replicas"], spec["strategy"]["type"]) == (1, "Recreate")
    (container,) = spec["template"]["spec"]["containers"]
    assert container["image"] == "mlflow:3.1.0"
    assert "--backend-store-uri=sqlite:////clickline/.clickline/mlflow.db" in container["command"]
    assert one.config.tracking.uri == "http://ads-tracking:5500"
    (first,) = spec["template"]["spec"]["initContainers"]
    assert first["image"] == one.deploy.image


def test_yaml_round_trip() -> None:
    made = objects(plan(*EVERY_WAY["lookup"]))
    assert list(yaml.safe_load_all(to_yaml(made))) == made
