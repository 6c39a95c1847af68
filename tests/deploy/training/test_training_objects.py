"""Every variant of training and pipeline, validated as an API server would."""

from __future__ import annotations

import json
from typing import Any

import hera.workflows.models as hera
import pytest
import typer
import yaml
from plans import EVERY_KIND, plan, the

from clickline.cli.app import app
from clickline.deploy.argo import argo_rules
from clickline.deploy.objects import Object, to_yaml
from clickline.deploy.rbac import access_objects
from clickline.deploy.render import training_objects
from deploy.schemas.schemas import commands, pod_specs, problems, restricted_problems

KINDS = pytest.mark.parametrize("kind", EVERY_KIND)


def _is_large(kind: str) -> bool:
    """Whether the schema of this kind has megabytes."""
    return "argo" in kind or "kuberay" in kind


def _made(kind: str) -> list[Object]:
    return training_objects(plan(*EVERY_KIND[kind]))


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.slow if _is_large(kind) else ()) for kind in EVERY_KIND],
)
def test_objects_match_the_schemas_and_unknown_fields_are_rejected(kind: str) -> None:
    made = _made(kind)
    assert [problem for one in made for problem in problems(one)] == []
    for one in made:
        assert problems({**one, "spec": {**one["spec"], "unheardOf": 1}})


def test_unknown_container_field_is_found_at_any_depth() -> None:
    made = the("Job", _made("volcano"))
    made["spec"]["tasks"][1]["template"]["spec"]["initContainers"][0]["unheardOf"] = 1
    assert any("unheardOf" in problem for problem in problems(made))


@KINDS
def test_pods_meet_the_restricted_pod_security_standard(kind: str) -> None:
    specs = [spec for one in _made(kind) for spec in pod_specs(one)]
    assert specs
    assert [problem for spec in specs for problem in restricted_problems(spec)] == []
    for spec in specs:
        root = [{**spec["containers"][0], "securityContext": {"runAsUser": 0}}]
        assert len(restricted_problems({**spec, "containers": root, "hostNetwork": True})) > 4


@KINDS
def test_every_command_in_a_manifest_exists(kind: str) -> None:
    lines = list(commands(_made(kind)))
    assert lines
    for line in lines:
        if line[0] == "clickline":
            _parse(line[1:])
        else:
            assert line[:2] == ["ray", "start"], line
            ray = pytest.importorskip("ray.scripts.scripts", reason="the extra `cluster` is not installed")
            ray.start.make_context("ray start", line[2:])


def _parse(line: list[str]) -> None:
    """Parse a command line as the program does; an unknown word raises."""
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands"):
        name, *line = line
        assert name in command.commands, name
        command = command.commands[name]
    command.make_context("clickline", line)


@KINDS
def test_rendering_is_deterministic(kind: str) -> None:
    made = _made(kind)
    assert to_yaml(made) == to_yaml(_made(kind))
    for one in made:
        metadata = one["metadata"]
        assert metadata["name"].startswith("ads-")
        assert metadata["namespace"] == "clickline"
        assert metadata["labels"]["app.kubernetes.io/instance"] == "ads"
    names = [(one["apiVersion"], one["kind"], one["metadata"]["name"]) for one in made]
    assert len(names) == len(set(names))


# ── plain ──────────────────────────────────────────────────────────────────────────────────────


def test_ray_from_core_objects() -> None:
    made = training_objects(
        plan("train.mode=cluster", "train.workers={min: 2, max: 5}", "deploy.workflow.follow=true")
    )
    head = the("StatefulSet", made, "ads-ray-head")
    worker = the("StatefulSet", made, "ads-ray-worker")
    service = the("Service", made)
    assert (head["spec"]["replicas"], worker["spec"]["replicas"]) == (1, 5)
    assert {head["spec"]["serviceName"], worker["spec"]["serviceName"]} == {service["metadata"]["name"]}
    assert service["spec"]["selector"] == head["spec"]["selector"]["matchLabels"]
    assert service["spec"]["publishNotReadyAddresses"]
    started = worker["spec"]["template"]["spec"]["containers"][0]["command"]
    assert "--address=ads-ray-head-0.ads-ray:6379" in started
    assert (
        "restartPolicy" not in worker["spec"]["template"]["spec"]
    )  # Always: restarted in place, without the others


