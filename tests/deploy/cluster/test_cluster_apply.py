"""deploy apply: what is looked at first, what is done, and what is said when it cannot be."""

from __future__ import annotations

from typing import Any

import pytest
from ads_objects import deployment, item, job, labels, ours, template
from api_server import ApiServer, Fault

from clickline.deploy.apply import ApplyResult, apply
from clickline.deploy.kube_client import Kube
from clickline.errors import ClusterError
from clickline.progress import Progress


def run(kube: Kube, objects: list[dict[str, Any]], *, prune: bool = False) -> ApplyResult:
    return apply(kube, objects, name="ads", namespace="shop", prune=prune, progress=Progress())


def swapped(new: dict[str, Any]) -> list[dict[str, Any]]:
    """The deployment with one object in place of that of the same kind and name."""
    same = (new["kind"], new["metadata"]["name"])
    return [new if (one["kind"], one["metadata"]["name"]) == same else one for one in ours()]


def refused(kube: Kube, api: ApiServer, objects: list[dict[str, Any]]) -> str:
    """The words of an apply that must not have changed anything."""
    before = list(api.writes)
    with pytest.raises(ClusterError) as error:
        run(kube, objects)
    assert [write for write in api.writes[len(before) :] if write[1] != "Namespace"] == []
    return str(error.value)


# ── what it does ───────────────────────────────────────────────────────────────────────────────


def test_objects_are_made_in_an_order_in_which_each_finds_what_it_needs(bare: ApiServer, kube: Kube) -> None:
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


def test_the_same_again_changes_nothing_though_the_server_has_added_defaults(
    bare: ApiServer, kube: Kube
) -> None:
    run(kube, ours())
    bare.writes.clear()
    done = run(kube, ours())
    assert (len(done.unchanged), done.created, done.changed, bare.writes) == (7, [], [], [])


def test_only_what_differs_is_changed(bare: ApiServer, kube: Kube) -> None:
    run(kube, ours())
    bare.writes.clear()
    done = run(kube, swapped(deployment("clickline:0.2.0")))
    assert done.changed == ["Deployment ads-predictor"]
    assert bare.writes == [("apply", "Deployment", "ads-predictor")]


def test_all_is_tried_on_the_server_before_anything_is_made(bare: ApiServer, kube: Kube) -> None:
    bare.namespace("shop", labels("access"))
    run(kube, ours())
    real = [n for n, line in enumerate(bare.requests) if line.startswith("PATCH") and "dryRun" not in line]
    tried = [n for n, line in enumerate(bare.requests) if "dryRun=All" in line]
    assert len(tried) == 7 and max(tried) < min(real)


def test_what_the_dry_run_finds_is_told_whole_and_a_namespace_made_for_it_goes_again(
    bare: ApiServer, kube: Kube
) -> None:
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


def test_a_partly_failed_apply_tells_what_was_done_and_what_not(bare: ApiServer, kube: Kube) -> None:
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


def test_a_connection_cut_half_way_is_a_partly_failed_apply(bare: ApiServer, kube: Kube) -> None:
    bare.faults.append(Fault("patch", "deployments", dry_run=False, cut=True))
    done = run(kube, ours())
    assert "closed the connection" in done.failed["Deployment ads-predictor"]
    assert done.untried == ["Job ads-pipeline"]


def test_the_servers_warnings_are_passed_on(bare: ApiServer, kube: Kube) -> None:
    bare.warnings["deployments"] = "would violate PodSecurity"
    assert run(kube, ours()).notes == ["would violate PodSecurity"]


def test_a_warning_about_what_stays_as_it_is_is_not_repeated(bare: ApiServer, kube: Kube) -> None:
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
def test_a_missing_operator_is_named_with_what_to_choose_instead(
    bare: ApiServer, kube: Kube, api: str, kind: str, operator: str, instead: str
) -> None:
    words = refused(kube, bare, [*ours(), item(api, kind, "ads-x", "pipeline", spec={})])
    assert f"{kind} ads-x needs {api}, and the cluster of context test does not have it" in words
    assert f"Install {operator}" in words and f"or set {instead}." in words


def test_an_operator_that_is_too_old_is_told_apart(bare: ApiServer, kube: Kube) -> None:
    bare.kinds["ray.io/v1alpha1"] = {"RayJob": ("rayjobs", True)}
    words = refused(kube, bare, [*ours(), item("ray.io/v1", "RayJob", "ads-x", "pipeline", spec={})])
    assert "has ray.io in v1alpha1 only. Update KubeRay" in words


def test_what_is_named_and_missing_is_told_all_at_once(bare: ApiServer, kube: Kube) -> None:
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
    assert "ads-models" not in words  # it is made with the rest
    assert words.endswith("Nothing was changed.")  # a class of priorities lies in no namespace
    assert bare.writes == []


def test_the_namespace_is_made_for_secrets_that_must_be_put_into_it(bare: ApiServer, kube: Kube) -> None:
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


def test_with_patience_an_apply_waits_for_a_secret(bare: ApiServer, kube: Kube) -> None:
    class ProgressSender(Progress):
        def log(self, message: str) -> None:
            assert "needs Secret registry" in message
            bare.put(
                {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "registry", "namespace": "shop"}}
            )

    objects = swapped(deployment(imagePullSecrets=[{"name": "registry"}]))
    done = apply(
        kube, objects, name="ads", namespace="shop", prune=False, progress=ProgressSender(), wait_seconds=30.0
    )
    assert done.created[0] == "Namespace shop" and len(done.created) == 7 and not done.failed


def test_patience_has_an_end(bare: ApiServer, kube: Kube) -> None:
    objects = swapped(deployment(imagePullSecrets=[{"name": "registry"}]))
    with pytest.raises(ClusterError, match="needs Secret registry"):
        apply(kube, objects, name="ads", namespace="shop", prune=False, progress=Progress(), wait_seconds=0.1)
    assert bare.names("Deployment") == []


