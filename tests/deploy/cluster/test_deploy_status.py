"""deploy status: what it fetches from the cluster, and how it explains it."""

from __future__ import annotations

from typing import Any

import pytest
from ads_objects import ADS, container, deployment, event, item, job, pod, template
from api_server import ApiServer, Fault

from clickline.deploy.deploy_status import explain_exit, fetch_status, summarize, workload_state
from clickline.deploy.kube_client import Kube

RUNNING = {"running": {"startedAt": "2026-11-16T10:00:00Z"}}


def summary(*objects: dict[str, Any], events: Any = (), served: Any = None) -> dict[str, Any]:
    return summarize(
        {
            "name": "ads",
            "namespace": "shop",
            "objects": list(objects),
            "events": list(events),
            "served": served or {},
            "notes": [],
        }
    )


def predictors(ready: int) -> dict[str, Any]:
    return {**deployment(), "status": {"readyReplicas": ready}}


def the_role(document: dict[str, Any], role: str) -> dict[str, Any]:
    return next(one for one in document["roles"] if one["role"] == role)


def result(pod_object: dict[str, Any], *more: dict[str, Any], events: Any = ()) -> tuple[str, str]:
    """State and reason of a role with only this pod."""
    found = summary(predictors(0), pod_object, *more, events=events)
    role = the_role(found, "predictor")
    return role["state"], role["why"]


# ── pods ───────────────────────────────────────────────────────────────────────────────────────


def test_running_roles_show_pods_restarts_and_versions() -> None:
    found = summary(
        predictors(2),
        pod("p-1", "predictor", "Running", container("predictor", restarts=3, **RUNNING), ready=True),
        pod("p-2", "predictor", "Running", container("predictor", **RUNNING), ready=True),
        served={"p-1": {"version": 7}, "p-2": {"version": 8}},
    )
    role = the_role(found, "predictor")
    assert (role["ready"], role["desired"], role["restarts"], role["state"]) == (2, 2, 3, "running")
    assert role["versions"] == found["versions"] == [7, 8]
    assert found["state"] == "running"


def test_missing_deployment_is_absent() -> None:
    assert summary()["state"] == "absent"


def test_unscheduled_pod_shows_the_schedulers_message() -> None:
    words = "0/1 nodes are available: 1 Insufficient cpu."
    unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": words}
    assert result(pod("p", "predictor", "Pending", conditions=[unscheduled])) == (
        "waiting",
        f"Pending: {words}",
    )


@pytest.mark.parametrize("reason", ["ImagePullBackOff", "ErrImagePull"])
def test_image_pull_error_names_the_config_keys(reason: str) -> None:
    waiting = {"reason": reason, "message": "not found"}
    state, why = result(pod("p", "predictor", "Pending", container("predictor", waiting=waiting)))
    assert state == "failed"
    assert why.startswith(f"{reason} in predictor") and "deploy.image" in why and "(not found)" in why


@pytest.mark.parametrize(
    ("code", "words"),
    [(2, "bad config"), (3, "the model failed the gate"), (4, "bad data"), (1, "see its log")],
)
def test_crash_loop_explains_the_last_exit_code(code: int, words: str) -> None:
    crashed = container(
        "predictor",
        restarts=5,
        last={"exitCode": code, "reason": "Error"},
        waiting={"reason": "CrashLoopBackOff"},
    )
    state, why = result(pod("p", "predictor", "Running", crashed))
    assert state == "failed"
    assert why.startswith(f"CrashLoopBackOff in predictor, last exit code {code}") and words in why


def test_failed_init_container_is_named() -> None:
    crashed = container("ready", restarts=2, last={"exitCode": 1}, waiting={"reason": "CrashLoopBackOff"})
    initial = container("predictor", waiting={"reason": "PodInitializing"})
    made = pod("p", "predictor", "Pending", initial, initContainerStatuses=[crashed])
    assert result(made)[1].startswith("CrashLoopBackOff in ready, last exit code 1")


def test_out_of_memory_names_the_config_key() -> None:
    assert explain_exit(137, "OOMKilled", "ray-worker", "ray-worker").endswith(
        "raise deploy.resources.ray_worker.memory_limit"
    )
    assert "deploy.resources.pipeline." in explain_exit(137, "OOMKilled", "trainer", "trainer")


