"""deploy apply: checks before a change, the changes, and the messages if something prevents them."""

from __future__ import annotations

from typing import Any

import pytest
from ads_objects import ADS, deployment, item, job, labels, ours, template
from api_server import ApiServer, Fault

from clickline.deploy.apply import ApplyResult, apply
from clickline.deploy.kube_client import Kube
from clickline.errors import ClusterError
from clickline.progress import Progress


def run(kube: Kube, objects: list[dict[str, Any]], *, prune: bool = False) -> ApplyResult:
    return apply(kube, ADS, objects, prune=prune, progress=Progress())


def swapped(new: dict[str, Any]) -> list[dict[str, Any]]:
    """The deployment with one object replaced."""
    same = (new["kind"], new["metadata"]["name"])
    return [new if (one["kind"], one["metadata"]["name"]) == same else one for one in ours()]


def refused(kube: Kube, api: ApiServer, objects: list[dict[str, Any]]) -> str:
    """The error of an apply that must not change anything."""
    before = list(api.writes)
    with pytest.raises(ClusterError) as error:
        run(kube, objects)
    assert [write for write in api.writes[len(before) :] if write[1] != "Namespace"] == []
    return str(error.value)


# ── what it does ───────────────────────────────────────────────────────────────────────────────


def test_objects_are_created_after_what_they_need(bare: ApiServer, kube: Kube) -> None:
    done = run(kube, ours())
    kinds = [kind for verb, kind, _ in bare.writes]
    expected = [
        "Namespace",
        "ServiceAccount",
        "ConfigMap",
        "PersistentVolumeClaim",
        "Service",
        "Deployment",
        "Job",
    ]
    assert kinds == expected
    assert [one.split()[0] for one in done.created] == expected
    assert not done.failed and not done.left_over


def test_second_apply_changes_nothing_despite_server_defaults(bare: ApiServer, kube: Kube) -> None:
    run(kube, ours())
    bare.writes.clear()
    done = run(kube, ours())
    assert (len(done.unchanged), done.created, done.changed, bare.writes) == (7, [], [], [])


def test_only_differing_objects_are_changed(bare: ApiServer, kube: Kube) -> None:
    run(kube, ours())
    bare.writes.clear()
    done = run(kube, swapped(deployment("clickline:0.2.0")))
    assert done.changed == ["Deployment ads-predictor"]
    assert bare.writes == [("apply", "Deployment", "ads-predictor")]


def test_dry_run_of_all_objects_comes_before_any_change(bare: ApiServer, kube: Kube) -> None:
    bare.namespace("shop", labels("access"))
    run(kube, ours())
    real = [n for n, line in enumerate(bare.requests) if line.startswith("PATCH") and "dryRun" not in line]
    tried = [n for n, line in enumerate(bare.requests) if "dryRun=All" in line]
    assert len(tried) == 7 and max(tried) < min(real)


def test_all_dry_run_errors_are_reported_and_the_new_namespace_deleted(bare: ApiServer, kube: Kube) -> None:
    cause = (("spec.template.spec.containers[0].image", "Required value"),)
    bare.faults += [
        Fault(
            "patch", "deployments", 422, 'Deployment "ads-predictor" is invalid', dry_run=True, causes=cause
        ),
        Fault("patch", "jobs", 403, 'jobs "x" is forbidden: exceeded quota: small', dry_run=True),
    ]
    words = refused(kube, bare, ours())
    assert "Deployment ads-predictor: the server rejects it as invalid" in words
    assert "containers[0].image: Required value" in words
    assert "Job ads-pipeline: it exceeds the namespace's quota. Lower deploy.resources" in words
    assert words.endswith("Nothing was changed.")
    assert bare.one("Namespace", "shop") is None


def test_partial_apply_reports_what_was_done_and_what_not(bare: ApiServer, kube: Kube) -> None:
    run(kube, [one for one in ours() if one["kind"] in ("Namespace", "ConfigMap")])
    bare.faults.append(Fault("patch", "services", 500, "etcd is full", dry_run=False))
    done = run(kube, ours())
    assert done.created == ["ServiceAccount ads-access", "PersistentVolumeClaim ads-models"]
    assert done.unchanged == ["Namespace shop", "ConfigMap ads-config"]
    assert (
        list(done.failed) == ["Service ads-predictor"]
        and "etcd is full" in done.failed["Service ads-predictor"]
    )
    assert done.untried == ["Deployment ads-predictor", "Job ads-pipeline"]
    bare.faults.clear()
    assert not run(kube, ours()).failed  # and the next one does the rest
    assert bare.names("Deployment") == ["ads-predictor"]


