"""The status of a deployment: fetched from the cluster, then summarized per role by a pure function."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from clickline.config import Config
from clickline.deploy.kube_client import ApiError, Kube, if_allowed
from clickline.deploy.objects import Object, describe, instance_labels, label
from clickline.deploy.retained_volumes import reserved_claim
from clickline.errors import ClusterError

WORKLOADS: tuple[tuple[str, str], ...] = (
    ("apps/v1", "Deployment"),
    ("apps/v1", "StatefulSet"),
    ("serving.knative.dev/v1", "Service"),
    ("batch/v1", "CronJob"),
    ("batch/v1", "Job"),
    ("batch.volcano.sh/v1alpha1", "Job"),
    ("ray.io/v1", "RayJob"),
    ("argoproj.io/v1alpha1", "CronWorkflow"),
    ("argoproj.io/v1alpha1", "Workflow"),
)
_OTHER_KINDS = (
    ("v1", "Pod"),
    ("v1", "Service"),
    ("v1", "PersistentVolumeClaim"),
    ("autoscaling/v2", "HorizontalPodAutoscaler"),
)
_MAX_QUERIED_PODS = 20  # per role, for their version
_MAX_ERRORS = 10
_SERVING = ("predictor", "lookup")
_STATE_ORDER = ("failed", "waiting", "running", "scheduled", "done")
"""States, most important first: the first that a role has is the state of the deployment."""
_SCALER = "HorizontalPodAutoscaler"
LONG_RUNNING = ("Deployment", "StatefulSet", "Service")
SCHEDULED = ("CronJob", "CronWorkflow")


def fetch_status(kube: Kube, config: Config) -> dict[str, Any]:
    """What the cluster knows about a deployment: the argument of `summarize`."""
    name, namespace = config.name, config.deploy.namespace
    notes: list[str] = []

    def listed(api_version: str, kind: str, note: str = "", **where: Any) -> list[Object]:
        found = if_allowed(kube.list, api_version, kind, **where)
        if isinstance(found, ApiError):
            notes.append(note or str(found))
            return []
        return found

    objects = [
        one
        for api_version, kind in (*WORKLOADS, *_OTHER_KINDS)
        for one in listed(api_version, kind, namespace=namespace, labels=instance_labels(name))
    ]
    if any(_is_service(one) and one["spec"].get("type") == "NodePort" for one in objects):
        objects += listed("v1", "Node", "node addresses are not shown: this user may not list nodes (403)")
    unlisted = "recent errors are not shown: this user may not list events (403)"
    events = [one for one in listed("v1", "Event", unlisted, namespace=namespace) if _is_relevant(one)]
    events, unmeasured = _without_metrics(kube, events, objects)
    return {
        "name": name,
        "namespace": namespace,
        "objects": objects,
        "events": events,
        "volumes": _volumes(kube, objects, notes),
        "served": _served_versions(kube, config, objects, notes),
        "notes": [*notes, *unmeasured],
    }


def _is_relevant(event: Object) -> bool:
    """Whether an event is a warning, or about a claim: the reasons why a claim is pending are normal events."""
    return event.get("type") == "Warning" or event["involvedObject"].get("kind") == "PersistentVolumeClaim"


def _without_metrics(
    kube: Kube, events: list[Object], objects: Sequence[Object]
) -> tuple[list[Object], list[str]]:
    """Without a metrics server an autoscaler warns twice a minute: replace those warnings by one note."""
    ours = {one["metadata"]["name"] for one in objects if one["kind"] == _SCALER}
    warnings = [one for one in events if one["involvedObject"].get("kind") == _SCALER]
    if not ours.intersection(one["involvedObject"].get("name") for one in warnings) or kube.versions(
        "metrics.k8s.io"
    ):
        return events, []
    note = (
        "predictors are not autoscaled: that needs a metrics server, and this cluster has none. "
        "Install one, or set deploy.serving.max_replicas: null"
    )
    return [one for one in events if one not in warnings], [note]


def _volumes(kube: Kube, objects: Sequence[Object], notes: list[str]) -> dict[str, str]:
    """For each volume that an unbound claim names, why it is not bound."""
    found: dict[str, str] = {}
    for claim in objects:
        name = claim["spec"].get("volumeName") if claim["kind"] == "PersistentVolumeClaim" else None
        if not name or _phase(claim) == "Bound":
            continue
        volume = if_allowed(kube.get, "v1", "PersistentVolume", name)
        held = None if not isinstance(volume, dict) else if_allowed(reserved_claim, kube, volume)
        if isinstance(volume, ApiError) or isinstance(held, ApiError):
            notes.append(
                f"why {describe(claim)} is pending is not shown in full: this user may not read its volume (403)"
            )
        elif volume is None:
            found[name] = f"volume {name} does not exist: `clickline deploy apply` creates it"
        elif held is not None and held.gone:
            found[name] = (
                f"volume {name} is still reserved for a deleted claim: `clickline deploy apply` releases it, "
                "and its files stay"
            )
        elif held is not None:
            found[name] = f"volume {name} is bound to {held}"
    return found


def unbound_claims(kube: Kube, claims: Sequence[Object]) -> list[tuple[str, str, str]]:
    """Name, phase and, if known, the reason of each claim that is not bound."""
    why = _volumes(kube, claims, [])
    return [
        (one["metadata"]["name"], _phase(one), why.get(one["spec"].get("volumeName", ""), ""))
        for one in claims
        if _phase(one) != "Bound"
    ]


def _served_versions(
    kube: Kube, config: Config, objects: Sequence[Object], notes: list[str]
) -> dict[str, dict[str, Any]]:
    """The version of each serving pod, or why it has none; queried through the API server, which reaches all pods."""
    served: dict[str, dict[str, Any]] = {}
    for role in _SERVING:
        pods = [one for one in objects if one["kind"] == "Pod" and label(one, "component") == role]
        running = [one for one in pods if one.get("status", {}).get("phase") == "Running"]
        for pod in running[:_MAX_QUERIED_PODS]:
            name = pod["metadata"]["name"]
            try:
                served[name] = _query_version(kube, config, name)
            except ApiError as refused:
                if refused.status == 403:
                    notes.append(
                        "versions are not shown: this user may not reach pods through the API server (403)"
                    )
                    return served
                unreached = "version unknown: the API server cannot reach the pod"
                served[name] = {"words": unreached if _ready(pod) else "not reachable yet"}
            except ClusterError as error:
                served[name] = {"words": f"did not answer: {error}"}
                break  # the others would take as long to fail
    return served


def _query_version(kube: Kube, config: Config, pod: str) -> dict[str, Any]:
    def get(path: str) -> tuple[int, str]:
        serve = config.serve
        return kube.proxy_get(
            config.deploy.namespace, pod, serve.metrics_port, path, tls=serve.tls is not None
        )

    status, text = get("/metrics")
    version = re.search(r"^clickline_(?:lookup_)?version (\d+)", text, re.MULTILINE)
    if status == 200 and version and int(version[1]):
        return {"version": int(version[1])}
    status, text = get("/readyz")
    version = re.search(r"^version (\d+)", text, re.MULTILINE)
    if status == 200 and version:  # /metrics needs a token, which the API server does not forward
        return {"version": int(version[1])}
    if status == 200:
        return {"words": "version unknown: it runs an older release that requires a token"}
    return {"words": text.strip().partition("\n")[0] if status == 503 else f"HTTP status {status}"}


# ── summary ────────────────────────────────────────────────────────────────────────────────────


def summarize(found: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON of `clickline deploy status`. `state`: absent, failed, waiting, running, scheduled or done."""
    name, objects = found["name"], found["objects"]
    pods = [one for one in objects if one["kind"] == "Pod"]
    claims = [
        _claim_status(one, found.get("volumes", {}), found["events"])
        for one in objects
        if one["kind"] == "PersistentVolumeClaim"
    ]
    workloads = own_workloads(objects)
    wanted: dict[str, int | None] = {}
    for one in workloads:
        for role, desired in desired_pods(one).items():
            before = wanted.get(role, 0)
            wanted[role] = None if desired is None or before is None else before + desired
    for pod in pods:
        wanted.setdefault(label(pod, "component") or "other", None)
    roles = [
        _role_status(
            role,
            desired,
            [one for one in workloads if role in desired_pods(one)],
            [one for one in pods if (label(one, "component") or "other") == role],
            found["served"],
            found["events"],
            {one["claim"]: one["why"] for one in claims if one["why"]},
        )
        for role, desired in wanted.items()
    ]
    states = [role["state"] for role in roles]
    return {
        "name": name,
        "namespace": found["namespace"],
        "state": next((state for state in _STATE_ORDER if state in states), "absent"),
        "roles": roles,
        "versions": next((role["versions"] for role in roles if role["role"] == "predictor"), []),
        "endpoints": _endpoints(objects),
        "claims": claims,
        "errors": _errors(found["events"], objects, roles, name),
        "notes": list(found["notes"]),
    }