def test_exit_codes_of_ray_are_not_explained_as_clicklines() -> None:
    assert explain_exit(2, "Error", "ray-head", "ray-head") == "exit code 2"
    assert explain_exit(2, "Error", "ray-head", "ready") == "exit code 2: bad config"


def test_pod_waiting_for_a_volume_shows_the_last_event() -> None:
    creating = container("predictor", waiting={"reason": "ContainerCreating"})
    events = [
        event("p", "FailedMount", "newer", at="2026-11-16T10:05:00Z"),
        event("p", "FailedScheduling", "older", at="2026-11-16T10:01:00Z"),
    ]
    assert result(pod("p", "predictor", "Pending", creating), events=events) == (
        "waiting",
        "FailedMount: newer",
    )


def test_predictor_without_a_version_shows_why() -> None:
    made = pod("p", "predictor", "Running", container("predictor", **RUNNING))
    found = summary(predictors(0), made, served={"p": {"words": "no version yet"}})
    assert the_role(found, "predictor")["why"] == "not ready; no version yet"


def test_evicted_and_replaced_pods_are_not_a_failure() -> None:
    gone = pod("old", "predictor", "Failed", reason="Evicted")
    new = [
        pod(f"p-{n}", "predictor", "Running", container("predictor", **RUNNING), ready=True) for n in (1, 2)
    ]
    found = summary(predictors(2), gone, *new)
    assert (the_role(found, "predictor")["state"], the_role(found, "predictor")["ready"]) == ("running", 2)


def test_rejected_pods_of_a_deployment_are_explained() -> None:
    refused = {"type": "ReplicaFailure", "status": "True", "message": "violates PodSecurity"}
    found = summary({**deployment(), "status": {"conditions": [refused]}})
    assert the_role(found, "predictor")["why"] == "its pods are rejected: violates PodSecurity"


# ── workloads ──────────────────────────────────────────────────────────────────────────────────


def test_failed_job_shows_the_exit_code_of_its_last_pod() -> None:
    failed = {"type": "Failed", "status": "True", "reason": "PodFailurePolicy", "message": "exit code 3"}
    made = {**job(), "status": {"conditions": [failed], "failed": 1}}
    ended = container("pipeline", terminated={"exitCode": 3, "reason": "Error"})
    role = the_role(summary(made, pod("p", "pipeline", "Failed", ended)), "pipeline")
    assert role["state"] == "failed"
    assert "PodFailurePolicy" in role["why"] and "the model failed the gate" in role["why"]


def test_job_between_retries_is_not_failed() -> None:
    ended = container("pipeline", terminated={"exitCode": 1, "reason": "Error"})
    again = pod("p-2", "pipeline", "Running", container("pipeline", **RUNNING), ready=True)
    made = {**job(), "status": {"active": 1, "failed": 1}}
    role = the_role(summary(made, pod("p-1", "pipeline", "Failed", ended), again), "pipeline")
    assert (role["state"], role["ready"]) == ("running", 1)


def tries(*pods: dict[str, Any], failed: int, active: int = 1) -> dict[str, Any]:
    """The pipeline of a Job that is being retried, oldest pod first."""
    for n, one in enumerate(pods):
        one["metadata"]["creationTimestamp"] = f"2026-11-16T10:0{n}:00Z"
    made = {**job(), "status": {"active": active, "failed": failed}}
    return the_role(summary(made, *reversed(pods)), "pipeline")


def failed_try(name: str, **ended: Any) -> dict[str, Any]:
    return pod(name, "pipeline", "Failed", container("pipeline", terminated=ended))


def test_retrying_job_shows_why_the_last_attempt_failed() -> None:
    out_of_memory = failed_try("p-2", exitCode=137, reason="OOMKilled", message="epoch 1: 10 %")
    running = pod("p-3", "pipeline", "Running", container("pipeline", **RUNNING), ready=True)
    role = tries(failed_try("p-1", exitCode=4, reason="Error"), out_of_memory, running, failed=2)
    assert role["state"] == "running"
    assert role["why"] == (
        "failed 2 times, retrying; last attempt: pipeline: OOMKilled: out of memory, "
        "raise deploy.resources.pipeline.memory_limit"
    )


