"""The stages as steps of an Argo Workflow: prepare → train → publish → roll-out. Ray from core objects comes before and
goes after them.

Each step is a pod of ours; Argo adds its own containers beside ours, which get the same security here. Training by
Volcano or KubeRay is a step that makes their object and waits for its end; the object retries by itself.
"""

from __future__ import annotations

import json
from typing import Any

from clickline.deploy.kuberay import ray_job_for
from clickline.deploy.objects import DeployPlan, Object, to_yaml
from clickline.deploy.pipeline_jobs import FINAL_CODES, pipeline_objects
from clickline.deploy.ray_lifecycle import scaler_command
from clickline.deploy.ray_pods import driver, ray_is_temporary, ray_service, uses_operator
from clickline.deploy.rollout_wait import rollout_service
from clickline.deploy.volcano import volcano_job_for

_API = "argoproj.io/v1alpha1"
_RAY, _RELEASE_RAY = "ray", "without-ray"
_GATE_EXIT_CODE = 3
_STARTING_DEADLINE = 3600
# Root's file system stays writable in these two: Argo's own defaults do not lock it (argo-workflows #10787).
_EXECUTOR = {
    "allowPrivilegeEscalation": False,
    "runAsNonRoot": True,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}
_PATCH: dict[str, Any] = {
    "enableServiceLinks": False,
    "initContainers": [{"name": "init", "securityContext": _EXECUTOR}],
    "containers": [{"name": "wait", "securityContext": _EXECUTOR}],
}
_WITHOUT_RAY = ["--set", "cluster.address=null"]
_BY_OPERATOR = {
    "volcano": (
        volcano_job_for,
        "status.state.phase == Completed",
        "status.state.phase in (Failed, Aborted, Terminated)",
    ),
    "kuberay": (
        ray_job_for,
        "status.jobDeploymentStatus == Complete",
        "status.jobDeploymentStatus == Failed",
    ),
}


def workflow_objects(plan: DeployPlan) -> list[Object]:
    """The steps as a template, and a run of it: now, or at its times. Learning on as hours arrive has no steps: the
    learner."""
    wanted = plan.deploy.workflow
    if wanted.follow:
        return pipeline_objects(plan)
    if wanted.kind != "argo":
        return []
    name = plan.object_name("pipeline")
    run: Object = {"workflowTemplateRef": {"name": name}}
    if wanted.schedule is None:
        begun = plan.object(_API, "Workflow", name, "pipeline", {"spec": run})
    else:
        times = {
            "schedules": [wanted.schedule],
            "concurrencyPolicy": "Forbid",  # one run at a time learns into a home
            "startingDeadlineSeconds": _STARTING_DEADLINE,
            "successfulJobsHistoryLimit": 3,
            "failedJobsHistoryLimit": 3,
            "workflowMetadata": {"labels": plan.labels("pipeline")},
            "workflowSpec": run,
        }
        begun = plan.object(_API, "CronWorkflow", name, "pipeline", {"spec": times})
    template = plan.object(_API, "WorkflowTemplate", name, "pipeline", {"spec": _steps(plan)})
    named = (
        [ray_service(plan)] if uses_operator(plan.config) and plan.deploy.training.kind == "volcano" else []
    )
    return [*named, rollout_service(plan), template, begun]


def argo_rules(plan: DeployPlan) -> list[Object]:
    """What the steps' pods must be allowed to do, as rules of a Role: Argo's part in them tells how they ended, and one
    may make an operator's object."""
    if plan.deploy.workflow.kind != "argo" or plan.deploy.workflow.follow:
        return []
    needed = [("argoproj.io", "workflowtaskresults", ["create", "patch"])]
    if uses_operator(plan.config):
        kinds = {"volcano": ("batch.volcano.sh", "jobs"), "kuberay": ("ray.io", "rayjobs")}
        needed.append((*kinds[plan.deploy.training.kind], ["create", "get"]))
    return [{"apiGroups": [group], "resources": [kind], "verbs": verbs} for group, kind, verbs in needed]


