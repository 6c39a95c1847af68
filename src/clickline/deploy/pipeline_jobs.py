"""What runs the pipeline when no operator does: a Job, a CronJob, or a learner that never ends."""

from __future__ import annotations

from clickline.deploy.objects import Object, Plan
from clickline.deploy.ray_lifecycle import holder_container, holder_volume
from clickline.deploy.ray_pods import by_operator, comes_and_goes, driver, driver_command

FINAL_CODES = (2, 3, 4)
"""Exit codes that another try would end with too: a bad config, a refused model, bad data."""

_LATE_SECONDS = 3600  # that a run may begin after its time; older ones are left out


def pipeline(plan: Plan) -> list[Object]:
    """A Job or CronJob, or the learner; nothing where Argo, Volcano or KubeRay runs the stages."""
    if plan.deploy.workflow.follow:
        return [_learner(plan)]
    if plan.deploy.workflow.kind == "argo" or by_operator(plan.config):
        return []
    schedule = plan.deploy.workflow.schedule
    return [_job(plan) if schedule is None else _cron_job(plan, schedule)]


def _job(plan: Plan) -> Object:
    return plan.object("batch/v1", "Job", plan.called("pipeline"), "pipeline", {"spec": _job_spec(plan)})


def _cron_job(plan: Plan, schedule: str) -> Object:
    spec = {
        "schedule": schedule,
        "concurrencyPolicy": "Forbid",  # one run at a time learns into a home
        "startingDeadlineSeconds": _LATE_SECONDS,
        "successfulJobsHistoryLimit": 3,
        "failedJobsHistoryLimit": 3,
        "jobTemplate": {
            "metadata": {"labels": plan.labels("pipeline")},
            "spec": _job_spec(plan),
        },
    }
    return plan.object("batch/v1", "CronJob", plan.called("pipeline"), "pipeline", {"spec": spec})


def _job_spec(plan: Plan) -> Object:
    """A crash begins again where it was; a pod that the cluster took away does not count as one."""
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
        # A pod that is going still holds the lock of `home`: its successor waits until it is gone.
        "podReplacementPolicy": "Failed",
        "template": _held(plan, driver(plan, driver_command(plan), restart="Never")),
    }


def _held(plan: Plan, template: Object) -> Object:
    """With Ray beside it, for as long as it runs."""
    if comes_and_goes(plan):
        template["spec"]["initContainers"].insert(0, holder_container(plan))
        template["spec"]["volumes"].append(holder_volume())
    return template


def _learner(plan: Plan) -> Object:
    spec = {
        "replicas": 1,
        "strategy": {"type": "Recreate"},  # one learner at a time: it holds the lock of `home`
        "selector": {"matchLabels": plan.selector("learner")},
        "template": driver(plan, driver_command(plan)),
    }
    return plan.object("apps/v1", "Deployment", plan.called("learner"), "learner", {"spec": spec})
