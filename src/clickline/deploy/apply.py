"""Applies a deployment to a cluster, and deletes it.

Nothing is changed before everything has been checked: the APIs that are needed, what the objects refer to, and a
server-side dry run of each. What cannot be changed in place is reported with what to do about it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from clickline.config import Config
from clickline.deploy.deploy_status import SCHEDULED, finished, workload_state
from clickline.deploy.kube_client import ApiError, Kube, if_allowed
from clickline.deploy.objects import Object, describe, instance_labels, label
from clickline.deploy.prerequisites import (
    Conflict,
    MissingReferences,
    check_apis,
    check_namespace,
    check_owner,
    check_references,
    create_namespace,
)
from clickline.deploy.retained_volumes import is_stale_reservation, release_volume
from clickline.errors import ClusterError
from clickline.progress import Progress, SlowTask

KINDS: tuple[tuple[str, str], ...] = (
    ("v1", "Namespace"),
    ("v1", "ServiceAccount"),
    ("rbac.authorization.k8s.io/v1", "Role"),
    ("rbac.authorization.k8s.io/v1", "RoleBinding"),
    ("networking.k8s.io/v1", "NetworkPolicy"),
    ("v1", "ConfigMap"),
    ("v1", "PersistentVolume"),
    ("v1", "PersistentVolumeClaim"),
    ("v1", "Service"),
    ("policy/v1", "PodDisruptionBudget"),
    ("apps/v1", "StatefulSet"),
    ("apps/v1", "Deployment"),
    ("serving.knative.dev/v1", "Service"),
    ("autoscaling/v2", "HorizontalPodAutoscaler"),
    ("scheduling.volcano.sh/v1beta1", "PodGroup"),
    ("batch.volcano.sh/v1alpha1", "Job"),
    ("ray.io/v1", "RayCluster"),
    ("ray.io/v1", "RayJob"),
    ("argoproj.io/v1alpha1", "WorkflowTemplate"),
    ("argoproj.io/v1alpha1", "CronWorkflow"),
    ("argoproj.io/v1alpha1", "Workflow"),
    ("batch/v1", "CronJob"),
    ("batch/v1", "Job"),
    ("v1", "Pod"),
)
"""Every kind that a deployment may have, in the order of creation: access, configuration and storage, workloads."""

_DATA = ("PersistentVolume", "PersistentVolumeClaim")
_RUN_TO_COMPLETION = {
    ("batch/v1", "Job"),
    ("batch.volcano.sh/v1alpha1", "Job"),
    ("ray.io/v1", "RayJob"),
    ("argoproj.io/v1alpha1", "Workflow"),
}
"""Kinds that run to completion. A changed one is replaced: their controllers reject or ignore a change."""

_KNATIVE = ("serving.knative.dev/v1", "Service")

_DELETE_SECONDS = 120.0
_POLL_SECONDS = 0.5


@dataclass
class ApplyResult:
    """What an apply did. If something `failed`, the objects in `untried` were not reached."""

    created: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    """Objects that ran the pipeline in another way before."""
    pruned: list[str] = field(default_factory=list)
    left_over: list[str] = field(default_factory=list)
    """Objects of an earlier apply that are no longer part of the deployment."""
    failed: dict[str, str] = field(default_factory=dict)
    untried: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass
class LiveObjects:
    """The objects of a deployment on a cluster."""

    objects: list[Object]
    not_listed: list[str]
    """Kinds that could not be listed, and why."""


@dataclass
class DeleteResult:
    """What a delete did."""

    removed: list[str]
    kept: list[str]
    notes: list[str]


@dataclass(frozen=True)
class ObjectChange:
    """What an apply does to one object."""

    item: Object
    action: str
    """created, changed, replaced, unchanged or removed: a field of `ApplyResult`."""
    live: Object | None
    new: Object | None = None
    """The result of the server-side dry run; None if there was none, or the object is removed."""
    releases_volume: bool = False
    """The volume is still reserved for a claim that is gone."""


@dataclass(frozen=True)
class ChangeSet:
    """All changes that an apply would make."""

    steps: list[ObjectChange]
    """In the order of execution."""
    left_over: list[Object]
    """Objects of an earlier apply that are no longer part of the deployment, and harmless."""
    notes: list[str]

    def as_result(self) -> ApplyResult:
        """The result of an apply that makes these changes."""
        result = ApplyResult(left_over=[describe(item) for item in self.left_over], notes=self.notes)
        for step in self.steps:
            getattr(result, step.action).append(describe(step.item))
        return result


def plan_changes(kube: Kube, config: Config, objects: Sequence[Object], progress: Progress) -> ChangeSet:
    """Plan what `apply` would do. Raises `ClusterError` with everything that would prevent it."""
    ordered, namespace = sorted(objects, key=_rank), config.deploy.namespace
    notes: list[str] = []
    try:
        fresh = _check_prerequisites(kube, ordered, namespace, notes)
    except MissingReferences as missing:
        raise ClusterError(f"{missing}\n{_NOTHING_CHANGED}") from missing
    if fresh is None:
        proposal = _plan_all(kube, config, ordered, progress)
        return ChangeSet(proposal.steps, proposal.left_over, [*notes, *proposal.notes, *kube.warnings])
    notes.append(
        f"namespace {namespace} does not exist yet: its objects are checked by the server when they are applied"
    )
    return ChangeSet([ObjectChange(item, "created", None, item) for item in ordered], [], notes)


def apply(
    kube: Kube,
    config: Config,
    objects: Sequence[Object],
    *,
    prune: bool,
    progress: Progress,
    wait_seconds: float = 0.0,
) -> ApplyResult:
    """Create and change what differs. Raises `ClusterError` if a check failed and nothing was changed.

    If secrets or claims are missing, the namespace is created first; `wait_seconds` is how long to wait for them.
    """
    ordered, namespace = sorted(objects, key=_rank), config.deploy.namespace
    done = ApplyResult()
    try:
        fresh = _check_prerequisites(kube, ordered, namespace, done.notes)
    except MissingReferences as missing:
        made = _await_references(kube, ordered, namespace, done.notes, missing, wait_seconds, progress)
        if made is not None:
            done.created.append(describe(made))
            ordered.remove(made)
        fresh = None
    if fresh is not None:
        # A dry run of namespaced objects needs the namespace. It is deleted again if the dry run fails.
        create_namespace(kube, fresh)
    try:
        proposal = _plan_all(kube, config, ordered, progress)
    except ClusterError:
        if fresh is not None and (made_now := kube.live(fresh)) is not None:
            kube.delete(made_now)
        raise
    steps = [step for step in proposal.steps if step.item is not fresh]
    done.notes += proposal.notes
    if fresh is not None:
        done.created.append(describe(fresh))
    scheduled = any(item["kind"] in SCHEDULED for item in ordered)
    try:
        if any(_runs_pipeline(step.item) and step.action in ("created", "replaced") for step in steps):
            _await_terminating_runs(kube, config, progress)
        with SlowTask(progress, f"applying {config.name}") as slow:
            for n, step in enumerate(steps):
                slow.tick(f"{n} of {len(steps)} objects, now {describe(step.item)}")
                try:
                    _execute(kube, step, progress, scheduled=scheduled)
                except ClusterError as error:
                    done.failed[describe(step.item)] = str(error)
                    later = steps[n + 1 :]
                    done.untried = [describe(one.item) for one in later if one.action != "unchanged"]
                    done.unchanged += [describe(one.item) for one in later if one.action == "unchanged"]
                    return done
                getattr(done, step.action).append(describe(step.item))
                if step.releases_volume:
                    done.notes.append(
                        f"{describe(step.item)} was still reserved for a deleted claim; the new claim gets "
                        "it, with its files"
                    )
        _handle_leftovers(kube, proposal.left_over, done, prune=prune)
    finally:
        done.notes += kube.warnings
    return done


_NOTHING_CHANGED = "Nothing was changed."


def _check_prerequisites(
    kube: Kube, ordered: Sequence[Object], namespace: str, notes: list[str]
) -> Object | None:
    """Check the prerequisites; returns the namespace if it has to be created."""
    check_apis(kube, ordered)
    fresh = check_namespace(kube, ordered, namespace)
    check_references(kube, ordered, namespace, notes)
    return fresh


def _await_references(
    kube: Kube,
    ordered: Sequence[Object],
    namespace: str,
    notes: list[str],
    missing: MissingReferences,
    wait_seconds: float,
    progress: Progress,
) -> Object | None:
    """Create the namespace that the missing objects belong to, and wait `wait_seconds` for them. Returns the namespace
    if it was created."""
    if not missing.namespaced:
        raise ClusterError(f"{missing}\n{_NOTHING_CHANGED}") from missing
    made = check_namespace(kube, ordered, namespace)
    state = _NOTHING_CHANGED
    if made is not None:
        create_namespace(kube, made)
        state = f"Namespace {namespace} was created; nothing else was changed."
    if not wait_seconds:
        again = "Create them and apply again; `clickline deploy apply --wait` waits for them."
        raise ClusterError(f"{missing}\n{state} {again}") from missing
    progress.log(str(missing))
    deadline = time.monotonic() + wait_seconds
    with SlowTask(progress, f"waiting for {', '.join(missing.missing)}") as slow:
        while True:
            try:
                check_references(kube, ordered, namespace, notes)
                slow.tick("found")
                return made
            except MissingReferences as still:
                slow.tick(f"missing: {', '.join(still.missing)}")
                if time.monotonic() > deadline:
                    raise ClusterError(f"{still}\nWaited {wait_seconds:.0f} s. {state}") from still
            time.sleep(_POLL_SECONDS)


def _plan_all(kube: Kube, config: Config, ordered: Sequence[Object], progress: Progress) -> ChangeSet:
    """One change per object, from a server-side dry run. All problems are reported at once."""
    with SlowTask(progress, "listing existing objects") as slow:
        there = find_objects(kube, config, slow.tick)
    now = {_identity(item) for item in ordered}
    old = [
        item
        for item in there.objects
        if _identity(item) not in now and item["kind"] not in ("Namespace", "Pod")
    ]
    others = [item for item in old if _runs_pipeline(item)]
    problems = [_still_running(item) for item in others if _is_active(item)]
    steps = [ObjectChange(item, "removed", item) for item in others]
    kube.warnings.clear()  # keep only those about objects that change
    with SlowTask(progress, "server-side dry run") as slow:
        for n, item in enumerate(ordered):
            slow.tick(f"{n} of {len(ordered)} objects, now {describe(item)}")
            warned = len(kube.warnings)
            live = kube.live(item)
            try:
                steps.append(_plan_object(kube, item, live, config.name))
            except ApiError as refused:
                problems.append(f"{describe(item)}: {_explain(item, live, refused)}")
            except Conflict as stuck:
                problems.append(str(stuck))
            else:
                if steps[-1].action == "unchanged":
                    del kube.warnings[warned:]  # it was reported when the object was created
    if problems:
        raise ClusterError("\n".join([*problems, _NOTHING_CHANGED]))
    return ChangeSet(steps, [item for item in old if item not in others], there.not_listed)


def _rank(item: Object) -> int:
    key = (item["apiVersion"], item["kind"])
    return KINDS.index(key) if key in KINDS else len(KINDS)


# ── one pipeline at a time ─────────────────────────────────────────────────────────────────────


def _runs_pipeline(item: Object) -> bool:
    """Whether an object trains into `home`, now or later. There must be only one of these."""
    kind = (item["apiVersion"], item["kind"])
    runs = kind in _RUN_TO_COMPLETION or item["kind"] in (*SCHEDULED, "WorkflowTemplate")
    return runs or (item["kind"] == "Deployment" and label(item, "component") == "trainer")


def _is_active(item: Object) -> bool:
    """Whether deleting it would lose work. A trainer never finishes, and resumes from its checkpoint."""
    if item["kind"] in SCHEDULED:
        return bool((item.get("status") or {}).get("active"))
    return (item["apiVersion"], item["kind"]) in _RUN_TO_COMPLETION and not finished(item)


def _still_running(item: Object) -> str:
    return (
        f"{describe(item)} is running, and the pipeline is now configured to run in another way: two would train "
        "into the same home. Wait until it has finished (`clickline deploy status`) and apply again; or stop it now "
        f"and apply again: {_stop_command(item)}."
    )


def _stop_command(item: Object) -> str:
    metadata = item["metadata"]
    if item["apiVersion"].startswith("argoproj.io/"):
        # A deleted workflow runs no exit handler and would leave Ray running; a stopped one releases it.
        runs = (item.get("status") or {}).get("active") or () if item["kind"] in SCHEDULED else [metadata]
        stop = ' --type merge --patch \'{"spec": {"shutdown": "Stop"}}\''
        commands = [f"kubectl -n {metadata['namespace']} patch workflow {one['name']}{stop}" for one in runs]
        return f"{' && '.join(commands)} (training resumes from its checkpoint; deleting it would leave Ray running)"
    full_name = item["kind"].lower() + ("" if item["kind"] != "Job" else f".{_api_group(item)}")
    return (
        f"kubectl -n {metadata['namespace']} delete {full_name} {metadata['name']} --cascade=foreground "
        "(training resumes from its checkpoint)"
    )


def _await_terminating_runs(kube: Kube, config: Config, progress: Progress) -> None:
    """A terminating pod still holds the lock of `home`, and releases Ray only at its end."""

    def ending() -> list[Object]:
        pods = if_allowed(kube.list, "v1", "Pod", config.deploy.namespace, instance_labels(config.name))
        return [
            pod
            for pod in (() if isinstance(pods, ApiError) else pods)  # `find_objects` has reported it
            if label(pod, "component") in ("pipeline", "trainer") and pod["metadata"].get("deletionTimestamp")
        ]

    _await_deletion(kube, [], progress, title="waiting for the previous run to terminate", also=ending)


# ── planning a change ──────────────────────────────────────────────────────────────────────────


def _plan_object(kube: Kube, item: Object, live: Object | None, name: str) -> ObjectChange:
    if live is None:
        _check_name_is_free(kube, item)
        return ObjectChange(item, "created", None, kube.apply(item, dry_run=True))
    check_owner(live, name)
    if live["metadata"].get("deletionTimestamp"):
        raise Conflict(f"{describe(item)} is being deleted. Wait until it is gone, then apply again.")
    stale = item["kind"] == "PersistentVolume" and is_stale_reservation(kube, item, live)
    once = (item["apiVersion"], item["kind"]) in _RUN_TO_COMPLETION
    try:
        new = kube.apply(item, dry_run=True)
    except ApiError as refused:
        if not once or not _is_immutable_error(refused):
            raise
        new = None
    # A failed pipeline is started again: the cause may have been the data.
    again = once and workload_state(live)[0] == "failed"
    if stale:
        return ObjectChange(item, "changed", live, new, releases_volume=True)
    if new is not None and without_server_fields(new) == without_server_fields(live) and not again:
        return ObjectChange(item, "unchanged", live, new)
    if not once or (new is not None and new.get("spec") == live.get("spec") and not again):
        return ObjectChange(item, "changed", live, new)
    if not finished(live):
        raise Conflict(
            f"{describe(item)} is running and cannot be changed while it runs. Wait until it has finished (`clickline "
            f"deploy status`) and apply again; or stop it now and apply again: {_stop_command(live)}."
        )
    # Under a free name: would the server accept it once the old one is deleted?
    trial = {**item, "metadata": {**item["metadata"], "name": f"{item['metadata']['name'][:50]}-next"}}
    return ObjectChange(item, "replaced", live, kube.apply(trial, dry_run=True))


def _check_name_is_free(kube: Kube, item: Object) -> None:
    """Knative creates a Kubernetes Service with the name of its own one, and never becomes ready if there is
    another."""
    if (item["apiVersion"], item["kind"]) != _KNATIVE:
        return
    name, namespace = item["metadata"]["name"], item["metadata"]["namespace"]
    taken = kube.get("v1", "Service", name, namespace)
    if taken is not None and not taken["metadata"].get("ownerReferences"):
        raise Conflict(
            f"Kubernetes Service {name} has the name that Knative needs for its own. Delete it and apply again: "
            f"kubectl -n {namespace} delete service {name} (requests to that name fail meanwhile)."
        )


def _api_group(item: Object) -> str:
    return str(item["apiVersion"]).rpartition("/")[0]


def _is_immutable_error(refused: ApiError) -> bool:
    """Whether the server rejected a change of an immutable field."""
    text = " ".join([refused.message, *(cause for _, cause in refused.causes)])
    return refused.status in (400, 403, 422) and any(
        sign in text for sign in ("immutable", "updates to", "may not change", "cannot change")
    )


_IMMUTABLE_REMEDIES = {
    "PersistentVolumeClaim": (
        "the class, access mode and volume of a claim are immutable; it can only grow, if its class allows that. "
        "Restore the previous deploy.storage; or copy the data, delete claim and data (`clickline deploy delete "
        "--with-data`) and apply again."
    ),
    "PersistentVolume": (
        "the source of a volume is immutable. Restore the previous deploy.storage; or `clickline deploy delete "
        "--with-data` (files on NFS or on a node stay) and apply again."
    ),
    "StatefulSet": (
        "its claims, selector and service name are immutable. Delete it (its claims stay) and apply again: "
        "kubectl -n {namespace} delete statefulset {name}."
    ),
    "Deployment": (
        "its selector is immutable. Delete it and apply again, with an interruption of serving: "
        "kubectl -n {namespace} delete deployment {name}."
    ),
    "Service": "its address is immutable. Delete it and apply again: kubectl -n {namespace} delete service {name}.",
    "RoleBinding": "its role is immutable. Delete it, apply again: kubectl -n {namespace} delete rolebinding "
    "{name}.",
}


def _explain(item: Object, live: Object | None, refused: ApiError) -> str:
    """Why the server rejected a change, and what to do."""
    about = f"Server: {refused.message or refused}"
    kind = item["kind"]
    if live is not None and (
        _is_immutable_error(refused) or (kind in _DATA and "cannot " not in refused.message)
    ):
        remedy = _IMMUTABLE_REMEDIES.get(
            kind, "that part cannot be changed. Remove the object and apply again."
        )
        metadata = item["metadata"]
        remedy = remedy.format(namespace=metadata.get("namespace", ""), name=metadata["name"])
        return f"it exists and cannot be changed in place: {remedy} {about}"
    if "exceeded quota" in refused.message:
        return (
            "it exceeds the namespace's quota. Lower deploy.resources or the number of workers and replicas, or ask "
            f"for more. {about}"
        )
    if (item["apiVersion"], kind) == _KNATIVE and "support is disabled" in refused.message:
        return (
            "Knative does not allow what its pods need. A cluster administrator can allow it (see the note above for "
            f"the command), or set deploy.serving.kind: deployment. {about}"
        )
    if "admission webhook" in refused.message or "PodSecurity" in refused.message:
        return f"a policy of the cluster rejects it. Ask a cluster administrator, or change deploy. {about}"
    if refused.status in (400, 422):
        fields = "; ".join(f"{where}: {text}" for where, text in refused.causes if where)
        return (
            f"the server rejects it as invalid{f' ({fields})' if fields else ''}. Look for the field in "
            f"`clickline deploy render`; an older cluster may not know it. {about}"
        )
    return str(refused)


_SERVER_FIELDS = ("managedFields", "resourceVersion", "generation", "creationTimestamp", "uid", "selfLink")


def without_server_fields(item: Object) -> Object:
    """An object without the fields that the server sets."""
    metadata = {key: value for key, value in item["metadata"].items() if key not in _SERVER_FIELDS}
    return {**{key: value for key, value in item.items() if key != "status"}, "metadata": metadata}


def _execute(kube: Kube, step: ObjectChange, progress: Progress, *, scheduled: bool) -> None:
    if step.action == "unchanged":
        return
    if step.action in ("replaced", "removed") and step.live is not None:
        kube.delete(step.live, propagation="Foreground")
        _await_deletion(kube, [step.live], progress, title=f"deleting the old {describe(step.item)}")
    if step.action == "removed":
        return
    try:
        if step.releases_volume and step.live is not None:
            release_volume(kube, step.live)
        kube.apply(step.item)
        created = step.live is None and step.item["kind"] == "StatefulSet"
        if scheduled and created and "replicas" not in step.item["spec"]:
            # Until the first scheduled run Ray has no pods; without a number the server would start one of each.
            kube.patch(step.item, {"spec": {"replicas": 0}})
    except ApiError as refused:
        raise ClusterError(_explain(step.item, step.live, refused)) from refused


def _handle_leftovers(kube: Kube, items: Sequence[Object], done: ApplyResult, *, prune: bool) -> None:
    for item in items:
        if not prune or item["kind"] in _DATA:
            done.left_over.append(describe(item))
            continue
        try:
            kube.delete(item)
        except ClusterError as error:
            done.failed[describe(item)] = str(error)
        else:
            done.pruned.append(describe(item))


def _identity(item: Object) -> tuple[str, str, str]:
    return _api_group(item), item["kind"], item["metadata"]["name"]


# ── finding and deleting ───────────────────────────────────────────────────────────────────────


def find_objects(
    kube: Kube, config: Config, on_progress: Callable[[str], None] = lambda message: None
) -> LiveObjects:
    """The objects that a deployment has created, without those that controllers created for them."""
    namespace = config.deploy.namespace
    labels = {**instance_labels(config.name), "app.kubernetes.io/managed-by": "clickline"}
    objects: list[Object] = []
    not_listed: list[str] = []
    for n, (api_version, kind) in enumerate(KINDS):
        on_progress(f"{n} of {len(KINDS)} kinds, now {kind}")
        items = if_allowed(kube.list, api_version, kind, namespace, labels)
        if isinstance(items, ApiError):
            not_listed.append(f"could not look for objects of kind {kind}: {items}")
            continue
        objects += [
            item
            for item in items
            if _namespace_of(item) == namespace and not item["metadata"].get("ownerReferences")
        ]
    return LiveObjects(objects, not_listed)


def _namespace_of(item: Object) -> str | None:
    """The namespace that an object belongs to, also a cluster-wide one: another namespace may have a deployment of the
    same name."""
    metadata: Object = item["metadata"]
    if item["kind"] == "PersistentVolume":
        metadata = item["spec"].get("claimRef") or {}
    return metadata["name"] if item["kind"] == "Namespace" else metadata.get("namespace")


def objects_to_delete(there: LiveObjects, *, with_data: bool) -> list[Object]:
    """What `delete_objects` deletes in any case, in reverse order of creation."""
    spared = ("Namespace",) if with_data else ("Namespace", *_DATA)
    return [item for item in reversed(there.objects) if item["kind"] not in spared]


def delete_objects(
    kube: Kube,
    config: Config,
    there: LiveObjects,
    *,
    with_data: bool,
    progress: Progress,
    seconds: float = _DELETE_SECONDS,
) -> DeleteResult:
    """Delete what `find_objects` has found; claims and volumes only `with_data`, and then also the namespace if the
    deployment created it and nothing else is in it. Returns when all of it is gone."""
    leaving, namespace = objects_to_delete(there, with_data=with_data), config.deploy.namespace
    result = DeleteResult(
        [], [describe(item) for item in there.objects if item not in leaving], list(there.not_listed)
    )
    for item in leaving:
        kube.delete(item, propagation="Foreground")
    _await_deletion(
        kube,
        leaving,
        progress,
        title=f"deleting {config.name}",
        seconds=seconds,
        also=lambda: kube.list("v1", "Pod", namespace, instance_labels(config.name)),
    )
    result.removed = [describe(item) for item in leaving]
    own = next((item for item in there.objects if item["kind"] == "Namespace"), None)
    if own is not None and with_data:
        others, unknown = _other_objects(kube, namespace)
        if unknown:
            result.notes.append(
                f"namespace {namespace} stays: this user may not list {', '.join(unknown)} in it"
            )
        elif others:
            result.notes.append(f"namespace {namespace} stays: it also holds {_abbreviate(others)}")
        else:
            kube.delete(own)
            _await_deletion(kube, [own], progress, title=f"deleting namespace {namespace}", seconds=seconds)
            result.removed.append(describe(own))
            result.kept.remove(describe(own))
    return result


_DEFAULT_OBJECTS = {
    ("ServiceAccount", "default"),
    ("ConfigMap", "kube-root-ca.crt"),
    ("ConfigMap", "istio-ca-root-cert"),
    ("ConfigMap", "openshift-service-ca.crt"),
}
_DERIVED_KINDS = ("Event", "PodMetrics", "Lease", "EndpointSlice", "Endpoints")
"""Kinds that the cluster derives from other objects."""


def _other_objects(kube: Kube, namespace: str) -> tuple[list[str], list[str]]:
    """The objects of a namespace beyond the default ones, and the kinds that could not be listed."""
    others: list[str] = []
    unknown: list[str] = []
    for resource in kube.namespaced_resources():
        if resource.kind in _DERIVED_KINDS:
            continue
        try:
            items = kube.list(resource.group_version, resource.kind, namespace)
        except ApiError as refused:
            if refused.status not in (404, 405):
                unknown.append(resource.name)
            continue
        others += [
            describe(item)
            for item in items
            if (resource.kind, item["metadata"]["name"]) not in _DEFAULT_OBJECTS
            and not item["metadata"].get("ownerReferences")
        ]
    return others, unknown


def _abbreviate(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def _await_deletion(
    kube: Kube,
    items: Sequence[Object],
    progress: Progress,
    *,
    title: str,
    seconds: float = _DELETE_SECONDS,
    also: Callable[[], list[Object]] = list,
) -> None:
    """Wait until the objects, and those that `also` lists, are gone."""
    left = list(items)
    deadline = time.monotonic() + seconds
    with SlowTask(progress, title) as slow:
        while True:
            left = [item for item in left if _still_exists(kube, item)]
            remaining = [*left, *(pod for pod in also() if not left)]
            if not remaining:
                slow.tick("deleted")
                return
            slow.tick(f"{len(remaining)} left: {_abbreviate([describe(item) for item in remaining])}")
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"{_abbreviate([describe(item) for item in remaining])}: not gone after {seconds:.0f} s. The "
                    "cluster continues deleting them; `clickline deploy status` shows what is left. An object that "
                    "stays has a finalizer: see `kubectl describe`."
                )
            time.sleep(_POLL_SECONDS)


def _still_exists(kube: Kube, item: Object) -> bool:
    live = kube.live(item)
    return live is not None and live["metadata"].get("uid") == item["metadata"].get("uid")
