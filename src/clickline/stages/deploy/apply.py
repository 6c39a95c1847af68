"""Bring a deployment to a cluster, and take it away again.

Nothing is changed before everything was looked at: the APIs that are needed, what the objects refer to, and a dry run
of each on the server. What cannot be changed in place is told with what to do about it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from clickline.errors import ClusterError
from clickline.progress import Progress
from clickline.stages.deploy.kube import ApiRefused, Kube, label, shown
from clickline.stages.deploy.objects import Object
from clickline.stages.deploy.status import finished, workload_state
from clickline.stages.deploy.volumes import free, holder

__all__ = ["MADE", "Applied", "Found", "Removed", "apply", "found", "going", "remove"]

MADE: tuple[tuple[str, str], ...] = (
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
"""Every kind that a deployment may have, in the order in which they are made: who may, what is read, then who runs."""

_DATA = ("PersistentVolume", "PersistentVolumeClaim")


class _Operator(NamedTuple):
    name: str
    site: str
    instead: str


_OPERATORS = {
    "batch.volcano.sh": _Operator("Volcano", "volcano.sh", "deploy.training.kind: plain"),
    "scheduling.volcano.sh": _Operator("Volcano", "volcano.sh", "deploy.training.gang: false"),
    "ray.io": _Operator("KubeRay", "docs.ray.io, Ray on Kubernetes", "deploy.training.kind: plain"),
    "argoproj.io": _Operator("Argo Workflows", "argo-workflows.readthedocs.io", "deploy.workflow.kind: job"),
    "serving.knative.dev": _Operator("Knative Serving", "knative.dev", "deploy.serving.kind: deployment"),
}
"""Who brings an API group that a bare cluster does not have, and what to choose to do without."""

_ONCE = {
    ("batch/v1", "Job"),
    ("batch.volcano.sh/v1alpha1", "Job"),
    ("ray.io/v1", "RayJob"),
    ("argoproj.io/v1alpha1", "Workflow"),
}
"""Kinds that run to their end. A changed one is made anew: their controllers refuse or ignore a change."""

_KNATIVE = ("serving.knative.dev/v1", "Service")

_GONE_SECONDS = 120.0
_POLL_SECONDS = 0.5


@dataclass
class Applied:
    """What an apply did. With `failed`, what stands in `untried` was not reached."""

    created: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    pruned: list[str] = field(default_factory=list)
    left_over: list[str] = field(default_factory=list)
    """Of an earlier apply, and no longer part of the deployment."""
    failed: dict[str, str] = field(default_factory=dict)
    untried: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass
class Found:
    """What a deployment has on a cluster."""

    objects: list[Object]
    unseen: list[str]
    """Kinds that could not be looked for, and why."""


@dataclass
class Removed:
    removed: list[str]
    kept: list[str]
    notes: list[str]


@dataclass(frozen=True)
class _Step:
    item: Object
    action: str
    """created, changed, replaced or unchanged: what becomes of it, in the word of `Applied`."""
    live: Object | None
    frees: bool = False
    """It is a volume that is reserved for a claim that is gone."""


def apply(
    kube: Kube, objects: Sequence[Object], *, name: str, namespace: str, prune: bool, progress: Progress
) -> Applied:
    """Create and change what differs. Raises `ClusterError` when nothing was changed because something is wrong."""
    ordered = sorted(objects, key=_rank)
    done = Applied()
    _check_apis(kube, ordered)
    own_namespace = next((item for item in ordered if item["kind"] == "Namespace"), None)
    fresh = _check_namespace(kube, own_namespace, namespace)
    _check_references(kube, ordered, namespace, done.notes, fresh=fresh is not None)
    if fresh is not None:
        # A dry run of what lies in a namespace needs the namespace. It goes again if the dry run finds anything.
        _make_namespace(kube, fresh)
    try:
        steps = _planned(kube, ordered, name)
    except ClusterError:
        if fresh is not None:
            made = kube.live(fresh)
            if made is not None:
                kube.delete(made)
        raise
    if fresh is not None:
        done.created.append(shown(fresh))
        steps = [step for step in steps if step.item is not fresh]
    try:
        for n, step in enumerate(steps):
            try:
                _carry_out(kube, step, progress)
            except ClusterError as error:
                done.failed[shown(step.item)] = str(error)
                done.untried = [shown(later.item) for later in steps[n + 1 :] if later.action != "unchanged"]
                done.unchanged += [
                    shown(later.item) for later in steps[n + 1 :] if later.action == "unchanged"
                ]
                return done
            getattr(done, step.action).append(shown(step.item))
            if step.frees:
                done.notes.append(
                    f"{shown(step.item)} was still reserved for a claim that is gone; the new claim gets it, with the "
                    "files that lie on it"
                )
        _look_for_left_overs(kube, ordered, done, name=name, namespace=namespace, prune=prune)
    finally:
        done.notes += kube.warnings
    return done


def _rank(item: Object) -> int:
    key = (item["apiVersion"], item["kind"])
    return MADE.index(key) if key in MADE else len(MADE)


# ── what must be there ─────────────────────────────────────────────────────────────────────────


def _check_apis(kube: Kube, objects: Sequence[Object]) -> None:
    missing: dict[tuple[str, str], list[Object]] = {}
    for item in objects:
        if kube.resource(item["apiVersion"], item["kind"]) is None:
            missing.setdefault((item["apiVersion"], item["kind"]), []).append(item)
    problems = [_missing_api(kube, api, kind, items) for (api, kind), items in missing.items()]
    if problems:
        raise ClusterError("\n".join([*problems, "Nothing was changed."]))


def _missing_api(kube: Kube, api_version: str, kind: str, items: Sequence[Object]) -> str:
    group, _, version = api_version.rpartition("/")
    needed = (
        f"{', '.join(shown(item) for item in items)} needs {api_version}, and the cluster of {kube.where}"
    )
    has = kube.versions(group) if group else []
    operator = _OPERATORS.get(group)
    if has:
        lacks = f"has {group} in {', '.join(has)} only" if version not in has else f"has no {kind} in it"
        remedy = f"Bring {operator.name} up to date ({operator.site})" if operator else "Update the cluster"
    else:
        lacks = "does not have it"
        remedy = f"Install {operator.name} ({operator.site})" if operator else "Update the cluster"
    instead = f", or set {operator.instead}" if operator else ""
    return f"{needed} {lacks}. {remedy}{instead}."


def _check_namespace(kube: Kube, item: Object | None, namespace: str) -> Object | None:
    """The namespace if it is ours to make and not there yet."""
    try:
        live = kube.get("v1", "Namespace", namespace)
    except ApiRefused as refused:
        if refused.status != 403:
            raise
        if item is None:
            return None  # who may not look at namespaces may still work in one
        raise ClusterError(f"{refused} {_GIVEN}") from refused
    if live is not None and live["metadata"].get("deletionTimestamp"):
        raise ClusterError(
            f"namespace {namespace} is being removed. Wait until it is gone, then apply again."
        )
    if item is None:
        if live is None:
            raise ClusterError(
                f"namespace {namespace} does not exist, and deploy.create_namespace is false. "
                f"Make it (kubectl create namespace {namespace}), or set deploy.create_namespace: true."
            )
        return None
    if live is None:
        return item
    if not _ours(live, label(item, "instance")):
        raise ClusterError(
            f"namespace {namespace} exists and was not made by this deployment ({_whose(live)}). To deploy into it "
            "as it is, set deploy.create_namespace: false; or choose another deploy.namespace."
        )
    return None


_GIVEN = "To deploy into a namespace that somebody made for you, set deploy.create_namespace: false."


def _make_namespace(kube: Kube, item: Object) -> None:
    try:
        kube.apply(item)
    except ApiRefused as refused:
        raise ClusterError(f"{refused} {_GIVEN}") from refused


class _Reference(NamedTuple):
    api_version: str
    kind: str
    name: str
    remedy: str


def _references(value: Any, key: str = "") -> Iterator[_Reference]:
    """What an object names that must exist, wherever in it that stands."""
    if isinstance(value, list):
        for one in value:
            yield from _references(one, key)
    if not isinstance(value, dict):
        return
    if key in ("secretKeyRef", "secretRef", "imagePullSecrets") and "name" in value:
        remedy = "Create it (kubectl create secret …), or correct the name in deploy.secrets or deploy.pull_secrets."
        if not value.get("optional"):
            yield _Reference("v1", "Secret", value["name"], remedy)
    elif key == "secret" and ("secretName" in value or "name" in value):
        remedy = "Create it (kubectl create secret …), or correct the name in deploy.secrets.files."
        if not value.get("optional"):
            yield _Reference("v1", "Secret", value.get("secretName") or value["name"], remedy)
    elif key == "persistentVolumeClaim" and "claimName" in value:
        remedy = "Create it, or correct the name in deploy.storage."
        yield _Reference("v1", "PersistentVolumeClaim", value["claimName"], remedy)
    if value.get("priorityClassName"):
        remedy = "Create it, or correct deploy.nodes.priority_class."
        yield _Reference("scheduling.k8s.io/v1", "PriorityClass", value["priorityClassName"], remedy)
    for inner, one in value.items():
        yield from _references(one, inner)


def _check_references(
    kube: Kube, objects: Sequence[Object], namespace: str, notes: list[str], *, fresh: bool
) -> None:
    ours = {(item["apiVersion"], item["kind"], item["metadata"]["name"]) for item in objects}
    wanted: dict[_Reference, Object] = {}
    for item in objects:
        for reference in _references(item):
            if reference[:3] not in ours:
                wanted.setdefault(reference, item)
        queue = (
            item.get("spec", {}).get("queue") if item["apiVersion"] == "batch.volcano.sh/v1alpha1" else None
        )
        if queue:
            remedy = "Create it, or correct deploy.training.queue."
            wanted.setdefault(_Reference("scheduling.volcano.sh/v1beta1", "Queue", queue, remedy), item)
    problems = []
    for (api_version, kind, name, remedy), item in wanted.items():
        if kube.resource(api_version, kind) is None:
            notes.append(f"could not check that {kind} {name} exists: the cluster has no {api_version}")
            continue
        try:
            there = kube.get(api_version, kind, name, namespace)
        except ApiRefused as refused:
            if refused.status != 403:
                raise
            notes.append(f"could not check that {kind} {name} exists: this user may not read it (403)")
            continue
        if there is None:
            problems.append(f"{shown(item)} needs {kind} {name}, and the cluster has none. {remedy}")
    if problems and fresh:
        problems.append(
            f"Namespace {namespace} does not exist yet. To put something of yours into it first: kubectl create "
            f"namespace {namespace}, and deploy.create_namespace: false."
        )
    problems += _storage_classes(kube, objects, notes)
    if problems:
        raise ClusterError("\n".join([*problems, "Nothing was changed."]))


def _storage_classes(kube: Kube, objects: Sequence[Object], notes: list[str]) -> list[str]:
    claims = [item for item in objects if item["kind"] == "PersistentVolumeClaim"]
    for item in objects:
        templates = item.get("spec", {}).get("volumeClaimTemplates") or ()
        claims += [{**one, "kind": "claim template"} for one in templates]
    if not claims:
        return []
    try:
        classes = kube.list("storage.k8s.io/v1", "StorageClass")
    except ApiRefused as refused:
        if refused.status != 403:
            raise
        notes.append("could not check the storage classes: this user may not read them (403)")
        return []
    names = sorted(one["metadata"]["name"] for one in classes)
    default = any(
        (one["metadata"].get("annotations") or {}).get("storageclass.kubernetes.io/is-default-class")
        == "true"
        for one in classes
    )
    allowed = f"Allowed: {', '.join(names)}." if names else "There is none at all."
    problems = []
    for claim in claims:
        spec = claim["spec"]
        wanted = spec.get("storageClassName")
        if spec.get("volumeName") or wanted == "":
            continue  # it is bound to a volume by name
        if wanted is None and not default:
            problems.append(
                f"{shown(claim)} names no storage class, and the cluster has no default one. {allowed} "
                "Set deploy.storage.*.storage_class, or use another kind of volume."
            )
        elif wanted is not None and wanted not in names:
            problems.append(
                f"{shown(claim)} needs storage class {wanted}, and the cluster has none of that name. {allowed} "
                "Correct deploy.storage.*.storage_class."
            )
    return problems


# ── what becomes of each object ────────────────────────────────────────────────────────────────


def _planned(kube: Kube, objects: Sequence[Object], name: str) -> list[_Step]:
    """One step for each object, found out by a dry run on the server. All problems are told at once."""
    steps: list[_Step] = []
    problems: list[str] = []
    for item in objects:
        live = kube.live(item)
        try:
            steps.append(_step(kube, item, live, name))
        except ApiRefused as refused:
            problems.append(f"{shown(item)}: {_remedy(item, live, refused)}")
        except ClusterError as error:
            problems.append(str(error))
            if not isinstance(error, _Stuck):
                raise
    if problems:
        raise ClusterError("\n".join([*problems, "Nothing was changed."]))
    return steps


class _Stuck(ClusterError):
    """An object that stands in the way."""


def _step(kube: Kube, item: Object, live: Object | None, name: str) -> _Step:
    if live is None:
        _check_free(kube, item)
        kube.apply(item, dry_run=True)
        return _Step(item, "created", None)
    if not _ours(live, name):
        raise _Stuck(
            f"{shown(item)} exists and was not made by this deployment ({_whose(live)}). "
            "Rename the deployment (name:), choose another deploy.namespace, or remove that object."
        )
    if live["metadata"].get("deletionTimestamp"):
        raise _Stuck(f"{shown(item)} is being removed. Wait until it is gone, then apply again.")
    frees = item["kind"] == "PersistentVolume" and _reserved_in_vain(kube, item, live)
    once = (item["apiVersion"], item["kind"]) in _ONCE
    try:
        new = kube.apply(item, dry_run=True)
    except ApiRefused as refused:
        if not once or not _fixed(refused):
            raise
        new = None
    # A pipeline that failed begins again: what was wrong with it may have been the data.
    again = once and workload_state(live)[0] == "failed"
    if frees:
        return _Step(item, "changed", live, frees=True)
    if new is not None and _content(new) == _content(live) and not again:
        return _Step(item, "unchanged", live)
    if not once or (new is not None and new.get("spec") == live.get("spec") and not again):
        return _Step(item, "changed", live)
    if not finished(live):
        where = f"-n {item['metadata']['namespace']}"
        full_name = item["kind"].lower() + ("" if item["kind"] != "Job" else f".{_group(item)}")
        raise _Stuck(
            f"{shown(item)} is running, and what it runs has changed; it cannot be changed while it runs. Wait for "
            "its end (`clickline deploy status`) and apply again; or end it now and apply again: "
            f"kubectl {where} delete {full_name} {item['metadata']['name']} (training goes on from its checkpoint)."
        )
    kube.apply(_renamed(item), dry_run=True)
    return _Step(item, "replaced", live)


def _reserved_in_vain(kube: Kube, item: Object, live: Object) -> bool:
    """Whether a volume waits for a claim that is gone. One that another claim has is not taken from it."""
    held, wanted = holder(kube, live), item["spec"]["claimRef"]
    if held is None or held.gone:
        return held is not None
    if (held.namespace, held.name) != (wanted["namespace"], wanted["name"]):
        raise _Stuck(
            f"{shown(item)} is bound to {held}, and is needed for claim {wanted['name']} of namespace "
            f"{wanted['namespace']}. Rename the deployment (name:) or choose another deploy.namespace; or, if nobody "
            f"needs that claim any more: kubectl -n {held.namespace} delete persistentvolumeclaim {held.name}, and "
            "apply again (the files stay)."
        )
    return False


def _check_free(kube: Kube, item: Object) -> None:
    """Knative makes a Service of Kubernetes under the name of its own, and stays as it is where there is another."""
    if (item["apiVersion"], item["kind"]) != _KNATIVE:
        return
    name, namespace = item["metadata"]["name"], item["metadata"]["namespace"]
    taken = kube.get("v1", "Service", name, namespace)
    if taken is not None and not taken["metadata"].get("ownerReferences"):
        raise _Stuck(
            f"Service {name} of Kubernetes has the name that Knative needs for its own. Remove it and apply again: "
            f"kubectl -n {namespace} delete service {name} (nothing answers under that name meanwhile)."
        )


def _renamed(item: Object) -> Object:
    """The object under a name that is free: whether the server would take it after the old one is gone."""
    return {**item, "metadata": {**item["metadata"], "name": f"{item['metadata']['name'][:50]}-next"}}


def _group(item: Object) -> str:
    return str(item["apiVersion"]).rpartition("/")[0]


def _fixed(refused: ApiRefused) -> bool:
    """Whether the server refused because a part of an object cannot be changed."""
    words = " ".join([refused.message, *(text for _, text in refused.causes)])
    return refused.status in (400, 403, 422) and any(
        sign in words for sign in ("immutable", "updates to", "may not change", "cannot change")
    )


_IN_PLACE = {
    "PersistentVolumeClaim": (
        "a claim keeps its class, access and volume, and can at most grow, where its class allows that. Put back what "
        "deploy.storage said before; or copy the data, remove claim and data (`clickline deploy delete --with-data`) "
        "and apply again."
    ),
    "PersistentVolume": (
        "a volume keeps its source. Put back what deploy.storage said before; or `clickline deploy delete --with-data` "
        "(files on NFS or on a node stay where they are) and apply again."
    ),
    "StatefulSet": (
        "its claims, selector and service name are fixed. Remove it (its claims stay) and apply again: "
        "kubectl -n {namespace} delete statefulset {name}."
    ),
    "Deployment": (
        "its selector is fixed. Remove it and apply again, with a pause in serving: "
        "kubectl -n {namespace} delete deployment {name}."
    ),
    "Service": "its address is fixed. Remove it and apply again: kubectl -n {namespace} delete service {name}.",
    "RoleBinding": "its role is fixed. Remove it and apply again: kubectl -n {namespace} delete rolebinding {name}.",
}


def _remedy(item: Object, live: Object | None, refused: ApiRefused) -> str:
    """What the server refused, in words, and what to do."""
    about = f"The server's words: {refused.message or refused}"
    kind = item["kind"]
    if live is not None and (_fixed(refused) or (kind in _DATA and "cannot " not in refused.message)):
        words = _IN_PLACE.get(kind, "that part cannot be changed. Remove the object and apply again.")
        metadata = item["metadata"]
        words = words.format(namespace=metadata.get("namespace", ""), name=metadata["name"])
        return f"it exists and this change cannot be made in place: {words} {about}"
    if "exceeded quota" in refused.message:
        return (
            "the quota of the namespace does not allow it. Lower deploy.resources or the numbers of workers and "
            f"replicas, or ask for more. {about}"
        )
    if (item["apiVersion"], kind) == _KNATIVE and "support is disabled" in refused.message:
        return (
            "Knative does not allow what its pods need. Whoever runs the cluster can allow it (the note above has the "
            f"command), or set deploy.serving.kind: deployment. {about}"
        )
    if "admission webhook" in refused.message or "PodSecurity" in refused.message:
        return f"a rule of the cluster refuses it. Ask who runs the cluster, or change deploy. {about}"
    if refused.status in (400, 422):
        fields = "; ".join(f"{where}: {text}" for where, text in refused.causes if where)
        return (
            f"the server finds it invalid{f' ({fields})' if fields else ''}. Look for the key in "
            f"`clickline deploy render`; a cluster older than the objects says so too. {about}"
        )
    return str(refused)


_OF_SERVER = ("managedFields", "resourceVersion", "generation", "creationTimestamp", "uid", "selfLink")


def _content(item: Object) -> Object:
    """An object without what changes with every write."""
    metadata = {key: value for key, value in item["metadata"].items() if key not in _OF_SERVER}
    return {**{key: value for key, value in item.items() if key != "status"}, "metadata": metadata}


def _carry_out(kube: Kube, step: _Step, progress: Progress) -> None:
    if step.action == "unchanged":
        return
    if step.action == "replaced" and step.live is not None:
        kube.delete(step.live, propagation="Foreground")
        _wait_gone(kube, [step.live], progress, title=f"replacing {shown(step.item)}")
    try:
        if step.frees and step.live is not None:
            free(kube, step.live)
        kube.apply(step.item)
    except ApiRefused as refused:
        raise ClusterError(_remedy(step.item, step.live, refused)) from refused


def _look_for_left_overs(
    kube: Kube, objects: Sequence[Object], done: Applied, *, name: str, namespace: str, prune: bool
) -> None:
    now = {_key(item) for item in objects}
    there = found(kube, name=name, namespace=namespace)
    for item in there.objects:
        if _key(item) in now or item["kind"] in ("Namespace", "Pod"):
            continue
        if prune and item["kind"] not in _DATA:
            try:
                kube.delete(item)
            except ClusterError as error:
                done.failed[shown(item)] = str(error)
            else:
                done.pruned.append(shown(item))
        else:
            done.left_over.append(shown(item))
    done.notes += there.unseen


def _key(item: Object) -> tuple[str, str, str]:
    return _group(item), item["kind"], item["metadata"]["name"]


# ── what is ours ───────────────────────────────────────────────────────────────────────────────


def _ours(item: Object, name: str | None) -> bool:
    """What a controller has made has the labels of its owner, and is the controller's."""
    made = label(item, "managed-by") == "clickline" and label(item, "instance") == name
    return made and not item["metadata"].get("ownerReferences")