def test_job_between_retries_shows_why_the_last_attempt_failed() -> None:
    role = tries(failed_try("p-1", exitCode=1, reason="Error", message="no room\n"), failed=1, active=0)
    assert role["state"] == "waiting"
    assert role["why"] == "failed once, retrying; last attempt: pipeline: exit code 1: no room"


def test_earlier_failed_workflow_is_not_an_attempt_of_the_current_one() -> None:
    before = failed_try("p-1", exitCode=4, reason="Error")
    now = pod("p-2", "pipeline", "Running", container("main", **RUNNING), ready=True)
    for n, one in enumerate((before, now)):
        one["metadata"]["labels"]["workflows.argoproj.io/workflow"] = f"ads-pipeline-{n}"
        one["metadata"]["creationTimestamp"] = f"2026-11-1{n}T10:00:00Z"
    made = item(
        "argoproj.io/v1alpha1", "CronWorkflow", "ads-pipeline", "pipeline", spec={"schedules": ["@daily"]}
    )
    role = the_role(
        summary({**made, "status": {"active": [{"name": "ads-pipeline-1"}]}}, before, now), "pipeline"
    )
    assert (role["state"], role["why"]) == ("running", "")
    before["metadata"]["labels"]["workflows.argoproj.io/workflow"] = "ads-pipeline-1"
    role = the_role(
        summary({**made, "status": {"active": [{"name": "ads-pipeline-1"}]}}, before, now), "pipeline"
    )
    assert role["why"].startswith("last attempt: ")


def test_unwritable_folder_is_shown_while_the_job_retries() -> None:
    said = (
        "/clickline/.clickline: Permission denied; it belongs to uid 0. Set fsGroup, or chown -R 10001:10001."
    )
    ended = {"exitCode": 1, "reason": "Error", "message": f"/scratch/cache: writable\n{said}\n"}
    failed = pod("p-1", "pipeline", "Failed", initContainerStatuses=[container("ready", terminated=ended)])
    begun = pod("p-2", "pipeline", "Pending", container("pipeline", waiting={"reason": "PodInitializing"}))
    assert tries(failed, begun, failed=1)["why"].endswith(f"last attempt: ready: exit code 1: {said}")


def test_scheduled_run_does_not_show_failures_of_the_previous_run() -> None:
    cron = item("batch/v1", "CronJob", "ads-pipeline", "pipeline", spec={"schedule": "0 3 * * *"})
    cron["status"] = {"active": [{}]}
    failed = failed_try("a", exitCode=4)
    again = pod("b", "pipeline", "Running", container("pipeline", **RUNNING), ready=True)
    for run, one in enumerate((failed, again)):
        one["metadata"]["labels"]["batch.kubernetes.io/job-name"] = f"ads-pipeline-{run}"
        one["metadata"]["creationTimestamp"] = f"2026-11-1{run}T03:00:00Z"
    assert the_role(summary(cron, failed, again), "pipeline")["why"] == ""
    again["metadata"]["labels"]["batch.kubernetes.io/job-name"] = "ads-pipeline-0"
    assert "bad data" in the_role(summary(cron, failed, again), "pipeline")["why"]


def test_restarted_container_shows_how_it_ended() -> None:
    killed = {"exitCode": 137, "reason": "OOMKilled"}
    restarted = container("ray-worker", restarts=2, last=killed, **RUNNING)
    one = pod("ads-ray-worker-0", "ray-worker", "Running", restarted, ready=True)
    made = item("apps/v1", "StatefulSet", "ads-ray-worker", "ray-worker", spec={"replicas": 1})
    role = the_role(summary({**made, "status": {"readyReplicas": 1}}, one), "ray-worker")
    assert role["state"] == "running"
    assert role["why"] == (
        "restarted 2 times, last OOMKilled: out of memory, raise deploy.resources.ray_worker.memory_limit"
    )