def test_closed_connection_during_apply_is_a_partial_apply(bare: ApiServer, kube: Kube) -> None:
    bare.faults.append(Fault("patch", "deployments", dry_run=False, cut=True))
    done = run(kube, ours())
    assert "closed the connection" in done.failed["Deployment ads-predictor"]
    assert done.untried == ["Job ads-pipeline"]


def test_server_warnings_become_notes(bare: ApiServer, kube: Kube) -> None:
    bare.warnings["deployments"] = "would violate PodSecurity"
    assert run(kube, ours()).notes == ["would violate PodSecurity"]


def test_warnings_about_unchanged_objects_are_not_repeated(bare: ApiServer, kube: Kube) -> None:
    run(kube, ours())
    bare.warnings["deployments"] = "would violate PodSecurity"
    assert run(kube, ours()).notes == []


# ── what must be there ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("api", "kind", "operator", "instead"),
    [
        ("batch.volcano.sh/v1alpha1", "Job", "Volcano", "deploy.training.kind: plain"),
        ("ray.io/v1", "RayJob", "KubeRay", "deploy.training.kind: plain"),
        ("argoproj.io/v1alpha1", "Workflow", "Argo Workflows", "deploy.workflow.kind: job"),
        ("serving.knative.dev/v1", "Service", "Knative Serving", "deploy.serving.kind: deployment"),
    ],
)
def test_missing_operator_is_reported_with_an_alternative(
    bare: ApiServer, kube: Kube, api: str, kind: str, operator: str, instead: str
) -> None:
    words = refused(kube, bare, [*ours(), item(api, kind, "ads-x", "pipeline", spec={})])
    assert f"{kind} ads-x needs {api}, and the cluster of context test does not have it" in words
    assert f"Install {operator}" in words and f"or set {instead}." in words


def test_outdated_operator_is_reported(bare: ApiServer, kube: Kube) -> None:
    bare.kinds["ray.io/v1alpha1"] = {"RayJob": ("rayjobs", True)}
    words = refused(kube, bare, [*ours(), item("ray.io/v1", "RayJob", "ads-x", "pipeline", spec={})])
    assert "has ray.io in v1alpha1 only. Update KubeRay" in words


def test_all_missing_references_are_reported_at_once(bare: ApiServer, kube: Kube) -> None:
    spec = {
        "imagePullSecrets": [{"name": "registry"}],
        "priorityClassName": "high",
        "volumes": [
            {"name": "t", "secret": {"secretName": "tls"}},
            {"name": "d", "persistentVolumeClaim": {"claimName": "mine"}},
            {"name": "m", "persistentVolumeClaim": {"claimName": "ads-models"}},
        ],
    }
    words = refused(kube, bare, swapped(deployment(**spec)))
    for missing in ("Secret registry", "Secret tls", "PersistentVolumeClaim mine", "PriorityClass high"):
        assert f"Deployment ads-predictor needs {missing}, and the cluster has none." in words
    assert "ads-models" not in words  # created with the rest
    assert words.endswith("Nothing was changed.")  # a PriorityClass has no namespace
    assert bare.writes == []


def test_namespace_is_created_for_missing_secrets(bare: ApiServer, kube: Kube) -> None:
    mounts = [{"name": "secret-tls", "mountPath": "/clickline/tls/crt", "subPath": "tls.crt"}]
    container = {"name": "predictor", "envFrom": [{"secretRef": {"name": "s3"}}], "volumeMounts": mounts}
    volumes = [{"name": "secret-tls", "secret": {"secretName": "tls"}}]
    pull = [{"name": "registry"}]
    objects = swapped(deployment(containers=[container], volumes=volumes, imagePullSecrets=pull))
    words = refused(kube, bare, objects)
    for command in (
        "kubectl -n shop create secret generic tls --from-file=tls.crt=tls/crt",
        "kubectl -n shop create secret generic s3 --from-env-file=FILE",
        "kubectl -n shop create secret docker-registry registry --docker-server=REGISTRY",
    ):
        assert command in words
    assert words.endswith(
        "Namespace shop was created; nothing else was changed. Create them and apply again; "
        "`clickline deploy apply --wait` waits for them."
    )
    assert bare.writes == [("apply", "Namespace", "shop")]
    for name in ("tls", "s3", "registry"):
        bare.put({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name, "namespace": "shop"}})
    assert not run(kube, objects).failed


def test_apply_with_wait_waits_for_a_secret(bare: ApiServer, kube: Kube) -> None:
    class SecretCreator(Progress):
        def log(self, message: str) -> None:
            assert "needs Secret registry" in message
            bare.put(
                {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "registry", "namespace": "shop"}}
            )

    objects = swapped(deployment(imagePullSecrets=[{"name": "registry"}]))
    done = apply(kube, ADS, objects, prune=False, progress=SecretCreator(), wait_seconds=30.0)
    assert done.created[0] == "Namespace shop" and len(done.created) == 7 and not done.failed