def _steps(plan: DeployPlan) -> Object:
    stages = ["prepare", "train", "publish", "roll-out"]
    operated, passing = uses_operator(plan.config), ray_is_temporary(plan)
    if passing:
        stages.insert(0, _RAY)
    templates = [
        {"name": "pipeline", "steps": [[{"name": stage, "template": stage}] for stage in stages]},
        # Before an operator's training there is no Ray: the logs are prepared by this pod alone.
        _step(
            plan, "prepare", ["clickline", "prepare", *(_WITHOUT_RAY if operated else [])], ray=not operated
        ),
        _train_by_operator(plan) if operated else _train(plan),
        _step(plan, "publish", ["clickline", "publish"], ray=False),
        _step(plan, "roll-out", ["clickline", "deploy", "await-rollout"], ray=False, calls_predictors=True),
    ]
    if passing:
        templates += [
            _step(plan, _RAY, scaler_command(plan, "--only", "ask"), ray=False),
            _step(plan, _RELEASE_RAY, scaler_command(plan, "--only", "release"), ray=False),
        ]
    spec: Object = {
        "entrypoint": "pipeline",
        "serviceAccountName": plan.object_name("access"),
        "podMetadata": {"labels": plan.labels("pipeline")},
        "securityContext": driver(plan, [], ray=False)["spec"]["securityContext"],
        "templates": templates,
        **({"onExit": _RELEASE_RAY} if passing else {}),  # however it has ended
    }
    if plan.deploy.pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in plan.deploy.pull_secrets]
    return spec


def _train(plan: DeployPlan) -> Object:
    """The gate's retries are tries of the step: each learns one epoch more, from the checkpoint of the one before. Argo
    has one limit for all tries, so that of refusals and that of crashes are added up."""
    most = plan.config.gate.extra_epochs
    epochs = f"{{{{=sprig.int(retries) < {most} ? sprig.int(retries) : {most}}}}}"
    return _step(
        plan,
        "train",
        ["clickline", "train", "--set", f"gate.extra_epochs={epochs}"],
        tries=most + plan.deploy.workflow.retries,
        final=tuple(code for code in FINAL_CODES if code != _GATE_EXIT_CODE),
    )


def _step(
    plan: DeployPlan,
    name: str,
    command: list[str],
    *,
    ray: bool = True,
    calls_predictors: bool = False,
    tries: int | None = None,
    final: tuple[int, ...] = FINAL_CODES,
) -> Object:
    spec = driver(plan, command, ray=ray, calls_predictors=calls_predictors)["spec"]
    container = {key: value for key, value in spec["containers"][0].items() if key != "name"}
    taken = (
        "initContainers",
        "volumes",
        "securityContext",
        "nodeSelector",
        "tolerations",
        "priorityClassName",
    )
    limit = plan.deploy.workflow.retries if tries is None else tries
    never = ", ".join(f"'{code}'" for code in final)
    return {
        "name": name,
        "metadata": {"labels": {**plan.labels("pipeline"), "clickline/stage": name}},
        "automountServiceAccountToken": True,  # of Argo's container; `rules` says what it opens
        **{key: spec[key] for key in taken if key in spec},
        "container": container,
        "podSpecPatch": json.dumps(_PATCH),
        "retryStrategy": {
            "limit": str(limit),
            "retryPolicy": "Always",  # also when the pod was taken away
            "expression": f"!(lastRetry.exitCode in [{never}])",
            "backoff": {"duration": "10s", "factor": "2", "maxDuration": "1h"},
        },
    }


def _train_by_operator(plan: DeployPlan) -> Object:
    """An object of each try has a name of its own, and goes with the workflow."""
    make, success, failure = _BY_OPERATOR[plan.deploy.training.kind]
    made = make(plan, ["clickline", "train"])
    metadata = made["metadata"]
    named = {"generateName": f"{plan.object_name('train')}-"}
    made["metadata"] = named | {key: value for key, value in metadata.items() if key != "name"}
    return {
        "name": "train",
        "metadata": {"labels": {**plan.labels("pipeline"), "clickline/stage": "train"}},
        "automountServiceAccountToken": True,
        "resource": {
            "action": "create",
            "setOwnerReference": True,
            "successCondition": success,
            "failureCondition": failure,
            "manifest": to_yaml([made]),
        },
    }