def own_workloads(objects: Sequence[Object]) -> list[Object]:
    """The workloads, without those that controllers created for others."""
    return [one for one in objects if (one["apiVersion"], one["kind"]) in WORKLOADS and not _owned(one)]


def _owned(item: Object) -> bool:
    return bool(item["metadata"].get("ownerReferences"))


def _is_service(item: Object) -> bool:
    return (item["apiVersion"], item["kind"]) == ("v1", "Service")


def desired_pods(workload: Object) -> dict[str, int | None]:
    """The desired number of pods per role of a workload; None if it is not specified."""
    spec, kind = workload.get("spec") or {}, workload["kind"]
    own = label(workload, "component") or "other"
    if kind in ("Deployment", "StatefulSet"):
        return {own: spec.get("replicas", 1)}
    if workload["apiVersion"] == "batch.volcano.sh/v1alpha1":
        return _by_role(
            own, [(one.get("template"), one.get("replicas", 1)) for one in spec.get("tasks") or ()]
        )
    if kind == "RayJob":
        cluster = spec.get("rayClusterSpec") or {}
        groups = [(cluster.get("headGroupSpec", {}).get("template"), 1)]
        for group in cluster.get("workerGroupSpecs") or ():
            groups.append((group.get("template"), group.get("replicas", group.get("minReplicas", 0))))
        submitter = spec.get("submitterPodTemplate")
        return _by_role(own, [*groups, *([(submitter, 1)] if submitter else [])])
    if kind == "Job":
        return {own: spec.get("completions", spec.get("parallelism", 1))}
    return {own: None}