def test_a_secret_that_is_there_satisfies(bare: ApiServer, kube: Kube) -> None:
    bare.namespace("shop", labels("access"))
    bare.put({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "registry", "namespace": "shop"}})
    assert not run(kube, swapped(deployment(imagePullSecrets=[{"name": "registry"}]))).failed


def test_secrets_that_may_not_be_read_are_a_note_and_no_obstacle(bare: ApiServer, kube: Kube) -> None:
    bare.faults.append(Fault("get", "secrets"))
    done = run(kube, swapped(deployment(imagePullSecrets=[{"name": "registry"}])))
    assert not done.failed
    assert done.notes == ["could not check that Secret registry exists: this user may not read it (403)"]


def test_an_unknown_storage_class_is_told_with_those_that_there_are(bare: ApiServer, kube: Kube) -> None:
    claim = item("v1", "PersistentVolumeClaim", "ads-models", "storage", spec={"storageClassName": "fast"})
    words = refused(kube, bare, swapped(claim))
    assert "needs storage class fast, and the cluster has none of that name. Allowed: standard." in words


def test_a_claim_without_a_class_needs_a_default_one(bare: ApiServer, kube: Kube) -> None:
    bare.put({"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": {"name": "standard"}})
    assert "the cluster has no default one. Allowed: standard." in refused(kube, bare, ours())


def test_a_queue_of_volcano_must_exist(cluster: ApiServer, kube: Kube) -> None:
    training = item("batch.volcano.sh/v1alpha1", "Job", "ads-training", "pipeline", spec={"queue": "gpu"})
    assert "needs Queue gpu, and the cluster has none" in refused(kube, cluster, [*ours(), training])


def test_a_namespace_of_others_is_left_alone(bare: ApiServer, kube: Kube) -> None:
    bare.namespace("shop")
    words = refused(kube, bare, ours())
    assert "namespace shop exists and was not created by this deployment" in words
    assert "set deploy.create_namespace: false" in words
    assert bare.one("Namespace", "shop")["metadata"]["labels"] == {}  # type: ignore[index]


def test_who_may_not_make_namespaces_hears_of_the_key(bare: ApiServer, kube: Kube) -> None:
    bare.faults.append(Fault("get", "namespaces"))
    words = refused(kube, bare, ours())
    assert "get namespaces (403)" in words and "deploy.create_namespace: false" in words
    bare.faults[:] = [Fault("patch", "namespaces")]
    words = refused(kube, bare, ours())
    assert "patch namespaces (403)" in words and "deploy.create_namespace: false" in words


def test_a_namespace_that_is_not_ours_to_make_must_be_there(bare: ApiServer, kube: Kube) -> None:
    inside = [one for one in ours() if one["kind"] != "Namespace"]
    assert "namespace shop does not exist, and deploy.create_namespace is false" in refused(
        kube, bare, inside
    )
    bare.namespace("shop")
    assert not run(kube, inside).failed


def test_an_object_of_the_same_name_that_is_not_ours_is_left_alone(bare: ApiServer, kube: Kube) -> None:
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


def test_a_changed_job_that_is_over_is_made_anew(bare: ApiServer, kube: Kube) -> None:
    run(kube, ours())
    ended(bare, "Job", {"conditions": [{"type": "Complete", "status": "True"}]})
    bare.linger["ads-pipeline"] = 2
    bare.writes.clear()
    done = run(kube, swapped(job("clickline:0.2.0")))
    assert done.replaced == ["Job ads-pipeline"]
    assert bare.writes == [("delete", "Job", "ads-pipeline"), ("apply", "Job", "ads-pipeline")]
    assert "status" not in (bare.one("Job", "ads-pipeline") or {"status": 1})


def test_a_job_that_failed_begins_again_and_one_that_is_done_does_not(bare: ApiServer, kube: Kube) -> None:
    run(kube, ours())
    ended(bare, "Job", {"conditions": [{"type": "Complete", "status": "True"}]})
    assert run(kube, ours()).replaced == []
    ended(bare, "Job", {"conditions": [{"type": "Failed", "status": "True", "reason": "PodFailurePolicy"}]})
    assert run(kube, ours()).replaced == ["Job ads-pipeline"]


def test_a_changed_job_that_runs_is_not_touched(bare: ApiServer, kube: Kube) -> None:
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
def test_what_operators_run_to_an_end_is_treated_as_a_job(
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


def test_a_changed_claim_is_told_with_the_remedy(bare: ApiServer, kube: Kube) -> None:
    run(kube, ours())
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    claim = item("v1", "PersistentVolumeClaim", "ads-models", "storage", spec=spec)
    words = refused(kube, bare, swapped(claim))
    assert "PersistentVolumeClaim ads-models: it exists and cannot be changed in place" in words
    assert "Restore the previous deploy.storage" in words and "delete --with-data" in words


def test_a_changed_stateful_set_is_told_with_the_remedy(bare: ApiServer, kube: Kube) -> None:
    def lookup(service: str) -> list[dict[str, Any]]:
        return [
            *ours(),
            item("apps/v1", "StatefulSet", "ads-lookup", "lookup", spec={"serviceName": service}),
        ]

    run(kube, lookup("a"))
    words = refused(kube, bare, lookup("b"))
    assert "kubectl -n shop delete statefulset ads-lookup" in words and "its claims stay" in words


# ── what is left over ──────────────────────────────────────────────────────────────────────────


def test_what_is_no_longer_part_of_it_is_named_and_goes_only_when_asked(bare: ApiServer, kube: Kube) -> None:
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