def test_head_runs_no_tasks_and_each_worker_pod_runs_one_worker() -> None:
    made = training_objects(plan("train.mode=cluster", "train.embedding_servers=3", "train.workers.min=2"))
    head = the("StatefulSet", made, "ads-ray-head")["spec"]["template"]["spec"]["containers"][0]["command"]
    worker = the("StatefulSet", made, "ads-ray-worker")["spec"]["template"]["spec"]["containers"][0][
        "command"
    ]
    assert "--num-cpus=0" in head
    assert "--memory=1" in head
    assert "--num-cpus=1" in worker
    assert f"--memory={4 << 30}" in worker


@pytest.mark.parametrize(
    ("overrides", "shard", "most", "cpus"),
    [
        ((), int(0.6 * (4 << 30) / 2), 1, 1),  # two shards on one pod
        (("train.workers.min=2",), int(0.6 * (4 << 30)), 2, 1),
        (("train.embedding_servers=5", "train.workers={min: 2, max: 4}"), int(0.6 * (4 << 30) // 3), 4, 1),
        (("cluster.embedding_server.memory=100MiB",), 100 << 20, 1, 1),
        (("cluster.worker.memory=3GiB",), (1 << 30) // 2, 1, 1),
        (
            ("cluster.worker.memory=5GiB",),
            1 << 20,
            1,
            1,
        ),  # there is no room: Ray reports that, not the config
        (("cluster.worker.cpus=2", "cluster.embedding_server.cpus=0.5"), int(0.6 * (4 << 30) / 2), 1, 3),
        (("cluster.worker.cpus=0",), int(0.6 * (4 << 30) / 2), 1, 1),
    ],
)
def test_embedding_servers_and_workers_fit_into_the_pods(
    overrides: tuple[str, ...], shard: int, most: int, cpus: int
) -> None:
    one = plan("train.mode=cluster", *overrides)
    assert one.config.cluster.embedding_server.memory == shard
    assert one.config.train.workers.max == most
    assert one.config.cluster.address == "ads-ray-head-0.ads-ray:6379"
    worker = the("StatefulSet", training_objects(one), "ads-ray-worker")
    assert f"--num-cpus={cpus}" in worker["spec"]["template"]["spec"]["containers"][0]["command"]


def test_pods_that_need_ray_wait_for_the_head() -> None:
    made = training_objects(plan("train.mode=cluster"))
    waiting = [line for line in commands(made) if "--await" in line]
    assert waiting == [["clickline", "deploy", "check-pod", "--await", "ads-ray-head-0.ads-ray:6379"]] * 2
    assert not [line for line in commands(training_objects(plan())) if "--await" in line]


@pytest.mark.parametrize("schedule", ["null", "0 3 * * *"])
def test_ray_runs_only_while_a_pipeline_does(schedule: str) -> None:
    one = plan("train={mode: cluster, workers: {min: 2, max: 5}}", f"deploy.workflow.schedule={schedule}")
    made = training_objects(one)
    for name in ("ads-ray-head", "ads-ray-worker"):
        assert "replicas" not in the("StatefulSet", made, name)["spec"]  # an apply would undo what runs
    (spec,) = [spec for spec in pod_specs(made) if spec["containers"][0]["name"] == "pipeline"]
    holder, ready = spec["initContainers"]
    assert holder["restartPolicy"] == "Always" and "restartPolicy" not in ready
    assert holder["command"][-2:] == ["ads-ray-head=1", "ads-ray-worker=5"]
    mark = holder["command"][holder["command"].index("--mark") + 1]
    assert holder["startupProbe"]["exec"]["command"] == ["test", "-e", mark]


def test_only_the_scaler_has_an_api_token_and_may_only_scale_two_sets() -> None:
    one = plan("train.mode=cluster")
    (spec,) = [
        spec for spec in pod_specs(training_objects(one)) if spec["containers"][0]["name"] == "pipeline"
    ]
    assert spec["automountServiceAccountToken"] is False
    (volume,) = [volume for volume in spec["volumes"] if "projected" in volume]
    having = [
        container["name"]
        for container in [*spec["initContainers"], *spec["containers"]]
        if volume["name"] in {mount["name"] for mount in container["volumeMounts"]}
    ]
    assert having == ["ray"]
    (rule,) = the("Role", access_objects(one))["rules"]
    assert rule == {
        "apiGroups": ["apps"],
        "resources": ["statefulsets/scale"],
        "resourceNames": ["ads-ray-head", "ads-ray-worker"],
        "verbs": ["get", "patch"],
    }
    for other in (("deploy.workflow.follow=true",), ("deploy.training.kind=volcano",)):
        assert "Role" not in {one["kind"] for one in access_objects(plan("train.mode=cluster", *other))}
    assert "Role" not in {one["kind"] for one in access_objects(plan())}


# ── the job ────────────────────────────────────────────────────────────────────────────────────


def test_job_does_not_retry_final_exit_codes() -> None:
    spec = the("Job", training_objects(plan("deploy.workflow.retries=9")), "ads-pipeline")["spec"]
    ends, counts_not = spec["podFailurePolicy"]["rules"]
    assert ends["action"] == "FailJob"
    assert ends["onExitCodes"]["values"] == [2, 3, 4]
    assert ends["onExitCodes"]["containerName"] == spec["template"]["spec"]["containers"][0]["name"]
    assert counts_not["action"] == "Ignore"
    assert counts_not["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert spec["backoffLimit"] == 9
    assert spec["template"]["spec"]["restartPolicy"] == "Never"  # podFailurePolicy is rejected with another
    assert "ttlSecondsAfterFinished" not in spec
    assert spec["template"]["spec"]["containers"][0]["command"] == [
        "clickline",
        "up",
        "--no-serve",
        "--no-studio",
    ]


def test_schedule_renders_a_cron_job_without_overlapping_runs() -> None:
    spec = the("CronJob", training_objects(plan("deploy.workflow.schedule=30 2 * * 1")))["spec"]
    assert spec["schedule"] == "30 2 * * 1"
    assert spec["concurrencyPolicy"] == "Forbid"


@pytest.mark.parametrize("kind", ["local trainer", "plain trainer", "volcano trainer"])
def test_only_one_trainer_runs_at_a_time(kind: str) -> None:
    made = _made(kind)
    trainer = the("Deployment", made, "ads-trainer")["spec"]
    assert trainer["replicas"] == 1
    assert trainer["strategy"] == {"type": "Recreate"}
    container = trainer["template"]["spec"]["containers"][0]
    assert container["command"] == ["clickline", "up", "--follow", "--no-serve", "--no-studio"]
    assert not [one for one in made if one["kind"] in ("Job", "RayJob", "Workflow")]
    assert len([one for one in made if one["kind"] == "StatefulSet"]) == (0 if kind == "local trainer" else 2)


# ── Volcano ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("workers", "replicas", "least"),
    [("{min: 1}", 1, 3), ("{min: 4}", 4, 6), ("{min: 2, max: 8}", 8, 4), ("{min: 3, max: 3}", 3, 5)],
)
def test_volcano_waits_for_head_driver_and_minimum_workers(workers: str, replicas: int, least: int) -> None:
    made = training_objects(
        plan("train.mode=cluster", "deploy.training.kind=volcano", f"train.workers={workers}")
    )
    spec = the("Job", made)["spec"]
    assert {task["name"]: task["replicas"] for task in spec["tasks"]} == {
        "head": 1,
        "worker": replicas,
        "driver": 1,
    }
    assert spec["minAvailable"] == least == sum(task["minAvailable"] for task in spec["tasks"])
    assert spec["minAvailable"] <= sum(task["replicas"] for task in spec["tasks"])
    assert {task["template"]["spec"]["schedulerName"] for task in spec["tasks"]} == {"volcano"}


def test_volcano_restarts_only_the_failed_pod() -> None:
    spec = the("Job", _made("volcano"))["spec"]
    assert "policies" not in spec
    policies = {task["name"]: task["policies"] for task in spec["tasks"]}
    actions = {policy["action"] for own in policies.values() for policy in own}
    assert actions == {"RestartPod", "CompleteJob", "TerminateJob"}
    assert policies["head"] == policies["worker"] == [{"event": "PodFailed", "action": "RestartPod"}]
    assert policies["driver"][0] == {"event": "TaskCompleted", "action": "CompleteJob"}
    # The controller takes the first match: a final exit code must come before the event of all failures.
    assert [policy.get("exitCode") for policy in policies["driver"]] == [None, 2, 3, 4, None]
    assert policies["driver"][-1] == {"event": "PodFailed", "action": "RestartPod"}
    assert spec["tasks"][2]["template"]["spec"]["restartPolicy"] == "Never"
    assert spec["maxRetry"] == 7  # six restarts: the seventh failure fails the job


def test_volcano_head_has_the_host_name_that_workers_connect_to() -> None:
    one = plan("train.mode=cluster", "deploy.training.kind=volcano")
    made = training_objects(one)
    head = the("Job", made)["spec"]["tasks"][0]["template"]
    service = the("Service", made)
    assert one.config.cluster.address == f"{head['spec']['hostname']}.{head['spec']['subdomain']}:6379"
    assert service["metadata"]["name"] == head["spec"]["subdomain"]
    assert service["spec"]["selector"].items() <= head["metadata"]["labels"].items()


def test_queue_and_priority_class() -> None:
    spec = the("Job", _made("everything named"))["spec"]
    assert (spec["queue"], spec["priorityClassName"]) == ("night", "low")
    assert {task["template"]["spec"]["priorityClassName"] for task in spec["tasks"]} == {"low"}
    gang = plan(
        "train.mode=cluster",
        "deploy.training={kind: kuberay, gang: true, queue: night}",
        "deploy.nodes.priority_class=low",
    )
    labels = the("RayJob", training_objects(gang))["metadata"]["labels"]
    assert labels["ray.io/scheduler-name"] == "volcano"
    assert (labels["volcano.sh/queue-name"], labels["ray.io/priority-class-name"]) == ("night", "low")


# ── KubeRay ────────────────────────────────────────────────────────────────────────────────────


def test_ray_job_omits_what_the_operator_sets() -> None:
    one = plan("train.mode=cluster", "deploy.training.kind=kuberay")
    assert one.config.cluster.address == "auto"
    spec = the("RayJob", training_objects(one))["spec"]
    cluster = spec["rayClusterSpec"]
    assert spec["entrypoint"] == "clickline up --no-serve --no-studio -c /clickline/clickline.yaml"
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert cluster["headGroupSpec"]["rayStartParams"]["memory"] == "1"
    assert "enableInTreeAutoscaling" not in cluster
    templates = [cluster["headGroupSpec"]["template"], cluster["workerGroupSpecs"][0]["template"]]
    for template in (*templates, spec["submitterPodTemplate"]):
        main = template["spec"]["containers"][0]
        assert "command" not in main
        assert "RAY_AUTH_TOKEN_PATH" not in {one["name"] for one in main["env"]}
        assert not template["spec"]["automountServiceAccountToken"]
        assert "/tmp" in {mount["mountPath"] for mount in main["volumeMounts"]}
    for template in templates:
        ports = {port["name"] for port in template["spec"]["containers"][0]["ports"]}
        for probe in ("readinessProbe", "livenessProbe"):  # otherwise the operator adds its own
            assert template["spec"]["containers"][0][probe]["tcpSocket"]["port"] in ports
    for (
        template
    ) in templates:  # the operator rejects another policy for pods that its autoscaler may terminate
        assert "restartPolicy" not in template["spec"]
    # The head runs the stages too: 100m + 50m, 768Mi + 512Mi, 4Gi + 2Gi.
    assert templates[0]["spec"]["containers"][0]["resources"] == {
        "requests": {"cpu": "150m", "memory": "1280Mi"},
        "limits": {"memory": "6144Mi"},
    }


def test_ray_job_name_differs_from_every_job_of_the_deployment() -> None:
    """KubeRay's submitter is a Job of the same name: an existing one would be mistaken for it."""
    jobs = {
        one["metadata"]["name"]
        for kind in EVERY_KIND
        for one in _made(kind)
        if one["apiVersion"] == "batch/v1"
    }
    name = the("RayJob", _made("kuberay"))["metadata"]["name"]
    assert jobs and name not in jobs


def test_elastic_ray_cluster_has_an_autoscaler() -> None:
    cluster = the("RayJob", _made("kuberay growing"))["spec"]["rayClusterSpec"]
    group = cluster["workerGroupSpecs"][0]
    assert cluster["enableInTreeAutoscaling"] is True
    assert (group["minReplicas"], group["replicas"], group["maxReplicas"]) == (1, 1, 3)
    options = cluster["autoscalerOptions"]
    pod = {**cluster["headGroupSpec"]["template"]["spec"], "containers": [{"name": "autoscaler", **options}]}
    assert restricted_problems(pod) == []
    assert cluster["headGroupSpec"]["template"]["spec"]["automountServiceAccountToken"] is True


# ── Argo ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", [kind for kind in EVERY_KIND if "argo" in kind])
def test_hera_parses_the_argo_objects(kind: str) -> None:
    models = {
        "Workflow": hera.Workflow,
        "WorkflowTemplate": hera.WorkflowTemplate,
        "CronWorkflow": hera.CronWorkflow,
    }
    found = [one for one in _made(kind) if one["apiVersion"] == "argoproj.io/v1alpha1"]
    assert len(found) == 2
    for one in found:
        loaded = models[one["kind"]].model_validate(one)
        back = json.loads(loaded.model_dump_json(by_alias=True, exclude_none=True))
        assert back["spec"] == one["spec"]


def _steps(*overrides: str) -> dict[str, dict[str, Any]]:
    template = the("WorkflowTemplate", training_objects(plan("deploy.workflow.kind=argo", *overrides)))
    return {one["name"]: one for one in template["spec"]["templates"]}


def test_workflow_steps_are_in_order() -> None:
    steps = _steps()
    assert [group[0]["template"] for group in steps["pipeline"]["steps"]] == [
        "prepare",
        "train",
        "publish",
        "roll-out",
    ]
    assert steps["prepare"]["container"]["command"] == ["clickline", "prepare"]
    assert steps["publish"]["container"]["command"] == ["clickline", "publish"]


def test_first_step_scales_ray_up_and_exit_handler_scales_it_down() -> None:
    one = plan("train={mode: cluster, workers: {min: 2, max: 5}}", "deploy.workflow.kind=argo")
    made = training_objects(one)
    spec = the("WorkflowTemplate", made)["spec"]
    steps = {one["name"]: one for one in spec["templates"]}
    first, last = spec["templates"][0]["steps"][0][0]["template"], spec["onExit"]
    sizes = ["ads-ray-head=1", "ads-ray-worker=5"]
    assert steps[first]["container"]["command"][-4:] == ["--only", "ask", *sizes]
    assert steps[last]["container"]["command"][-4:] == ["--only", "release", *sizes]
    assert "replicas" not in the("StatefulSet", made, "ads-ray-worker")["spec"]
    assert ["statefulsets/scale"] in [rule["resources"] for rule in the("Role", access_objects(one))["rules"]]
    assert (
        "onExit" not in the("WorkflowTemplate", training_objects(plan("deploy.workflow.kind=argo")))["spec"]
    )


def test_train_step_is_retried_after_a_failed_gate() -> None:
    train = _steps("gate.extra_epochs=4", "deploy.workflow.retries=2")["train"]
    assert train["retryStrategy"]["limit"] == "6"
    assert train["retryStrategy"]["expression"] == "!(lastRetry.exitCode in ['2', '4'])"
    assert train["container"]["command"][-1] == (
        "gate.extra_epochs={{=sprig.int(retries) < 4 ? sprig.int(retries) : 4}}"
    )
    others = _steps("deploy.workflow.retries=2")
    for name in ("prepare", "publish", "roll-out"):
        assert others[name]["retryStrategy"]["limit"] == "2"
        assert others[name]["retryStrategy"]["expression"] == "!(lastRetry.exitCode in ['2', '3', '4'])"


def test_argo_containers_meet_the_restricted_standard_too() -> None:
    patch = json.loads(_steps()["publish"]["podSpecPatch"])
    pod = {"containers": patch["containers"], "initContainers": patch["initContainers"]}
    assert restricted_problems(pod) == ["init: writable root", "wait: writable root"]


@pytest.mark.parametrize(
    ("operator", "kind", "resource"), [("volcano", "Job", "jobs"), ("kuberay", "RayJob", "rayjobs")]
)
def test_training_by_an_operator_is_a_step_that_creates_its_object(
    operator: str, kind: str, resource: str
) -> None:
    wanted = ("train.mode=cluster", f"deploy.training.kind={operator}")
    steps = _steps(*wanted)
    assert steps["prepare"]["container"]["command"] == [
        "clickline",
        "prepare",
        "--set",
        "cluster.address=null",
    ]
    made = yaml.safe_load(steps["train"]["resource"]["manifest"])
    assert made["kind"] == kind
    assert made["metadata"]["generateName"] == "ads-train-"
    assert "name" not in made["metadata"]
    assert problems({**made, "metadata": {**made["metadata"], "name": "one"}}) == []
    assert "clickline train" in json.dumps(made) or ["clickline", "train"] in list(commands(made))
    allowed = argo_rules(plan("deploy.workflow.kind=argo", *wanted))
    assert [rule["resources"] for rule in allowed] == [["workflowtaskresults"], [resource]]
    assert argo_rules(plan("deploy.workflow.kind=argo")) == allowed[:1]
    assert argo_rules(plan()) == []