def _by_role(own: str, groups: Sequence[tuple[Object | None, int]]) -> dict[str, int | None]:
    found: dict[str, int | None] = {}
    for template, count in groups:
        labels = ((template or {}).get("metadata") or {}).get("labels") or {}
        role = labels.get("app.kubernetes.io/component", own)
        found[role] = (found.get(role) or 0) + count
    return {**found, own: found.get(own)}


def _role_status(
    role: str,
    desired: int | None,
    workloads: Sequence[Object],
    pods: Sequence[Object],
    served: Mapping[str, Mapping[str, Any]],
    events: Sequence[Object],
    claims: Mapping[str, str],
) -> dict[str, Any]:
    shown_pods = [pod_status(pod, role, served, events, claims) for pod in pods]
    ready = sum(_ready(pod) for pod in pods if not is_over(pod))
    states = [workload_state(one) for one in workloads]
    state, why = next((one for worst in _STATE_ORDER for one in states if one[0] == worst), ("waiting", ""))
    newest = max(pods, key=created, default=None)
    if state == "scheduled" and newest is not None and _phase(newest) == "Failed":
        state = "failed"  # the last run; the next one is scheduled
    if state not in ("done", "failed"):
        live = [one for one in shown_pods if one["alive"]]
        not_running = [one for one in live if one["state"] != "running"]
        failing = [one for one in not_running if one["state"] == "failed"]
        if not_running and (failing or ready < (desired or len(live))):
            worst = (failing or not_running)[0]
            state, why = worst["state"], worst["why"] or why
        elif not live and not workloads:
            state, why = ("done", "") if pods else ("waiting", "no pod yet")
        elif live and not not_running:
            restarted = next((one["why"] for one in live if one["why"]), "")
            state, why = ("running", restarted) if ready >= (desired or 0) else ("waiting", why)
        tried = _last_failure(workloads, pods, role)
        if tried:
            again = [words for _, words in states if words not in why]
            why = _joined(why, *again, f"last attempt: {tried}")
    elif state == "failed":
        ended = [pod for pod in pods if _phase(pod) == "Failed"]
        why = _joined(why, _pod_state(max(ended, key=created), role)[1] if ended else "")
    if state == "done":
        ready = desired or 0
    versions = sorted(
        {served[pod["pod"]]["version"] for pod in shown_pods if "version" in served.get(pod["pod"], {})}
    )
    return {
        "role": role,
        "ready": ready,
        "desired": desired,
        "restarts": sum(one["restarts"] for one in shown_pods),
        "state": state,
        "why": why,
        "versions": versions,
        "workloads": [
            {"object": describe(one), "state": its_state, "why": its_why}
            for one, (its_state, its_why) in zip(workloads, states, strict=True)
        ],
        "pods": shown_pods,
    }