def test_wait_for_a_secret_times_out(bare: ApiServer, kube: Kube) -> None:
    objects = swapped(deployment(imagePullSecrets=[{"name": "registry"}]))
    with pytest.raises(ClusterError, match="needs Secret registry"):
        apply(kube, ADS, objects, prune=False, progress=Progress(), wait_seconds=0.1)
    assert bare.names("Deployment") == []


def test_existing_secret_is_accepted(bare: ApiServer, kube: Kube) -> None:
    bare.namespace("shop", labels("access"))
    bare.put({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "registry", "namespace": "shop"}})
    assert not run(kube, swapped(deployment(imagePullSecrets=[{"name": "registry"}]))).failed


def test_forbidden_secrets_are_a_note_and_not_an_error(bare: ApiServer, kube: Kube) -> None:
    bare.faults.append(Fault("get", "secrets"))
    done = run(kube, swapped(deployment(imagePullSecrets=[{"name": "registry"}])))
    assert not done.failed
    assert done.notes == ["could not check that Secret registry exists: this user may not read it (403)"]


def test_unknown_storage_class_is_reported_with_the_existing_ones(bare: ApiServer, kube: Kube) -> None:
    claim = item("v1", "PersistentVolumeClaim", "ads-models", "storage", spec={"storageClassName": "fast"})
    words = refused(kube, bare, swapped(claim))
    assert "needs storage class fast, and the cluster has none of that name. Allowed: standard." in words


def test_claim_without_a_class_needs_a_default_class(bare: ApiServer, kube: Kube) -> None:
    bare.put({"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": {"name": "standard"}})
    assert "the cluster has no default one. Allowed: standard." in refused(kube, bare, ours())


def test_missing_volcano_queue_is_reported(cluster: ApiServer, kube: Kube) -> None:
    training = item("batch.volcano.sh/v1alpha1", "Job", "ads-training", "pipeline", spec={"queue": "gpu"})
    assert "needs Queue gpu, and the cluster has none" in refused(kube, cluster, [*ours(), training])


def test_foreign_namespace_is_a_conflict(bare: ApiServer, kube: Kube) -> None:
    bare.namespace("shop")
    words = refused(kube, bare, ours())
    assert "namespace shop exists and was not created by this deployment" in words
    assert "set deploy.create_namespace: false" in words
    assert bare.one("Namespace", "shop")["metadata"]["labels"] == {}  # type: ignore[index]


def test_forbidden_namespace_creation_names_create_namespace(bare: ApiServer, kube: Kube) -> None:
    bare.faults.append(Fault("get", "namespaces"))
    words = refused(kube, bare, ours())
    assert "get namespaces (403)" in words and "deploy.create_namespace: false" in words
    bare.faults[:] = [Fault("patch", "namespaces")]
    words = refused(kube, bare, ours())
    assert "patch namespaces (403)" in words and "deploy.create_namespace: false" in words


def test_namespace_must_exist_without_create_namespace(bare: ApiServer, kube: Kube) -> None:
    inside = [one for one in ours() if one["kind"] != "Namespace"]
    assert "namespace shop does not exist, and deploy.create_namespace is false" in refused(
        kube, bare, inside
    )
    bare.namespace("shop")
    assert not run(kube, inside).failed


def test_foreign_object_of_the_same_name_is_a_conflict(bare: ApiServer, kube: Kube) -> None:
    bare.namespace("shop", labels("access"))
    other = deployment("theirs:1")
    other["metadata"]["labels"] = labels("predictor", "ads2")
    bare.put(other)
    words = refused(kube, bare, ours())
    assert (
        "Deployment ads-predictor exists and was not created by this deployment (it belongs to the deployment ads2)"
        in words
    )


# ── what cannot be changed ─────────────────────────────────────────────────────────────────────


def ended(api: ApiServer, kind: str, status: dict[str, Any]) -> None:
    live = next(one for key, one in api.objects.items() if key[1] == kind and key[3].startswith("ads-"))
    live["status"] = status


def test_changed_finished_job_is_replaced(bare: ApiServer, kube: Kube) -> None:
    run(kube, ours())
    ended(bare, "Job", {"conditions": [{"type": "Complete", "status": "True"}]})
    bare.linger["ads-pipeline"] = 2
    bare.writes.clear()
    done = run(kube, swapped(job("clickline:0.2.0")))
    assert done.replaced == ["Job ads-pipeline"]
    assert bare.writes == [("delete", "Job", "ads-pipeline"), ("apply", "Job", "ads-pipeline")]
    assert "status" not in (bare.one("Job", "ads-pipeline") or {"status": 1})