def test_json_log_lines_are_not_shown_as_reason() -> None:
    message = 'Traceback (most recent call last):\nOSError: no space\n{"event": "stopped", "level": "info"}\n'
    assert explain_exit(1, "Error", "predictor", "predictor", message) == "exit code 1: OSError: no space"


def test_pod_waiting_for_a_claim_shows_why_the_claim_is_pending() -> None:
    claim = item("v1", "PersistentVolumeClaim", "ads-data", "storage", spec={}, status={"phase": "Pending"})
    unbound = {
        "type": "PodScheduled",
        "status": "False",
        "message": "unbound immediate PersistentVolumeClaims",
    }
    made = pod("p", "predictor", "Pending", conditions=[unbound])
    made["spec"]["volumes"] = [{"name": "data", "persistentVolumeClaim": {"claimName": "ads-data"}}]
    events = [event("ads-data", "ProvisioningFailed", "no class fast", kind="PersistentVolumeClaim")]
    state, why = result(made, claim, events=events)
    assert state == "waiting"
    assert why.endswith("; claim ads-data: ProvisioningFailed: no class fast")


def test_finished_job_is_done() -> None:
    made = {**job(), "status": {"conditions": [{"type": "Complete", "status": "True"}], "succeeded": 1}}
    role = the_role(summary(made, pod("p", "pipeline", "Succeeded")), "pipeline")
    assert (role["state"], role["ready"], role["desired"]) == ("done", 1, 1)


@pytest.mark.parametrize(
    ("api", "kind", "status", "state", "words"),
    [
        (
            "batch.volcano.sh/v1alpha1",
            "Job",
            {"state": {"phase": "Pending"}},
            "waiting",
            "once 3 pods fit",
        ),
        ("batch.volcano.sh/v1alpha1", "Job", {"state": {"phase": "Running"}}, "running", ""),
        ("batch.volcano.sh/v1alpha1", "Job", {"state": {"phase": "Failed", "message": "no"}}, "failed", "no"),
        ("batch.volcano.sh/v1alpha1", "Job", {}, "waiting", "fit at the same time"),
        ("ray.io/v1", "RayJob", {}, "waiting", "not picked up by the operator yet"),
        ("ray.io/v1", "RayJob", {"jobDeploymentStatus": "Initializing"}, "waiting", "KubeRay: Initializing"),
        ("ray.io/v1", "RayJob", {"jobDeploymentStatus": "Complete", "jobStatus": "SUCCEEDED"}, "done", ""),
        (
            "ray.io/v1",
            "RayJob",
            {"jobDeploymentStatus": "Complete", "jobStatus": "FAILED", "message": "died"},
            "failed",
            "FAILED: died",
        ),
        ("argoproj.io/v1alpha1", "Workflow", {"phase": "Error", "message": "no room"}, "failed", "no room"),
        ("argoproj.io/v1alpha1", "Workflow", {}, "waiting", "not picked up by Argo"),
        ("argoproj.io/v1alpha1", "Workflow", {"phase": "Succeeded"}, "done", ""),
        (
            "serving.knative.dev/v1",
            "Service",
            {
                "conditions": [
                    {"type": "Ready", "status": "False", "reason": "RevisionFailed", "message": "image"}
                ]
            },
            "failed",
            "RevisionFailed: image",
        ),
        (
            "serving.knative.dev/v1",
            "Service",
            {"conditions": [{"type": "Ready", "status": "True"}]},
            "running",
            "",
        ),
        ("serving.knative.dev/v1", "Service", {}, "waiting", "not picked up by Knative"),
        ("batch/v1", "CronJob", {}, "scheduled", "at 0 3 * * *, no run yet"),
        ("argoproj.io/v1alpha1", "CronWorkflow", {"active": [{}]}, "running", ""),
    ],
)
def test_state_of_every_kind_of_workload(api: str, kind: str, status: Any, state: str, words: str) -> None:
    spec = {"minAvailable": 3, "schedule": "0 3 * * *"}
    found, why = workload_state(item(api, kind, "ads-x", "pipeline", spec=spec, status=status))
    assert found == state
    assert words in why if words else why == ""