def _last_failure(workloads: Sequence[Object], pods: Sequence[Object], role: str) -> str:
    """Why the last pod of a retried workload failed. Deployments and StatefulSets restart their pods and do not
    retry."""
    if all(one["kind"] in LONG_RUNNING for one in workloads):
        return ""
    run = _run_name(max(pods, key=created, default={}))
    failed = [pod for pod in pods if _phase(pod) == "Failed" and _run_name(pod) == run]
    return _pod_state(max(failed, key=created), role)[1] if failed else ""


_RUN_LABELS = ("batch.kubernetes.io/job-name", "workflows.argoproj.io/workflow")


def _run_name(pod: Object) -> str | None:
    """The Job or Workflow of a pod: a CronJob or CronWorkflow creates one per run."""
    labels = (pod.get("metadata") or {}).get("labels") or {}
    return next((str(labels[key]) for key in _RUN_LABELS if key in labels), None)


# ── workloads ──────────────────────────────────────────────────────────────────────────────────

_VOLCANO = {
    "Completed": "done",
    "Failed": "failed",
    "Aborted": "failed",
    "Terminated": "failed",
    "Running": "running",
}
_RAY_JOB = {"Complete": "done", "Failed": "failed", "Running": "running", "ValidationFailed": "failed"}
_ARGO = {"Succeeded": "done", "Failed": "failed", "Error": "failed", "Running": "running"}


def finished(workload: Object) -> bool:
    """Whether a workload that runs to completion has finished."""
    return workload_state(workload)[0] in ("done", "failed")


def workload_state(workload: Object) -> tuple[str, str]:
    """Its state (running, waiting, failed, scheduled or done) and the reason."""
    status = workload.get("status") or {}
    kind, api, conditions = workload["kind"], workload["apiVersion"], _conditions(workload)
    if kind in ("Deployment", "StatefulSet"):
        desired = (workload.get("spec") or {}).get("replicas", 1)
        refused = conditions.get("ReplicaFailure", {})
        if refused.get("status") == "True":
            return "failed", f"its pods are rejected: {refused.get('message', refused.get('reason', ''))}"
        if desired == 0 and (label(workload, "component") or "").startswith("ray-"):
            return "done", "Ray runs only while a pipeline does"
        if status.get("readyReplicas", 0) >= desired:
            return "running", ""
        return "waiting", f"{status.get('readyReplicas', 0)} of {desired} are ready"
    if api == "batch/v1" and kind == "Job":
        if conditions.get("Failed", {}).get("status") == "True":
            return "failed", _reason(conditions["Failed"])
        if conditions.get("Complete", {}).get("status") == "True":
            return "done", ""
        if (workload.get("spec") or {}).get("suspend"):
            return "waiting", "it is suspended"
        again = f"failed {_times(status['failed'])}, retrying" if status.get("failed") else ""
        return ("running" if status.get("active") else "waiting"), again
    if kind in SCHEDULED:
        if status.get("active"):
            return "running", ""
        spec = workload["spec"]
        last = status.get("lastScheduleTime") or status.get("lastScheduledTime")
        ran = f"last run {last}" if last else "no run yet"
        return "scheduled", f"at {', '.join(spec.get('schedules') or [spec.get('schedule', '')])}, {ran}"
    if api == "batch.volcano.sh/v1alpha1":
        state = status.get("state") or {}
        phase, message = state.get("phase", ""), state.get("message") or state.get("reason") or ""
        least = (workload.get("spec") or {}).get("minAvailable")
        gang = f"Volcano starts it once {least} pods fit at the same time"
        return _VOLCANO.get(phase, "waiting"), _joined(
            message, gang if phase in ("", "Pending", "Inqueue") else ""
        )
    if kind == "RayJob":
        phase, message = status.get("jobDeploymentStatus", ""), status.get("message") or status.get("reason")
        if phase == "Complete" and status.get("jobStatus") in ("FAILED", "STOPPED"):
            return "failed", _joined(status["jobStatus"], message, separator=": ")
        words = f"KubeRay: {phase or 'not picked up by the operator yet'}"
        return _RAY_JOB.get(phase, "waiting"), _joined(
            "" if phase in ("Running", "Complete") else words, message
        )
    if kind == "Workflow":
        phase = status.get("phase", "")
        words = status.get("message") or ("" if phase else "not picked up by Argo's controller yet")
        return _ARGO.get(phase, "waiting"), str(words)
    ready = conditions.get("Ready", {})  # Knative
    if ready.get("status") == "True":
        return "running", ""
    state = "failed" if ready.get("status") == "False" else "waiting"
    return state, _reason(ready) or "not picked up by Knative yet"


