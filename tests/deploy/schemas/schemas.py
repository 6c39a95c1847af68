"""Validates objects as an API server would: `from deploy_schemas.schemas import …` in any test.

Strict: a field that a schema does not know is a problem. Core objects are validated by Kubernetes' own OpenAPI schemas,
those of operators by their CRDs in ../shared/crds; pods, at any depth, also by the restricted standard.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

Object = Mapping[str, Any]

CRDS = Path(__file__).parents[4] / "shared" / "crds"
# Each object would need a megabyte of definitions.
kubernetes_validate.utils.schema_contents = cache(kubernetes_validate.utils.schema_contents)
_CORE = ("v1", "apps/v1", "batch/v1", "autoscaling/v2", "policy/v1")


def problems(one: Object) -> list[str]:
    """Problems of an object and its pods; skips the test if its CRD is not available."""
    api = one["apiVersion"]
    core = api in _CORE or api.partition("/")[0].endswith(".k8s.io")
    found = _core_problems(one) if core else _custom_problems(one)
    for spec in pod_specs(one):
        found += _core_problems(
            {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, "spec": spec}
        )
    return [f"{one['kind']} {one['metadata'].get('name')}: {problem}" for problem in found]


def _core_problems(one: Object) -> list[str]:
    try:
        kubernetes_validate.validate(dict(one), kubernetes_validate.latest_version(), strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{'.'.join(map(str, error.path))}: {error.message}"]
    return []


def _custom_problems(one: Object) -> list[str]:
    if not CRDS.is_dir():
        pytest.skip("the schemas of the operators are not here: no ../shared/crds beside the project")
    group, _, version = one["apiVersion"].partition("/")
    validator = _crd(group, version, one["kind"])
    if validator is None:
        return [f"no CRD knows {one['apiVersion']} {one['kind']}"]
    return [
        f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in validator.iter_errors(one)
    ]


@cache
def _crd(group: str, version: str, kind: str) -> jsonschema.Draft202012Validator | None:
    """Parsing a schema takes seconds, so only the file that contains the kind is read."""
    for file in sorted(CRDS.rglob("*.yaml")):
        written = file.read_text()
        if f"\n  group: {group}\n" in written and f"\n    kind: {kind}\n" in written:
            definition = yaml.load(written, Loader=yaml.CSafeLoader)
            for one in definition["spec"]["versions"]:
                if one["name"] == version:
                    schema = _strict(one["schema"]["openAPIV3Schema"])
                    schema["properties"]["metadata"] = {"type": "object"}
                    return jsonschema.Draft202012Validator(schema)
    return None


def _strict(schema: Any) -> Any:
    """A Kubernetes schema as JSON Schema that rejects unknown fields."""
    if isinstance(schema, list):
        return [_strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    made = {
        key: {name: _strict(one) for name, one in value.items()} if key == "properties" else _strict(value)
        for key, value in schema.items()
        if key != "format" and not key.startswith("x-kubernetes-")
    }
    open_to_all = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if "properties" in schema and not open_to_all:
        made["additionalProperties"] = False
    if schema.get("nullable") and isinstance(made.get("type"), str):
        made["type"] = [made["type"], "null"]
    return made


# ── pods ───────────────────────────────────────────────────────────────────────────────────────


def pod_specs(found: Any) -> Iterator[dict[str, Any]]:
    """Every pod in an object: templates, Argo's steps, objects that a step creates."""
    if isinstance(found, list):
        for one in found:
            yield from pod_specs(one)
    elif isinstance(found, Mapping):
        if isinstance(found.get("containers"), list):
            yield dict(found)
            return
        if "container" in found and "podSpecPatch" in found:  # an Argo step; Argo names its container
            pod = ("initContainers", "volumes", "securityContext", "nodeSelector", "tolerations")
            main = {"name": "main", **found["container"]}
            yield {"containers": [main], **{key: found[key] for key in pod if key in found}}
            return
        if isinstance(found.get("manifest"), str):
            yield from pod_specs(list(yaml.safe_load_all(found["manifest"])))
        for one in found.values():
            yield from pod_specs(one)


def commands(found: Any) -> Iterator[list[str]]:
    """The command line of every container, except those that an operator sets."""
    for spec in pod_specs(found):
        for container in (*spec.get("initContainers", ()), *spec["containers"]):
            line = [*container.get("command", ()), *container.get("args", ())]
            if line:
                yield line


_VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}


def restricted_problems(spec: Object) -> list[str]:
    """Violations of the restricted Pod Security Standard and of our rule of a read-only root."""
    found = [key for key in ("hostNetwork", "hostPID", "hostIPC") if spec.get(key)]
    for volume in spec.get("volumes", ()):
        found += [
            f"volume {volume['name']}: {kind}" for kind in volume.keys() - {"name"} if kind not in _VOLUMES
        ]
    whole = spec.get("securityContext", {})
    for container in (*spec.get("initContainers", ()), *spec["containers"]):
        own = container.get("securityContext", {})
        capabilities = own.get("capabilities", {})
        wrong = {
            "privileged": own.get("privileged", False),
            "allowPrivilegeEscalation": own.get("allowPrivilegeEscalation") is not False,
            "root": not own.get("runAsNonRoot", whole.get("runAsNonRoot", False)),
            "user 0": own.get("runAsUser", whole.get("runAsUser")) == 0,
            "capabilities": "ALL" not in capabilities.get("drop", ()),
            "more capabilities": set(capabilities.get("add", ())) - {"NET_BIND_SERVICE"},
            "seccomp": _profile(own, whole) not in ("RuntimeDefault", "Localhost"),
            "host ports": any("hostPort" in port for port in container.get("ports", ())),
            "procMount": own.get("procMount", "Default") != "Default",
            "writable root": own.get("readOnlyRootFilesystem") is not True,
        }
        found += [f"{container['name']}: {name}" for name, is_wrong in wrong.items() if is_wrong]
    return found


def _profile(own: Object, whole: Object) -> str | None:
    profile = own.get("seccompProfile", whole.get("seccompProfile", {}))
    kind: str | None = profile.get("type")
    return kind