def test_tasks_of_a_volcano_job_are_separate_roles() -> None:
    tasks = [
        {"name": "head", "replicas": 1, "template": template("ray-head")},
        {"name": "worker", "replicas": 3, "template": template("ray-worker")},
        {"name": "driver", "replicas": 1, "template": template("pipeline")},
    ]
    made = item("batch.volcano.sh/v1alpha1", "Job", "ads-pipeline", "pipeline", spec={"tasks": tasks})
    made["status"] = {"state": {"phase": "Running"}}
    one = pod("w", "ray-worker", "Running", container("ray-worker", **RUNNING), ready=True)
    found = summary(made, one)
    assert {role["role"]: (role["ready"], role["desired"]) for role in found["roles"]} == {
        "ray-head": (0, 1),
        "ray-worker": (1, 3),
        "pipeline": (0, 1),
    }
    assert the_role(found, "ray-worker")["state"] == "waiting"


def test_groups_of_a_ray_job_are_separate_roles() -> None:
    cluster = {
        "headGroupSpec": {"template": template("ray-head")},
        "workerGroupSpecs": [{"replicas": 2, "template": template("ray-worker")}],
    }
    made = item("ray.io/v1", "RayJob", "ads-pipeline", "pipeline", spec={"rayClusterSpec": cluster})
    found = summary(made)
    assert {role["role"]: role["desired"] for role in found["roles"]} == {
        "ray-head": 1,
        "ray-worker": 2,
        "pipeline": None,
    }


def test_idle_schedule_is_failed_only_if_its_last_run_failed() -> None:
    cron = item("batch/v1", "CronJob", "ads-pipeline", "pipeline", spec={"schedule": "0 3 * * *"})
    done = pod("ads-pipeline-1", "pipeline", "Succeeded")
    bad = pod("ads-pipeline-2", "pipeline", "Failed", container("pipeline", terminated={"exitCode": 4}))
    done["metadata"]["creationTimestamp"], bad["metadata"]["creationTimestamp"] = "2026-11-15", "2026-11-16"
    assert summary(cron, done)["state"] == "scheduled"
    role = the_role(summary(cron, bad, done), "pipeline")
    assert role["state"] == "failed" and "bad data" in role["why"]


# ── endpoints and errors ───────────────────────────────────────────────────────────────────────

PORTS = [{"name": "http", "port": 8501, "nodePort": 30101}]


def service(**spec: Any) -> dict[str, Any]:
    return item("v1", "Service", "ads-predictor", "predictor", spec={"ports": PORTS, **spec})


def node(**addresses: str) -> dict[str, Any]:
    result = [{"type": kind, "address": address} for kind, address in addresses.items()]
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n"}, "status": {"addresses": result}}


@pytest.mark.parametrize(
    ("objects", "addresses"),
    [
        ([service()], ["http ads-predictor.shop.svc:8501"]),
        ([service(type="NodePort"), node(InternalIP="10.0.0.4", Hostname="a")], ["http 10.0.0.4:30101"]),
        (
            [service(type="NodePort"), node(InternalIP="10.0.0.4", ExternalIP="1.2.3.4")],
            ["http 1.2.3.4:30101"],
        ),
        ([service(type="NodePort"), node(InternalIP="fd00::4")], ["http [fd00::4]:30101"]),
        ([service(type="NodePort")], ["http any node's address, port 30101"]),
        ([service(type="LoadBalancer")], ["http pending"]),
        (
            [
                {
                    **service(type="LoadBalancer"),
                    "status": {"loadBalancer": {"ingress": [{"hostname": "lb.test"}]}},
                }
            ],
            ["http lb.test:8501"],
        ),
    ],
)
def test_endpoints_are_reachable_addresses(objects: list[Any], addresses: list[str]) -> None:
    assert [one["addresses"] for one in summary(*objects)["endpoints"]] == [addresses]


def test_knative_url_is_an_endpoint_and_headless_services_are_not() -> None:
    made = item("serving.knative.dev/v1", "Service", "ads-predictor", "predictor", spec={})
    made["status"] = {"url": "http://ads-predictor.shop.test"}
    found = summary(made, service(clusterIP="None"))["endpoints"]
    assert [(one["type"], one["addresses"]) for one in found] == [
        ("Knative", ["http://ads-predictor.shop.test"])
    ]