def _reason(status: Object) -> str:
    """The reason and the message of a condition, a status or an event."""
    return _joined(status.get("reason"), status.get("message"), separator=": ")


def _joined(*parts: str | None, separator: str = "; ") -> str:
    return separator.join(part for part in parts if part)


# ── pods ───────────────────────────────────────────────────────────────────────────────────────

_WAITING_REASONS = {
    "ImagePullBackOff": "the image cannot be pulled: check deploy.image, deploy.pull and deploy.pull_secrets",
    "ErrImagePull": "the image cannot be pulled: check deploy.image, deploy.pull and deploy.pull_secrets",
    "ErrImageNeverPull": "the image is not on the node, and deploy.pull is Never: load it there",
    "InvalidImageName": "deploy.image is not the name of an image",
    "CreateContainerConfigError": "a secret or config that it needs is missing",
    "CreateContainerError": "the node could not create the container",
    "RunContainerError": "the node could not start the container",
}
EXIT_CODES = {
    1: "failed, see its log",
    2: "bad config",
    3: "the model failed the gate",
    4: "bad data",
    130: "interrupted",
}
_FAILED = 1
_SIGNALS = {
    134: "crashed (SIGABRT)",
    137: "killed (SIGKILL)",
    139: "crashed (SIGSEGV)",
    143: "terminated (SIGTERM)",
}


def explain_exit(code: int, reason: str | None, role: str, container: str, message: str = "") -> str:
    """What an exit code means, and the container's last message. Codes 2 to 4 have a meaning only for Clickline's own
    processes, not for Ray's."""
    if reason == "OOMKilled":
        section = "pipeline" if role == "trainer" else "lookup" if role == "data" else role.replace("-", "_")
        return f"OOMKilled: out of memory, raise deploy.resources.{section}.memory_limit"
    meaning = _SIGNALS.get(code)
    if meaning is None and (container == "ready" or not role.startswith("ray-")):
        meaning = EXIT_CODES.get(code)
    said = _last_line(message)
    if said and code == _FAILED:
        meaning = said  # better than a pointer to the log
    elif said:
        meaning = f"{meaning} ({said})" if meaning else said
    return f"exit code {code}" + (f": {meaning}" if meaning else "")


def _last_line(message: str) -> str:
    """The last line of a termination message, which is the end of the log. Servers log JSON, which is skipped."""
    lines = [line.strip() for line in message.splitlines()]
    return next((line for line in reversed(lines) if line and not line.startswith("{")), "")


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def created(pod: Object) -> str:
    return str(pod["metadata"].get("creationTimestamp", ""))


def is_over(pod: Object) -> bool:
    """Whether a pod has ended."""
    return _phase(pod) in ("Succeeded", "Failed")


def _phase(item: Object) -> str:
    """The phase of a pod or a claim."""
    return str((item.get("status") or {}).get("phase", "Pending"))


def _conditions(item: Object) -> dict[str, Object]:
    found = (item.get("status") or {}).get("conditions") or ()
    return {one["type"]: one for one in found if isinstance(one, dict) and "type" in one}


def _ready(pod: Object) -> bool:
    return bool(_conditions(pod).get("Ready", {}).get("status") == "True")


def containers(pod: Object) -> list[Object]:
    """The status of each container, the initial ones first."""
    status = pod.get("status") or {}
    return [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]


