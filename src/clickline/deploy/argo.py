"""The stages as steps of an Argo Workflow: prepare → train → publish → roll-out. Ray from core objects is scaled up
before them and down after them.

Each step is one of our pods; Argo adds containers of its own, which get the same security context here. Training by
Volcano or KubeRay is a step that creates their object and waits until it has finished; the object retries by itself.
"""

from __future__ import annotations

import json
from typing import Any

from clickline.deploy.kuberay import ray_job_for
from clickline.deploy.objects import DeployPlan, Object, to_yaml
from clickline.deploy.pipeline_jobs import FINAL_CODES, SCHEDULE_POLICY
from clickline.deploy.ray_lifecycle import scaler_command
from clickline.deploy.ray_pods import driver, ray_is_temporary, ray_service, uses_operator
from clickline.deploy.rollout_wait import rollout_service
from clickline.deploy.volcano import volcano_job_for

_API = "argoproj.io/v1alpha1"
_RAY, _RELEASE_RAY = "ray", "without-ray"
_GATE_EXIT_CODE = 3
# The root file system stays writable in these two: Argo's own defaults do not lock it (argo-workflows #10787).
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
    """The steps as a template, and a run of it: now, or on a schedule."""
    section = plan.deploy.workflow
    run: Object = {"workflowTemplateRef": {"name": plan.object_name("pipeline")}}
    if section.schedule is None:
        run_object = plan.object(_API, "Workflow", "pipeline", spec=run)
    else:
        times = {
            "schedules": [section.schedule],
            **SCHEDULE_POLICY,
            "workflowMetadata": {"labels": plan.labels("pipeline")},
            "workflowSpec": run,
        }
        run_object = plan.object(_API, "CronWorkflow", "pipeline", spec=times)
    template = plan.object(_API, "WorkflowTemplate", "pipeline", spec=_steps(plan))
    named = (
        [ray_service(plan)] if uses_operator(plan.config) and plan.deploy.training.kind == "volcano" else []
    )
    return [*named, rollout_service(plan), template, run_object]


def argo_rules(plan: DeployPlan) -> list[Object]:
    """The Role rules of the steps' pods: Argo's container reports how a step ended, and one step may create an
    operator's object."""
    if plan.deploy.workflow.kind != "argo" or plan.deploy.workflow.follow:
        return []
    needed = [("argoproj.io", "workflowtaskresults", ["create", "patch"])]
    if uses_operator(plan.config):
        kinds = {"volcano": ("batch.volcano.sh", "jobs"), "kuberay": ("ray.io", "rayjobs")}
        needed.append((*kinds[plan.deploy.training.kind], ["create", "get"]))
    return [{"apiGroups": [group], "resources": [kind], "verbs": verbs} for group, kind, verbs in needed]


def _steps(plan: DeployPlan) -> Object:
    stages = ["prepare", "train", "publish", "roll-out"]
    operated, temporary = uses_operator(plan.config), ray_is_temporary(plan)
    if temporary:
        stages.insert(0, _RAY)
    templates = [
        {"name": "pipeline", "steps": [[{"name": stage, "template": stage}] for stage in stages]},
        # Before an operator starts training there is no Ray: this pod prepares the logs alone.
        _step(
            plan, "prepare", ["clickline", "prepare", *(_WITHOUT_RAY if operated else [])], ray=not operated
        ),
        _train_by_operator(plan) if operated else _train(plan),
        _step(plan, "publish", ["clickline", "publish"], ray=False),
        _step(plan, "roll-out", ["clickline", "deploy", "await-rollout"], ray=False, calls_predictors=True),
    ]
    if temporary:
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
        **({"onExit": _RELEASE_RAY} if temporary else {}),  # however the workflow ended
    }
    if plan.deploy.pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in plan.deploy.pull_secrets]
    return spec


def _train(plan: DeployPlan) -> Object:
    """After a failed gate the step is retried with one more epoch, from the previous checkpoint. Argo has one limit for
    all retries, so those of the gate and those of crashes are added up."""
    most = plan.config.gate.extra_epochs
    epochs = f"{{{{=sprig.int(retries) < {most} ? sprig.int(retries) : {most}}}}}"
    return _step(
        plan,
        "train",
        ["clickline", "train", "--set", f"gate.extra_epochs={epochs}"],
        retries=most + plan.deploy.workflow.retries,
        final=tuple(code for code in FINAL_CODES if code != _GATE_EXIT_CODE),
    )


def _step(
    plan: DeployPlan,
    name: str,
    command: list[str],
    *,
    ray: bool = True,
    calls_predictors: bool = False,
    retries: int | None = None,
    final: tuple[int, ...] = FINAL_CODES,
) -> Object:
    spec = driver(plan, command, ray=ray, calls_predictors=calls_predictors)["spec"]
    container = {key: value for key, value in spec["containers"][0].items() if key != "name"}
    copied = (
        "initContainers",
        "volumes",
        "securityContext",
        "nodeSelector",
        "tolerations",
        "priorityClassName",
    )
    limit = plan.deploy.workflow.retries if retries is None else retries
    final_codes = ", ".join(f"'{code}'" for code in final)
    return {
        "name": name,
        "metadata": {"labels": {**plan.labels("pipeline"), "clickline/stage": name}},
        "automountServiceAccountToken": True,  # for Argo's container; see `argo_rules`
        **{key: spec[key] for key in copied if key in spec},
        "container": container,
        "podSpecPatch": json.dumps(_PATCH),
        "retryStrategy": {
            "limit": str(limit),
            "retryPolicy": "Always",  # also when the pod was evicted
            "expression": f"!(lastRetry.exitCode in [{final_codes}])",
            "backoff": {"duration": "10s", "factor": "2", "maxDuration": "1h"},
        },
    }


def _train_by_operator(plan: DeployPlan) -> Object:
    """Each attempt creates an object with a name of its own, which is deleted with the workflow."""
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