def test_last_errors_are_about_this_deployment_and_deduplicated() -> None:
    events = [
        event("ads-predictor-1", "BackOff", "second", at="2026-11-16T10:02:00Z"),
        event("ads-predictor-1", "BackOff", "first", at="2026-11-16T10:01:00Z"),
        event("adserver-1", "BackOff", "of others", at="2026-11-16T10:03:00Z"),
        event("ads-pipeline", "Failed", "between", kind="Job", at="2026-11-16T10:01:30Z"),
    ]
    found = [(one["object"], one["message"]) for one in summary(events=events)["errors"]]
    assert found == [("Job ads-pipeline", "between"), ("Pod ads-predictor-1", "second")]


def errors(*objects: dict[str, Any], events: Any) -> list[str]:
    return [one["reason"] for one in summary(*objects, events=events)["errors"]]


def test_failed_probes_before_readiness_are_not_errors() -> None:
    one = pod("p-1", "predictor", "Running", container("predictor", **RUNNING), since="2026-11-16T10:01:00Z")
    slow = [event("p-1", "Unhealthy", "Startup probe failed", at="2026-11-16T10:00:40Z")]
    assert errors(predictors(0), one, events=slow) == ["Unhealthy"]
    one["status"]["conditions"][0]["status"] = "True"
    assert errors(predictors(1), one, events=slow) == []
    later = [event("p-1", "Unhealthy", "Liveness probe failed", at="2026-11-16T10:02:00Z")]
    assert errors(predictors(1), one, events=[*slow, *later]) == ["Unhealthy"]


def test_warnings_about_deleted_pods_of_a_healthy_role_are_not_errors() -> None:
    gone = [
        event("ads-predictor-5f-x", "Unhealthy", "Readiness probe failed"),
        event("ads-predictor-5f", "FailedCreate", "exceeded quota", kind="ReplicaSet"),
    ]
    one = pod("ads-predictor-6a-y", "predictor", "Running", ready=True)
    made = {**deployment(), "status": {"readyReplicas": 1}}
    made["spec"]["replicas"] = 1
    assert errors(made, one, events=gone) == []
    assert errors({**made, "status": {}}, events=gone) == ["Unhealthy", "FailedCreate"]


def test_finished_pipeline_shows_no_errors_of_its_attempts() -> None:
    done = {**job(), "status": {"conditions": [{"type": "Complete", "status": "True"}]}}
    failed = pod("ads-pipeline-a", "pipeline", "Failed", container("pipeline", terminated={"exitCode": 1}))
    tried = [event("ads-pipeline-a", "BackOff", "again"), event("ads-pipeline", "Slow", "x", kind="Job")]
    assert errors(done, failed, pod("ads-pipeline-b", "pipeline", "Succeeded"), events=tried) == []
    assert errors(job(), failed, events=tried) == ["BackOff", "Slow"]


# ── fetched ────────────────────────────────────────────────────────────────────────────────────


def look(kube: Kube) -> dict[str, Any]:
    return summarize(fetch_status(kube, ADS))


def test_status_of_a_cluster_is_summarized(cluster: ApiServer, kube: Kube) -> None:
    cluster.put(predictors(2))
    for name in ("p-1", "p-2"):
        cluster.put(pod(name, "predictor", "Running", container("predictor", **RUNNING), ready=True))
        cluster.pages[name, "/metrics"] = (
            200,
            "# HELP x\nclickline_version_age_seconds 5.0\nclickline_version 12.0\n",
        )
    cluster.put(service(type="NodePort"))
    cluster.put(node(InternalIP="10.0.0.4"))
    cluster.put(event("p-1", "Unhealthy", "slow", at="2026-11-16T10:01:00Z"))
    other = pod("other", "predictor", "Running", ready=True)
    other["metadata"]["labels"]["app.kubernetes.io/instance"] = "ads2"
    cluster.put(other)
    found = look(kube)
    assert (found["state"], found["versions"]) == ("running", [12])
    assert found["endpoints"][0]["addresses"] == ["http 10.0.0.4:30101"]
    assert found["errors"][0]["reason"] == "Unhealthy"
    assert [one["pod"] for one in the_role(found, "predictor")["pods"]] == ["p-1", "p-2"]


