"""Checks what a cluster must have before an apply: APIs, the namespace, secrets, claims, storage classes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from clickline.deploy.kube_client import ApiError, Kube, if_allowed
from clickline.deploy.objects import WORKING_FOLDER, Object, describe, label
from clickline.errors import ClusterError


class _Operator(NamedTuple):
    """An operator, where to get it, and the setting that does without it."""

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
"""The operator of each API group that a plain cluster does not have."""


def check_apis(kube: Kube, objects: Sequence[Object]) -> None:
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
        f"{', '.join(describe(item) for item in items)} needs {api_version}, and the cluster of {kube.where}"
    )
    has = kube.versions(group) if group else []
    lacks = "does not have it"
    if has:
        lacks = f"has {group} in {', '.join(has)} only" if version not in has else f"has no {kind} in it"
    remedy, operator = "Update the cluster", _OPERATORS.get(group)
    if operator is not None:
        verb = "Update" if has else "Install"
        remedy = f"{verb} {operator.name} ({operator.site}), or set {operator.instead}"
    return f"{needed} {lacks}. {remedy}."


def check_namespace(kube: Kube, objects: Sequence[Object], namespace: str) -> Object | None:
    """Check the namespace; returns it if it has to be created."""
    item = next((one for one in objects if one["kind"] == "Namespace"), None)
    live = if_allowed(kube.get, "v1", "Namespace", namespace)
    if isinstance(live, ApiError):
        if item is None:
            return None  # this user may still be allowed to work in it
        raise ClusterError(f"{live} {_EXISTING_NAMESPACE}") from live
    if live is not None and live["metadata"].get("deletionTimestamp"):
        raise ClusterError(
            f"namespace {namespace} is being deleted. Wait until it is gone, then apply again."
        )
    if item is None:
        if live is None:
            raise ClusterError(
                f"namespace {namespace} does not exist, and deploy.create_namespace is false. "
                f"Create it (kubectl create namespace {namespace}), or set deploy.create_namespace: true."
            )
        return None
    if live is None:
        return item
    if not _is_ours(live, label(item, "instance")):
        raise ClusterError(
            f"namespace {namespace} exists and was not created by this deployment ({_owner_of(live)}). To use "
            "it unchanged, set deploy.create_namespace: false; or choose another deploy.namespace."
        )
    return None


_EXISTING_NAMESPACE = "To deploy into an existing namespace, set deploy.create_namespace: false."


def create_namespace(kube: Kube, item: Object) -> None:
    try:
        kube.apply(item)
    except ApiError as refused:
        raise ClusterError(f"{refused} {_EXISTING_NAMESPACE}") from refused


class Conflict(ClusterError):
    """An existing object prevents the change."""


def check_owner(live: Object, name: str | None) -> None:
    """Raises Conflict if this deployment did not create an object."""
    if not _is_ours(live, name):
        raise Conflict(
            f"{describe(live)} exists and was not created by this deployment ({_owner_of(live)}). "
            "Rename the deployment (name:), choose another deploy.namespace, or delete that object."
        )


def _is_ours(item: Object, name: str | None) -> bool:
    """Whether this deployment created an object. What a controller created has the labels of its owner, too."""
    made = label(item, "managed-by") == "clickline" and label(item, "instance") == name
    return made and not item["metadata"].get("ownerReferences")


def _owner_of(item: Object) -> str:
    by, instance = label(item, "managed-by"), label(item, "instance")
    owners = item["metadata"].get("ownerReferences")
    if owners:
        return f"it belongs to {owners[0]['kind']} {owners[0]['name']}"
    if by == "clickline":
        return f"it belongs to the deployment {instance}"
    return f"app.kubernetes.io/managed-by is {by}" if by else "it has no label app.kubernetes.io/managed-by"


class _Reference(NamedTuple):
    api_version: str
    kind: str
    name: str
    section: str
    """The config section that names it."""


def _references(value: Any, key: str = "") -> Iterator[_Reference]:
    """All references in an object to objects that must exist."""
    if isinstance(value, list):
        for one in value:
            yield from _references(one, key)
    if not isinstance(value, dict):
        return
    if key in ("secretKeyRef", "secretRef", "imagePullSecrets") and "name" in value:
        if not value.get("optional"):
            yield _Reference("v1", "Secret", value["name"], "deploy.secrets or deploy.pull_secrets")
    elif key == "secret" and ("secretName" in value or "name" in value):
        if not value.get("optional"):
            yield _Reference("v1", "Secret", value.get("secretName") or value["name"], "deploy.secrets")
    elif key == "persistentVolumeClaim" and "claimName" in value:
        yield _Reference("v1", "PersistentVolumeClaim", value["claimName"], "deploy.storage")
    if value.get("priorityClassName"):
        name = value["priorityClassName"]
        yield _Reference("scheduling.k8s.io/v1", "PriorityClass", name, "deploy.nodes.priority_class")
    for inner, one in value.items():
        yield from _references(one, inner)
    if value.get("apiVersion") == "batch.volcano.sh/v1alpha1" and value["spec"].get("queue"):
        name = value["spec"]["queue"]
        yield _Reference("scheduling.volcano.sh/v1beta1", "Queue", name, "deploy.training.queue")


class MissingReferences(ClusterError):
    """Referenced objects that the cluster does not have. `namespaced`: all of them belong into the namespace."""

    def __init__(self, problems: Sequence[str], missing: Sequence[str], *, namespaced: bool) -> None:
        super().__init__("\n".join(problems))
        self.missing = tuple(missing)
        self.namespaced = namespaced


def check_references(kube: Kube, objects: Sequence[Object], namespace: str, notes: list[str]) -> None:
    """Raises MissingReferences with everything that is missing, and how to create it."""
    ours = {(item["apiVersion"], item["kind"], item["metadata"]["name"]) for item in objects}
    wanted: dict[tuple[str, str, str], tuple[str, Object]] = {}
    for item in objects:
        for api_version, kind, name, section in _references(item):
            if (api_version, kind, name) not in ours:
                wanted.setdefault((api_version, kind, name), (section, item))
    missing: list[str] = []
    problems: list[str] = []
    namespaced = True
    for (api_version, kind, name), (section, item) in wanted.items():
        resource = kube.resource(api_version, kind)
        if resource is None:
            _add_note(notes, f"could not check that {kind} {name} exists: the cluster has no {api_version}")
            continue
        there = if_allowed(kube.get, api_version, kind, name, namespace)
        if isinstance(there, ApiError):
            _add_note(notes, f"could not check that {kind} {name} exists: this user may not read it (403)")
            continue
        if there is None:
            namespaced = namespaced and resource.namespaced
            missing.append(f"{kind} {name}")
            how = (
                f":\n  kubectl {_create_secret_command(objects, name, namespace)}"
                if kind == "Secret"
                else "."
            )
            problems.append(
                f"{describe(item)} needs {kind} {name}, and the cluster has none. Create it, or correct {section}{how}"
            )
    classes = _storage_classes(kube, objects, notes)
    if problems or classes:
        raise MissingReferences([*problems, *classes], missing, namespaced=namespaced and not classes)


def _add_note(notes: list[str], note: str) -> None:
    if note not in notes:
        notes.append(note)


def _create_secret_command(objects: Sequence[Object], name: str, namespace: str) -> str:
    """The kubectl arguments that create a Secret with the keys that the pods use."""
    create = f"-n {namespace} create secret"
    used = [one for item in objects for one in _secret_uses(item, name)]
    files = {key: path for key, path in used if path is not None}
    if files:
        return f"{create} generic {name} " + " ".join(
            f"--from-file={key}={path}" for key, path in sorted(files.items())
        )
    if ("envFrom", None) in used:
        return f"{create} generic {name} --from-env-file=FILE   # one line NAME=VALUE per variable"
    if ("imagePullSecrets", None) in used:
        return (
            f"{create} docker-registry {name} --docker-server=REGISTRY --docker-username=USER "
            "--docker-password=PASSWORD"
        )
    return f"{create} generic {name} …"


def _secret_uses(value: Any, secret: str) -> Iterator[tuple[str, str | None]]:
    """How pods use a Secret: (key, file) pairs, or the name of the list that it is in."""
    if isinstance(value, list):
        for one in value:
            yield from _secret_uses(one, secret)
    if not isinstance(value, dict):
        return
    mounted = {
        volume["name"]
        for volume in value.get("volumes") or ()
        if (volume.get("secret") or {}).get("secretName") == secret
    }
    single = [value["container"]] if isinstance(value.get("container"), dict) else []  # an Argo step
    for container in (*(value.get("initContainers") or ()), *(value.get("containers") or ()), *single):
        if any((one.get("secretRef") or {}).get("name") == secret for one in container.get("envFrom") or ()):
            yield "envFrom", None
        for mount in container.get("volumeMounts") or ():
            if mount["name"] in mounted and "subPath" in mount:
                yield mount["subPath"], mount["mountPath"].removeprefix(f"{WORKING_FOLDER}/")
    if any(one.get("name") == secret for one in value.get("imagePullSecrets") or ()):
        yield "imagePullSecrets", None
    for one in value.values():
        yield from _secret_uses(one, secret)


def _storage_classes(kube: Kube, objects: Sequence[Object], notes: list[str]) -> list[str]:
    claims = [item for item in objects if item["kind"] == "PersistentVolumeClaim"]
    for item in objects:
        templates = item.get("spec", {}).get("volumeClaimTemplates") or ()
        claims += [{**one, "kind": "claim template"} for one in templates]
    if not claims:
        return []
    classes = if_allowed(kube.list, "storage.k8s.io/v1", "StorageClass")
    if isinstance(classes, ApiError):
        _add_note(notes, "could not check the storage classes: this user may not read them (403)")
        return []
    names = sorted(one["metadata"]["name"] for one in classes)
    default = any(
        (one["metadata"].get("annotations") or {}).get("storageclass.kubernetes.io/is-default-class")
        == "true"
        for one in classes
    )
    allowed = f"Allowed: {', '.join(names)}." if names else "The cluster has none."
    problems = []
    for claim in claims:
        spec = claim["spec"]
        wanted = spec.get("storageClassName")
        if spec.get("volumeName") or wanted == "":
            continue  # it is bound to a volume by name
        if wanted is None and not default:
            problems.append(
                f"{describe(claim)} names no storage class, and the cluster has no default one. {allowed} "
                "Set deploy.storage.*.storage_class, or use another kind of volume."
            )
        elif wanted is not None and wanted not in names:
            problems.append(
                f"{describe(claim)} needs storage class {wanted}, and the cluster has none of that name. {allowed} "
                "Correct deploy.storage.*.storage_class."
            )
    return problems
