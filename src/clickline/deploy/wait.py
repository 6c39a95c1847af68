"""Waits for an applied deployment: until the pipeline has finished and the rollout is complete."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from clickline.config import Config
from clickline.deploy.deploy_status import (
    EXIT_CODES,
    SCHEDULED,
    created,
    fetch_status,
    is_over,
    own_workloads,
    summarize,
    workload_state,
)
from clickline.deploy.kube_client import ApiError, Kube
from clickline.deploy.objects import Object, describe, label
from clickline.deploy.pipeline_jobs import FINAL_CODES
from clickline.deploy.pod_logs import last_lines
from clickline.deploy.rollout_wait import read_published_version
from clickline.errors import ClusterError
from clickline.progress import Progress, SlowTask

_POLL_SECONDS = 2.0
_STUCK_SECONDS = 60.0
"""How long a pod may be in a failed state, such as an image that cannot be pulled, before the wait gives up."""
_LOG_LINES = 30
_MAX_FAILED_POLLS = 5  # consecutive
_ROLLOUT_ROLES = ("predictor", "lookup", "trainer", "tracking")
_TRAINING_ROLES = ("pipeline", "trainer")
_LOGGED_CONTAINERS = (*_TRAINING_ROLES, "main")
"""Containers whose log is the pipeline's; in Argo's steps they are called main."""


@dataclass(frozen=True)
class WaitResult:
    """The state of a rollout. `code` is the pipeline's exit code if it is one of Clickline's own."""

    state: str
    """done, waiting, stuck or failed."""
    message: str
    code: int = 1


def await_deployed(
    kube: Kube,
    config: Config,
    *,
    seconds: float,
    progress: Progress,
    stuck_seconds: float = _STUCK_SECONDS,
) -> WaitResult:
    """Wait until all of it is done or failed, or the time is up (state `waiting`). Forwards the pipeline's log."""
    begun = time.monotonic()
    stuck_since: float | None = None
    log, lost = _LogForwarder(kube, config.deploy.namespace, progress), 0
    with SlowTask(progress, f"waiting for {config.name}") as slow:
        while True:
            try:
                found = fetch_status(kube, config)
                log.read([one for one in found["objects"] if one["kind"] == "Pod"])
                lost = 0
            except ClusterError as error:
                lost += 1
                if lost >= _MAX_FAILED_POLLS or (isinstance(error, ApiError) and error.status in (401, 403)):
                    raise
                progress.log(f"{error} Trying again.")
            else:
                outcome = rollout_state(found)
                stuck_since = None if outcome.state != "stuck" else stuck_since or time.monotonic()
                if outcome.state in ("done", "failed"):
                    return outcome
                if stuck_since is not None and time.monotonic() - stuck_since >= stuck_seconds:
                    return WaitResult("failed", outcome.message)
                slow.tick(outcome.message)
                if time.monotonic() - begun >= seconds:
                    return WaitResult("waiting", outcome.message)
            time.sleep(_POLL_SECONDS)


# ── state ──────────────────────────────────────────────────────────────────────────────────────


def rollout_state(found: Mapping[str, Any]) -> WaitResult:
    """The state of the rollout, from what `fetch_status` returned."""
    summary = summarize(found)
    objects: Sequence[Object] = found["objects"]
    workloads = own_workloads(objects)
    once = [
        one for one in workloads if label(one, "component") == "pipeline" and one["kind"] not in SCHEDULED
    ]
    for run in once:
        state, why = workload_state(run)
        if state == "failed":
            return _failure(run, why, objects, summary)
    under_way = [words for run in once if (words := _run_progress(run))]
    timed = next((one for one in workloads if one["kind"] in SCHEDULED), None)
    unserved = timed is not None and not summary["versions"]
    rolling = [words for one in workloads if (words := _rollout_progress(one, any_version=not unserved))]
    stuck = [
        f"{role['role']}: {role['why']}"
        for role in summary["roles"]
        if role["state"] == "failed"
        and role["role"] in (*_TRAINING_ROLES, *_ROLLOUT_ROLES)
        and not _is_scheduled(role)
    ]
    if stuck:
        return WaitResult("stuck", "; ".join(stuck))
    if once and not under_way:
        rolling += _outdated(objects, summary)
    if under_way or rolling:
        return WaitResult("waiting", "; ".join([*under_way, *rolling]))
    return WaitResult("done", _success_message(once, timed, summary, unserved=unserved))


def _run_progress(run: Object) -> str:
    state, why = workload_state(run)
    return "" if state == "done" else f"pipeline {state}" + (f" ({why})" if why else "")


def _is_scheduled(role: Mapping[str, Any]) -> bool:
    """Whether a role is run on a schedule: an earlier run that failed is not part of this rollout."""
    return any(one["object"].split()[0] in SCHEDULED for one in role["workloads"])