def _whose(item: Object) -> str:
    by, instance = label(item, "managed-by"), label(item, "instance")
    owners = item["metadata"].get("ownerReferences")
    if owners:
        return f"it belongs to {owners[0]['kind']} {owners[0]['name']}, and goes with it"
    if by == "clickline":
        return f"it is of the deployment {instance}"
    return f"app.kubernetes.io/managed-by is {by}" if by else "it has no label app.kubernetes.io/managed-by"


def found(kube: Kube, *, name: str, namespace: str) -> Found:
    """What a deployment has made, and nothing that its controllers have made in turn."""
    labels = {"app.kubernetes.io/managed-by": "clickline", "app.kubernetes.io/instance": name}
    objects: list[Object] = []
    unseen: list[str] = []
    for api_version, kind in MADE:
        try:
            items = kube.list(api_version, kind, namespace, labels)
        except ApiRefused as refused:
            if refused.status != 403:
                raise
            unseen.append(f"could not look for objects of kind {kind}: {refused}")
            continue
        objects += [item for item in items if _of_namespace(item, namespace)]
    return Found([item for item in objects if not item["metadata"].get("ownerReferences")], unseen)


def _of_namespace(item: Object, namespace: str) -> bool:
    """Whether an object that lies in no namespace belongs to this one: another may have a deployment of this name."""
    if item["kind"] == "Namespace":
        return bool(item["metadata"]["name"] == namespace)
    if item["kind"] == "PersistentVolume":
        return bool((item["spec"].get("claimRef") or {}).get("namespace") == namespace)
    return True


