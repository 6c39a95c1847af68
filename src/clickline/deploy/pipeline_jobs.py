"""What runs the pipeline without an operator: a Job, a CronJob, or a trainer that runs continuously."""

from __future__ import annotations

from clickline.deploy.objects import DeployPlan, Object
from clickline.deploy.ray_lifecycle import api_token_volume, scaler_container
from clickline.deploy.ray_pods import driver, driver_command, ray_is_temporary

FINAL_CODES = (2, 3, 4)
"""Exit codes that a retry would not change: bad config, failed gate, bad data."""

SCHEDULE_POLICY = {
    "concurrencyPolicy": "Forbid",  # only one run at a time may train into a home
    "startingDeadlineSeconds": 3600,  # how late a run may start; later ones are skipped
    "successfulJobsHistoryLimit": 3,
    "failedJobsHistoryLimit": 3,
}


def pipeline_objects(plan: DeployPlan) -> list[Object]:
    """A Job, a CronJob or the trainer."""
    if plan.deploy.workflow.follow:
        once = {"type": "Recreate"}  # one trainer at a time: it holds the lock of `home`
        template = driver(plan, driver_command(plan))
        return [plan.workload("Deployment", "trainer", template, replicas=1, strategy=once)]
    schedule = plan.deploy.workflow.schedule
    if schedule is None:
        return [plan.object("batch/v1", "Job", "pipeline", spec=_job_spec(plan))]
    spec = {
        "schedule": schedule,
        **SCHEDULE_POLICY,
        "jobTemplate": {"metadata": {"labels": plan.labels("pipeline")}, "spec": _job_spec(plan)},
    }
    return [plan.object("batch/v1", "CronJob", "pipeline", spec=spec)]


def _job_spec(plan: DeployPlan) -> Object:
    """A crashed run is retried and resumes; an evicted pod does not count as a crash."""
    template = driver(plan, driver_command(plan), restart="Never")
    if ray_is_temporary(plan):  # a sidecar scales Ray up for as long as the pod runs
        template["spec"]["initContainers"].insert(0, scaler_container(plan))
        template["spec"]["volumes"].append(api_token_volume())
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
        "template": template,
    }
