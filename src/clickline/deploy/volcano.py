"""Ray and the driver as one Volcano Job: nothing starts before head, driver and enough workers have their places.

Gang scheduling is for the beginning. Later each pod comes back alone: one that is evicted is made anew by the
controller, which needs no policy for it; one that failed is restarted by RestartPod.
"""

from __future__ import annotations

from clickline.deploy.objects import DeployPlan, Object
from clickline.deploy.pipeline_jobs import FINAL_CODES
from clickline.deploy.ray_pods import (
    driver,
    driver_command,
    head,
    head_address,
    ray_service,
    uses_operator,
    worker,
    worker_range,
)

_RESTART_POD: Object = {"event": "PodFailed", "action": "RestartPod"}
_DRIVER_POLICIES: list[Object] = [
    {"event": "TaskCompleted", "action": "CompleteJob"},
    # The first that fits counts, so exit codes stand before the event that every failure is.
    *({"exitCode": code, "action": "TerminateJob"} for code in FINAL_CODES),
    _RESTART_POD,
]


def volcano_job(plan: DeployPlan) -> list[Object]:
    """The Job and the head's name; nothing where another kind runs training."""
    if not uses_operator(plan.config) or plan.deploy.training.kind != "volcano":
        return []
    return [ray_service(plan), volcano_job_for(plan, driver_command(plan))]


def volcano_job_for(plan: DeployPlan, command: list[str]) -> Object:
    """A Job whose driver runs `command`."""
    least, most = worker_range(plan.config)
    # `ray start` is started anew in its pod. The driver's exit code decides what becomes of the Job, so its pod fails.
    again = "OnFailure"
    host, _, _ = head_address(plan.config).rpartition(":")
    named, _, subdomain = host.partition(".")
    head_pod = head(plan, restart=again)
    head_pod["spec"] |= {"hostname": named, "subdomain": subdomain}
    driver_pod = driver(plan, command, restart="Never")
    spec: Object = {
        "schedulerName": "volcano",
        "minAvailable": 2 + least,
        # It counts the restarts of all pods together, and fails the Job with the last one instead of restarting.
        "maxRetry": plan.deploy.workflow.retries + 1,
        "tasks": [
            _task("head", 1, 1, head_pod, [_RESTART_POD]),
            _task("worker", most, least, worker(plan, restart=again), [_RESTART_POD]),
            _task("driver", 1, 1, driver_pod, _DRIVER_POLICIES),
        ],
    }
    if plan.deploy.training.queue is not None:
        spec["queue"] = plan.deploy.training.queue
    if plan.deploy.nodes.priority_class is not None:
        spec["priorityClassName"] = plan.deploy.nodes.priority_class
    return plan.object(
        "batch.volcano.sh/v1alpha1", "Job", plan.object_name("pipeline"), "pipeline", {"spec": spec}
    )


def _task(name: str, replicas: int, least: int, template: Object, policies: list[Object]) -> Object:
    template["spec"]["schedulerName"] = "volcano"
    return {
        "name": name,
        "replicas": replicas,
        "minAvailable": least,
        "policies": policies,
        "template": template,
    }