def going(there: Found, *, with_data: bool) -> list[Object]:
    """What `remove` takes away for sure, the last made first: nothing is left without what it needs to end well."""
    spared = ("Namespace",) if with_data else ("Namespace", *_DATA)
    return [item for item in reversed(there.objects) if item["kind"] not in spared]


def remove(
    kube: Kube,
    there: Found,
    *,
    name: str,
    namespace: str,
    with_data: bool,
    progress: Progress,
    seconds: float = _GONE_SECONDS,
) -> Removed:
    """Remove what `found` has told; claims and volumes only `with_data`, and then the namespace if it is ours and holds
    nothing else. Returns when all of it is gone."""
    leaving = going(there, with_data=with_data)
    result = Removed([], [shown(item) for item in there.objects if item not in leaving], list(there.unseen))
    for item in leaving:
        kube.delete(item, propagation="Foreground")
    pods = {"app.kubernetes.io/managed-by": "clickline", "app.kubernetes.io/instance": name}
    _wait_gone(
        kube,
        leaving,
        progress,
        title=f"removing {name}",
        seconds=seconds,
        also=lambda: kube.list("v1", "Pod", namespace, pods),
    )
    result.removed = [shown(item) for item in leaving]
    own = next((item for item in there.objects if item["kind"] == "Namespace"), None)
    if own is not None and with_data:
        others, unknown = _others(kube, namespace)
        if unknown:
            result.notes.append(
                f"namespace {namespace} stays: this user may not list {', '.join(unknown)} in it"
            )
        elif others:
            result.notes.append(f"namespace {namespace} stays: it also holds {_few(others)}")
        else:
            kube.delete(own)
            _wait_gone(kube, [own], progress, title=f"removing namespace {namespace}", seconds=seconds)
            result.removed.append(shown(own))
            result.kept.remove(shown(own))
    return result


