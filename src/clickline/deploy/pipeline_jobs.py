"""What runs the pipeline without an operator: a Job, a CronJob, or a trainer that runs continuously."""

from __future__ import annotations

from clickline.deploy.objects import DeployPlan, Object
from clickline.deploy.ray_lifecycle import api_token_volume, scaler_container
from clickline.deploy.ray_pods import driver, driver_command, ray_is_temporary, uses_operator

FINAL_CODES = (2, 3, 4)
"""Exit codes that a retry would not change: bad config, failed gate, bad data."""

_STARTING_DEADLINE = 3600  # how late a run may start; later ones are skipped


def pipeline_objects(plan: DeployPlan) -> list[Object]:
    """A Job, a CronJob or the trainer; empty if Argo, Volcano or KubeRay runs the stages."""
    if plan.deploy.workflow.follow:
        return [_trainer(plan)]
    if plan.deploy.workflow.kind == "argo" or uses_operator(plan.config):
        return []
    schedule = plan.deploy.workflow.schedule
    return [_job(plan) if schedule is None else _cron_job(plan, schedule)]


def _job(plan: DeployPlan) -> Object:
    return plan.object("batch/v1", "Job", plan.object_name("pipeline"), "pipeline", {"spec": _job_spec(plan)})


def _cron_job(plan: DeployPlan, schedule: str) -> Object:
    spec = {
        "schedule": schedule,
        "concurrencyPolicy": "Forbid",  # only one run at a time may train into a home
        "startingDeadlineSeconds": _STARTING_DEADLINE,
        "successfulJobsHistoryLimit": 3,
        "failedJobsHistoryLimit": 3,
        "jobTemplate": {
            "metadata": {"labels": plan.labels("pipeline")},
            "spec": _job_spec(plan),
        },
    }
    return plan.object("batch/v1", "CronJob", plan.object_name("pipeline"), "pipeline", {"spec": spec})


def _job_spec(plan: DeployPlan) -> Object:
    """A crashed run is retried and resumes; an evicted pod does not count as a crash."""
    return {
        "backoffLimit": plan.deploy.workflow.retries,
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {
                        "containerName": "pipeline",
                        "operator": "In",
                        "values": list(FINAL_CODES),
                    },
                },
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        # A terminating pod still holds the lock of `home`: its replacement starts once it is gone.
        "podReplacementPolicy": "Failed",
        "template": _with_ray(plan, driver(plan, driver_command(plan), restart="Never")),
    }


def _with_ray(plan: DeployPlan, template: Object) -> Object:
    """Add the sidecar that scales Ray up for as long as the pod runs."""
    if ray_is_temporary(plan):
        template["spec"]["initContainers"].insert(0, scaler_container(plan))
        template["spec"]["volumes"].append(api_token_volume())
    return template


def _trainer(plan: DeployPlan) -> Object:
    spec = {
        "replicas": 1,
        "strategy": {"type": "Recreate"},  # one trainer at a time: it holds the lock of `home`
        "selector": {"matchLabels": plan.selector("trainer")},
        "template": driver(plan, driver_command(plan)),
    }
    return plan.object("apps/v1", "Deployment", plan.object_name("trainer"), "trainer", {"spec": spec})