def pod_status(
    pod: Object,
    role: str,
    served: Mapping[str, Mapping[str, Any]],
    events: Sequence[Object],
    claims: Mapping[str, str],
) -> dict[str, Any]:
    """The status of one pod. `claims`: the reason of each pending claim."""
    name = pod["metadata"]["name"]
    answer = served.get(name, {})
    state, why = _pod_state(pod, role)
    if state == "waiting":
        why = why or _last_warning(name, events)
        mounted = [
            one.get("persistentVolumeClaim", {}) for one in (pod.get("spec") or {}).get("volumes") or ()
        ]
        waits = [
            f"claim {one['claimName']}: {claims[one['claimName']]}"
            for one in mounted
            if one.get("claimName") in claims
        ]
        why = _joined(why, *waits, answer.get("words"))
    return {
        "pod": name,
        "node": (pod.get("spec") or {}).get("nodeName"),
        "alive": not is_over(pod),
        "state": state,
        "why": why,
        "restarts": sum(one.get("restartCount", 0) for one in containers(pod)),
        "version": answer.get("version"),
        "words": answer.get("words"),
    }


def _pod_state(pod: Object, role: str) -> tuple[str, str]:
    status = pod.get("status") or {}
    phase = _phase(pod)
    if phase == "Succeeded":
        return "done", ""
    if phase == "Failed":
        return "failed", _failure(pod, role) or _reason(status)
    if pod["metadata"].get("deletionTimestamp"):
        return "waiting", "terminating"
    placed = _conditions(pod).get("PodScheduled", {})
    if placed.get("status") == "False":
        return "waiting", f"Pending: {placed.get('message') or placed.get('reason') or 'no node yet'}"
    for one in containers(pod):
        waiting = (one.get("state") or {}).get("waiting") or {}
        reason = waiting.get("reason", "")
        if reason == "CrashLoopBackOff":
            return "failed", f"CrashLoopBackOff in {one['name']}, last {_last_termination(one, role)}"
        if reason in _WAITING_REASONS:
            words = f" ({waiting['message']})" if waiting.get("message") else ""
            return "failed", f"{reason} in {one['name']}: {_WAITING_REASONS[reason]}{words}"
    restarted = [one for one in containers(pod) if one.get("restartCount")]
    if phase == "Running" and _ready(pod):
        return "running", "; ".join(
            f"restarted {_times(one['restartCount'])}, last {_last_termination(one, role)}"
            for one in restarted
            if (one.get("lastState") or {}).get("terminated")
        )
    ends = [f"last {_last_termination(one, role)}" for one in restarted if not one.get("ready")]
    return "waiting", ", ".join([*(["not ready"] if phase == "Running" else []), *ends])


def _last_termination(container: Object, role: str) -> str:
    state = container.get("state") or {}
    ended = (container.get("lastState") or {}).get("terminated") or state.get("terminated") or {}
    if not ended:
        return "exit unknown"
    return _explain_termination(ended, role, container)


def _failure(pod: Object, role: str) -> str:
    """Why a finished pod failed: its first failed container, except sidecars, which are terminated with the pod."""
    initial = (pod.get("spec") or {}).get("initContainers") or ()
    sidecars = {one["name"] for one in initial if one.get("restartPolicy") == "Always"}
    for one in containers(pod):
        if one["name"] in sidecars:
            continue
        ended = (one.get("state") or {}).get("terminated") or {}
        if ended.get("exitCode"):
            return f"{one['name']}: {_explain_termination(ended, role, one)}"
    return ""


def _explain_termination(ended: Object, role: str, container: Object) -> str:
    code, reason, said = ended.get("exitCode", 0), ended.get("reason"), ended.get("message") or ""
    return explain_exit(code, reason, role, container["name"], said)


def _last_warning(name: str, events: Sequence[Object]) -> str:
    """The last warning about an object."""
    about = [one for one in events if one["involvedObject"].get("name") == name]
    return _reason(max(about, key=_event_time)) if about else ""


# ── the rest ───────────────────────────────────────────────────────────────────────────────────


def _endpoints(objects: Sequence[Object]) -> list[dict[str, Any]]:
    nodes = [address for one in objects if one["kind"] == "Node" if (address := _address(one))]
    found = []
    for one in objects:
        role = label(one, "component")
        if one["kind"] == "Service" and one["apiVersion"] == "serving.knative.dev/v1":
            url = (one.get("status") or {}).get("url")
            found.append(
                {"role": role, "service": describe(one), "type": "Knative", "addresses": [url or "pending"]}
            )
        elif _is_service(one) and not _owned(one) and one["spec"].get("clusterIP") != "None":
            addresses = [
                text for port in one["spec"].get("ports") or () for text in _addresses(one, port, nodes)
            ]
            kind = one["spec"].get("type", "ClusterIP")
            found.append({"role": role, "service": describe(one), "type": kind, "addresses": addresses})
    return found