def test_failed_job_is_restarted_and_finished_one_is_not(bare: ApiServer, kube: Kube) -> None:
    run(kube, ours())
    ended(bare, "Job", {"conditions": [{"type": "Complete", "status": "True"}]})
    assert run(kube, ours()).replaced == []
    ended(bare, "Job", {"conditions": [{"type": "Failed", "status": "True", "reason": "PodFailurePolicy"}]})
    assert run(kube, ours()).replaced == ["Job ads-pipeline"]


def test_changed_running_job_is_a_conflict(bare: ApiServer, kube: Kube) -> None:
    run(kube, ours())
    ended(bare, "Job", {"active": 1})
    words = refused(kube, bare, swapped(job("clickline:0.2.0")))
    assert "Job ads-pipeline is running and cannot be changed while it runs" in words
    assert "kubectl -n shop delete job.batch ads-pipeline" in words


@pytest.mark.parametrize(
    ("api", "kind", "running", "over"),
    [
        ("ray.io/v1", "RayJob", {"jobDeploymentStatus": "Running"}, {"jobDeploymentStatus": "Complete"}),
        ("argoproj.io/v1alpha1", "Workflow", {"phase": "Running"}, {"phase": "Failed"}),
        (
            "batch.volcano.sh/v1alpha1",
            "Job",
            {"state": {"phase": "Running"}},
            {"state": {"phase": "Completed"}},
        ),
    ],
)
def test_operator_jobs_are_treated_like_jobs(
    cluster: ApiServer, kube: Kube, api: str, kind: str, running: Any, over: Any
) -> None:
    def training(replicas: int) -> list[dict[str, Any]]:
        spec = {"tasks": [{"name": "w", "replicas": replicas, "template": template("ray-worker")}]}
        others = [one for one in ours() if one["kind"] != "Job"]
        return [*others, item(api, kind, "ads-training", "pipeline", spec=spec)]

    run(kube, training(1))
    ended(cluster, kind, running)
    assert f"{kind} ads-training is running" in refused(kube, cluster, training(2))
    ended(cluster, kind, over)
    assert run(kube, training(2)).replaced == [f"{kind} ads-training"]


def test_immutable_claim_is_reported_with_a_remedy(bare: ApiServer, kube: Kube) -> None:
    run(kube, ours())
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    claim = item("v1", "PersistentVolumeClaim", "ads-models", "storage", spec=spec)
    words = refused(kube, bare, swapped(claim))
    assert "PersistentVolumeClaim ads-models: it exists and cannot be changed in place" in words
    assert "Restore the previous deploy.storage" in words and "delete --with-data" in words


def test_immutable_stateful_set_is_reported_with_a_remedy(bare: ApiServer, kube: Kube) -> None:
    def lookup(service: str) -> list[dict[str, Any]]:
        return [
            *ours(),
            item("apps/v1", "StatefulSet", "ads-lookup", "lookup", spec={"serviceName": service}),
        ]

    run(kube, lookup("a"))
    words = refused(kube, bare, lookup("b"))
    assert "kubectl -n shop delete statefulset ads-lookup" in words and "its claims stay" in words


# ── what is left over ──────────────────────────────────────────────────────────────────────────


def test_leftovers_are_reported_and_deleted_only_by_prune(bare: ApiServer, kube: Kube) -> None:
    budget = item("policy/v1", "PodDisruptionBudget", "ads-predictor", "predictor", spec={})
    claim = item("v1", "PersistentVolumeClaim", "ads-data", "storage", spec={})
    run(kube, [*ours(), budget, claim])
    owned = item("batch/v1", "Job", "ads-cron-1", "pipeline", spec={})
    owned["metadata"]["ownerReferences"] = [{"uid": "cron", "kind": "CronJob", "name": "ads-cron"}]
    bare.put(owned)
    theirs = item("v1", "ConfigMap", "theirs", "config")
    theirs["metadata"]["labels"] = labels("config", "ads2")
    bare.put(theirs)
    left = ["PersistentVolumeClaim ads-data", "PodDisruptionBudget ads-predictor"]
    assert run(kube, ours()).left_over == left
    assert bare.names("PodDisruptionBudget") == ["ads-predictor"]
    done = run(kube, ours(), prune=True)
    assert done.pruned == ["PodDisruptionBudget ads-predictor"]
    assert done.left_over == ["PersistentVolumeClaim ads-data"]  # data is never pruned
    assert bare.names("PodDisruptionBudget") == [] and "theirs" in bare.names("ConfigMap")
    assert "ads-cron-1" in bare.names("Job")