_EVERYWHERE = {
    ("ServiceAccount", "default"),
    ("ConfigMap", "kube-root-ca.crt"),
    ("ConfigMap", "istio-ca-root-cert"),
    ("ConfigMap", "openshift-service-ca.crt"),
}
_PASSING = ("Event", "PodMetrics", "Lease", "EndpointSlice", "Endpoints")
"""Kinds that follow others, and are of no one's making."""


def _others(kube: Kube, namespace: str) -> tuple[list[str], list[str]]:
    """What a namespace holds beyond what each has, and the kinds that could not be listed."""
    others: list[str] = []
    unknown: list[str] = []
    for resource in kube.listable():
        if resource.kind in _PASSING:
            continue
        try:
            items = kube.list(resource.api_version, resource.kind, namespace)
        except ApiRefused as refused:
            if refused.status in (404, 405):
                continue
            unknown.append(resource.full_name)
            continue
        for item in items:
            if (item["kind"], item["metadata"]["name"]) in _EVERYWHERE:
                continue
            if not item["metadata"].get("ownerReferences"):
                others.append(shown(item))
    return others, unknown


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def _wait_gone(
    kube: Kube,
    items: Sequence[Object],
    progress: Progress,
    *,
    title: str,
    seconds: float = _GONE_SECONDS,
    also: Callable[[], list[Object]] = list,
) -> None:
    """Until the server has none of the objects, nor what `also` lists."""
    left = list(items)
    deadline = time.monotonic() + seconds
    progress.begin(title)
    try:
        while True:
            left = [item for item in left if _still(kube, item)]
            remaining = [*left, *(pod for pod in also() if not left)]
            if not remaining:
                return
            progress.note(f"{len(remaining)} left: {_few([shown(item) for item in remaining])}")
            progress.advance()
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"{_few([shown(item) for item in remaining])}: not gone {seconds:.0f} s after their removal was "
                    "asked for. The cluster goes on removing them; `clickline deploy status` shows what is left. "
                    "What stays has a finalizer: kubectl describe tells whose."
                )
            time.sleep(_POLL_SECONDS)
    finally:
        progress.end()


def _still(kube: Kube, item: Object) -> bool:
    live = kube.live(item)
    return live is not None and live["metadata"].get("uid") == item["metadata"].get("uid")