def _addresses(service: Object, port: Object, nodes: Sequence[str]) -> list[str]:
    kind = service["spec"].get("type", "ClusterIP")
    title = f"{port['name']} " if port.get("name") else ""
    if kind == "NodePort":
        number = port.get("nodePort")
        return [f"{title}{_host_port(node, number)}" for node in nodes] or [
            f"{title}any node's address, port {number}"
        ]
    if kind == "LoadBalancer":
        given = ((service.get("status") or {}).get("loadBalancer") or {}).get("ingress") or ()
        hosts = [_host_port(one.get("hostname") or one.get("ip"), port["port"]) for one in given]
        return [f"{title}{one}" for one in hosts] or [f"{title}pending"]
    metadata = service["metadata"]
    return [f"{title}{metadata['name']}.{metadata['namespace']}.svc:{port['port']}"]


def _host_port(host: str, port: int | None) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _address(node: Object) -> str | None:
    addresses = {one["type"]: one["address"] for one in (node.get("status") or {}).get("addresses") or ()}
    found = addresses.get("ExternalIP") or addresses.get("InternalIP") or addresses.get("Hostname")
    return None if found is None else str(found)


def _claim_status(claim: Object, volumes: Mapping[str, str], events: Sequence[Object]) -> dict[str, Any]:
    status = claim.get("status") or {}
    name, volume, state = claim["metadata"]["name"], claim["spec"].get("volumeName"), _phase(claim)
    why = ""
    if state == "Lost":
        why = f"its volume {volume} is gone"
    elif state != "Bound":
        why = volumes.get(volume or "") or _last_warning(name, events)
    return {
        "claim": name,
        "state": state,
        "why": why,
        "size": (status.get("capacity") or {}).get("storage"),
        "class": claim["spec"].get("storageClassName"),
    }


def _event_time(event: Object) -> str:
    series = event.get("series") or {}
    found = event.get("lastTimestamp") or series.get("lastObservedTime") or event.get("eventTime")
    return str(found or event["metadata"].get("creationTimestamp") or "")


def _errors(
    events: Sequence[Object], objects: Sequence[Object], roles: Sequence[Mapping[str, Any]], name: str
) -> list[dict[str, Any]]:
    """The last warnings about this deployment's unfinished objects, existing or deleted; repeated ones once."""
    there = {(one["kind"], one["metadata"]["name"]): one for one in objects}
    names = {key[1] for key in there}
    over = tuple(f"{name}-{role['role']}-" for role in roles if role["state"] == "done")
    well = (*over, *(f"{name}-{role['role']}-" for role in roles if role["state"] == "running"))
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for event in sorted(events, key=_event_time):
        about = event["involvedObject"]
        called = str(about.get("name", ""))
        if event.get("type") != "Warning" or (called not in names and not called.startswith(f"{name}-")):
            continue
        live = there.get((about.get("kind"), called))
        if called.startswith(well if live is None else over) or (
            live is not None and _is_resolved(live, event)
        ):
            continue
        key = (f"{about.get('kind')} {called}", str(event.get("reason", "")))
        found.pop(key, None)
        found[key] = {
            "at": _event_time(event),
            "object": key[0],
            "reason": key[1],
            "message": str(event.get("message", "")).strip(),
            "count": event.get("count") or (event.get("series") or {}).get("count") or 1,
        }
    return list(found.values())[-_MAX_ERRORS:]


def _is_resolved(item: Object, event: Object) -> bool:
    """Whether a warning is from before its object became healthy: a ready pod failed its probes while it started, a
    bound claim was pending, an active autoscaler had no metrics at first."""
    if item["kind"] == "PersistentVolumeClaim":
        return _phase(item) == "Bound"
    if (item["apiVersion"], item["kind"]) in WORKLOADS:
        return workload_state(item)[0] in ("running", "done")
    sign = {"Pod": "Ready", _SCALER: "ScalingActive"}.get(item["kind"], "")
    healthy = _conditions(item).get(sign, {})
    since = str(healthy.get("lastTransitionTime", ""))
    return bool(healthy.get("status") == "True") and _event_time(event) <= since