def _rollout_progress(workload: Object, *, any_version: bool) -> str:
    """What a rollout still lacks, as in `kubectl rollout status`. Without any version predictors run but are not ready,
    and there is nothing to wait for."""
    role = label(workload, "component") or ""
    if role not in _ROLLOUT_ROLES:
        return ""
    if workload["apiVersion"] != "apps/v1":
        state, why = workload_state(workload)
        return (
            "" if state == "running" or not any_version else f"{role} {state}" + (f" ({why})" if why else "")
        )
    status, desired = workload.get("status") or {}, (workload.get("spec") or {}).get("replicas", 1)
    if status.get("observedGeneration", 0) < workload["metadata"].get("generation", 0):
        return f"{role}: not picked up by its controller yet"
    updated, ready = status.get("updatedReplicas", 0), status.get("readyReplicas", 0)
    if updated < desired:
        return f"{role}: {updated} of {desired} updated"
    if (old := status.get("replicas", updated) - updated) > 0:
        return f"{role}: {old} old {'pod is' if old == 1 else 'pods are'} terminating"
    serves = role in ("predictor", "lookup")
    if ready < desired and (any_version or not serves):
        return f"{role}: {ready} of {desired} ready"
    return ""


def _outdated(objects: Sequence[Object], summary: Mapping[str, Any]) -> list[str]:
    """Outdated versions that predictors still serve; each loads the new one when it next polls the registry."""
    published, served = _published(_pipeline_pods(objects)), summary["versions"]
    if len(served) < 2 and (published is None or served in ([], [published])):
        return []
    wanted = "" if published is None else f"; version {published} is published"
    return [f"predictor: version {' and '.join(map(str, served))} served{wanted}"]


def _pipeline_pods(objects: Sequence[Object]) -> list[Object]:
    """The pods of the pipeline, the newest first."""
    pods = [one for one in objects if one["kind"] == "Pod" and label(one, "component") == "pipeline"]
    return sorted(pods, key=created, reverse=True)


def _terminations(pod: Object) -> list[Object]:
    """How the containers of a pod ended; an empty one for each that has not."""
    containers = (pod.get("status") or {}).get("containerStatuses") or ()
    return [(one.get("state") or {}).get("terminated") or {} for one in containers]


def _published(pods: Sequence[Object]) -> int | None:
    """The version that was current when the pipeline finished, if its pod still exists and recorded it."""
    ended = [one for pod in pods for one in _terminations(pod) if one.get("exitCode") == 0]
    versions = (read_published_version(one.get("message") or "") for one in ended)
    return next((version for version in versions if version is not None), None)


def _failure(run: Object, why: str, objects: Sequence[Object], summary: Mapping[str, Any]) -> WaitResult:
    """Why the pipeline failed, by the exit code of its last pod."""
    codes = [one.get("exitCode") for pod in _pipeline_pods(objects)[:1] for one in _terminations(pod)]
    code = next((one for one in codes if one in FINAL_CODES), 1)
    reason = next((role["why"] for role in summary["roles"] if role["role"] == "pipeline"), "") or why
    meaning = f": {EXIT_CODES[code]}" if code in FINAL_CODES else ""
    message = f"the pipeline failed{meaning} ({describe(run)}: {reason})"
    return WaitResult("failed", message, code)


def _success_message(
    once: Sequence[Object], timed: Object | None, summary: Mapping[str, Any], *, unserved: bool
) -> str:
    parts = ["the pipeline has finished"] if once else []
    if timed is not None:
        parts.append(f"the pipeline runs {workload_state(timed)[1]}")
    versions = ", ".join(map(str, summary["versions"]))
    ready = next((role["ready"] for role in summary["roles"] if role["role"] == "predictor"), 0)
    if versions:
        parts.append(
            f"{ready} predictor{'s' if ready != 1 else ''} serve{'s' if ready == 1 else ''} version {versions}"
        )
    elif unserved:
        parts.append("predictors become ready with its first version")
    else:
        parts.append("the rollout is complete")
    return "; ".join(parts)


# ── log ────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class _LogForwarder:
    """Forwards the log of the training pods, each line once."""

    kube: Kube
    namespace: str
    progress: Progress
    seen: dict[tuple[str, str], set[tuple[str, str]]] = field(default_factory=dict)
    finished: set[str] | None = None
    """Pods that had finished before the first poll: their logs are old."""
    denied: bool = False

    def read(self, pods: Sequence[Object]) -> None:
        if self.finished is None:
            self.finished = {one["metadata"]["name"] for one in pods if is_over(one)}
        if self.denied:
            return
        training = [
            one
            for one in pods
            if label(one, "component") in _TRAINING_ROLES and one["metadata"]["name"] not in self.finished
        ]
        try:
            lines = last_lines(self.kube, training, namespace=self.namespace, lines=_LOG_LINES)
        except ApiError as refused:
            if refused.status != 403:
                raise
            self.denied = True
            self.progress.log(f"the pipeline's log is not shown: {refused}")
            return
        now: dict[tuple[str, str], set[tuple[str, str]]] = {}
        for line in lines:
            source = (line.pod, line.container)
            now.setdefault(source, set()).add((line.at, line.text))
            if line.container in _LOGGED_CONTAINERS and (line.at, line.text) not in self.seen.get(source, ()):
                self.progress.log(f"{line.pod} {line.text}")
        self.seen |= now