def test_version_of_a_predictor_with_a_token_is_shown(bare: ApiServer, kube: Kube) -> None:
    bare.put(predictors(2))
    for name in ("p-1", "p-2"):
        bare.put(pod(name, "predictor", "Running", container("predictor", **RUNNING), ready=name == "p-1"))
    bare.pages["p-1", "/metrics"] = (401, "no token")
    bare.pages["p-1", "/readyz"] = (200, "ready\nversion 12\n")
    bare.pages["p-2", "/metrics"] = (200, "clickline_restarts_total 0.0\n")
    bare.pages["p-2", "/readyz"] = (503, "no version yet\n")
    pods = {one["pod"]: (one["version"], one["words"]) for one in the_role(look(kube), "predictor")["pods"]}
    assert pods == {"p-1": (12, None), "p-2": (None, "no version yet")}


def test_pod_that_does_not_listen_yet_is_explained(bare: ApiServer, kube: Kube) -> None:
    bare.put(predictors(1))
    bare.put(pod("p-1", "predictor", "Running", container("predictor", **RUNNING)))
    bare.put(pod("p-2", "predictor", "Running", container("predictor", **RUNNING), ready=True))
    role = the_role(look(kube), "predictor")
    assert {one["pod"]: one["words"] for one in role["pods"]} == {
        "p-1": "not reachable yet",
        "p-2": "version unknown: the API server cannot reach the pod",
    }
    assert role["why"] == "not ready; not reachable yet"


def test_forbidden_pod_proxy_is_noted_once(bare: ApiServer, kube: Kube) -> None:
    bare.put(predictors(2))
    for name in ("p-1", "p-2"):
        bare.put(pod(name, "predictor", "Running", container("predictor", **RUNNING), ready=True))
    bare.faults.append(Fault("get", "pods/proxy"))
    found = look(kube)
    assert [note for note in found["notes"] if "may not reach pods" in note] == found["notes"]
    assert len(found["notes"]) == 1


SCALER = ("autoscaling/v2", "HorizontalPodAutoscaler", "ads-predictor", "predictor")


def test_missing_metrics_server_is_one_note(bare: ApiServer, kube: Kube) -> None:
    bare.put(item(*SCALER, status={"conditions": [{"type": "ScalingActive", "status": "False"}]}))
    for reason in ("FailedGetResourceMetric", "FailedComputeMetricsReplicas"):
        words = "unable to get metrics: the server could not find the requested resource (get pods.metrics.k8s.io)"
        bare.put(event("ads-predictor", reason, words, kind=SCALER[1]))
    found = look(kube)
    assert found["errors"] == []
    assert [note for note in found["notes"] if "needs a metrics server" in note] == found["notes"]
    assert len(found["notes"]) == 1
    bare.kinds["metrics.k8s.io/v1beta1"] = {"PodMetrics": ("pods", True)}
    found = look(kube)
    assert len(found["errors"]) == 2 and found["notes"] == []


def test_active_autoscaler_has_no_errors(bare: ApiServer, kube: Kube) -> None:
    bare.kinds["metrics.k8s.io/v1beta1"] = {"PodMetrics": ("pods", True)}
    active = {"type": "ScalingActive", "status": "True", "lastTransitionTime": "2026-11-16T10:05:00Z"}
    bare.put(item(*SCALER, status={"conditions": [active]}))
    bare.put(event("ads-predictor", "FailedGetResourceMetric", "pods might be unready", kind=SCALER[1]))
    assert look(kube)["errors"] == []


@pytest.mark.parametrize(("plural", "words"), [("nodes", "list nodes"), ("events", "list events")])
def test_forbidden_kinds_are_notes(bare: ApiServer, kube: Kube, plural: str, words: str) -> None:
    bare.put(service(type="NodePort"))
    bare.faults.append(Fault("list", plural))
    found = look(kube)
    assert any(words in note for note in found["notes"])
    assert found["endpoints"][0]["addresses"] == ["http any node's address, port 30101"]
