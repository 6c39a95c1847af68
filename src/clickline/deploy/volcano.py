"""Ray and the driver as one Volcano Job: nothing starts before head, driver and enough workers can be scheduled.

Gang scheduling applies to the start. Later each pod is replaced on its own: the controller recreates an evicted one
without a policy; RestartPod restarts a failed one.
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
    worker,
    worker_range,
)

_RESTART_POD: Object = {"event": "PodFailed", "action": "RestartPod"}
_DRIVER_POLICIES: list[Object] = [
    {"event": "TaskCompleted", "action": "CompleteJob"},
    # The first match counts, so exit codes come before the event of every failure.
    *({"exitCode": code, "action": "TerminateJob"} for code in FINAL_CODES),
    _RESTART_POD,
]


def volcano_job(plan: DeployPlan) -> list[Object]:
    """The Job and the head's Service."""
    return [ray_service(plan), volcano_job_for(plan, driver_command(plan))]


def volcano_job_for(plan: DeployPlan, command: list[str]) -> Object:
    """A Job whose driver runs `command`."""
    least, most = worker_range(plan.config)
    # `ray start` is restarted in its pod. The driver's exit code decides about the Job, so its pod must fail.
    again = "OnFailure"
    host, _, _ = head_address(plan.config).rpartition(":")
    named, _, subdomain = host.partition(".")
    head_pod = head(plan, restart=again)
    head_pod["spec"] |= {"hostname": named, "subdomain": subdomain}
    driver_pod = driver(plan, command, restart="Never")
    spec: Object = {
        "schedulerName": "volcano",
        "minAvailable": 2 + least,
        # Counts the restarts of all pods together; the last one fails the Job instead of restarting.
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
    return plan.object("batch.volcano.sh/v1alpha1", "Job", "pipeline", spec=spec)


def _task(name: str, replicas: int, least: int, template: Object, policies: list[Object]) -> Object:
    template["spec"]["schedulerName"] = "volcano"
    return {
        "name": name,
        "replicas": replicas,
        "minAvailable": least,
        "policies": policies,
        "template": template,
    }
