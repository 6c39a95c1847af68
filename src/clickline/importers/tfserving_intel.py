"""Intel's Wide & Deep on Kubernetes with TensorFlow Serving: the parameters that its kustomize packages are set by.

A line is `NAME=value`, `NAME: value`, a row of the table that `kustomize cfg list-setters` prints, or one of the
commands `kustomize cfg set . NAME value -R` and `kustomize edit set namespace NAME`.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from clickline.importers.config_draft import Draft
from clickline.importers.source_files import Origin, read, wrong

_NAME = r"[A-Z][A-Z0-9_]*"
_COMMAND = re.compile(r"(?:kustomize|kpt) +cfg +set +(\S+) +(\S+) +(\S+)(?: +-R)?", re.ASCII)
_NAMESPACE = re.compile(r"kustomize +edit +set +namespace +(\S+)", re.ASCII)
_PAIR = re.compile(rf"(?:export +)?({_NAME}) *[=:] *(.*)", re.ASCII)
_ROW = re.compile(rf"\|? *({_NAME}) *(?:\|| ) *([^|\s]+)(?: *\|.*| +.*)?", re.ASCII)
_HEAD = re.compile(r"\|? *NAME *\|? *VALUE\b.*")
_RULE = re.compile(r"[-|+: ]+")
_FORMS = "Write NAME=value, or keep the lines of `kustomize cfg set . NAME value -R`."

_FOLDERS = "datasets, checkpoints and versions lie in home."
_NAMES = "processes have ids, not names."
_NONE = {
    "GROUP_NAME": _NAMES,
    "USER_NAME": _NAMES,
    "OUTPUT_DIR": _FOLDERS,
    "CHECKPOINT_DIR": f"{_FOLDERS} Training goes on from its own checkpoint by itself.",
    "MODEL_DIR": "the code is the installed package.",
    "STEPS": "train.epochs says how long it learns; where the gate refuses, it goes on from where it was.",
}
_TOGETHER = (
    *("DATASET_DIR", "NFS_SERVER", "NFS_PATH", "PVC_NAME", "PVC_PATH", "FS_ID", "GROUP_ID", "USER_ID"),
    *("REPLICAS", "RETRY_LIMIT", "TARGET_ACCURACY", "TF_SERVING_PORT", "namespace"),
)
_IDENTITY = {"FS_ID": "fs_group", "GROUP_ID": "group", "USER_ID": "user"}
_UNSET_SERVER = "0.0.0.0"  # what the packages come with


class _Parameter(NamedTuple):
    value: str
    origin: Origin


def tfserving_intel(params: Path) -> Draft:
    """The draft from a file of parameters."""
    draft = Draft(f"the parameters of Intel's Wide & Deep, {params}")
    given = _parameters(params, draft)
    draft.put("name", "wide-deep", why="the model's name in requests")
    _rows(draft, given, params)
    _network(draft)
    _gate(draft, given)
    _serving(draft, given)
    _volumes(draft, given)
    for name, key in _IDENTITY.items():
        if name in given and given[name].value == "0":
            draft.leave(
                given[name].origin, f"is root, and no pod runs as root: deploy.identity.{key} is 10001."
            )
        elif name in given:
            draft.put(f"deploy.identity.{key}", given[name].value, given[name].origin)
    for name, (_, origin) in given.items():
        if name in _NONE:
            draft.leave(origin, _NONE[name])
        elif name not in _TOGETHER:
            draft.leave(origin, "is not a parameter that this import knows. Its value was not looked at.")
    draft.hint(
        "Fixed in Intel's code and not taken over: 26 columns hashed into 1000 buckets each (ids have 64 bits here, "
        "and do not collide), numbers scaled with statistics of the eval rows too (only the training rows count here)."
    )
    return draft


def _parameters(path: Path, draft: Draft) -> dict[str, _Parameter]:
    found: dict[str, _Parameter] = {}
    for number, line in enumerate(read(path).splitlines(), 1):
        text = line.strip()
        if not text or text.startswith("#") or _HEAD.fullmatch(text) or _RULE.fullmatch(text):
            continue
        place = Origin(str(path), number, "")
        name, value = _parameter(text, place)
        if name in found:
            draft.leave(found[name].origin, f"is given again in line {number}, which counts.")
        found[name] = _Parameter(value, place._replace(key=name))
    if not found:
        raise wrong(Origin(str(path), 0, ""), "holds no parameter.", _FORMS)
    return found


def _parameter(text: str, place: Origin) -> tuple[str, str]:
    if match := _NAMESPACE.fullmatch(text):
        return "namespace", match[1]
    if match := _COMMAND.fullmatch(text):
        return match[2], match[3].strip("\"'")
    if match := _PAIR.fullmatch(text) or _ROW.fullmatch(text):
        value = match[2].strip()
        if value[:1] in ("'", '"'):
            if len(value) < 2 or value[-1] != value[0]:
                raise wrong(place._replace(key=match[1]), "has a quote that is not closed.", _FORMS)
            value = value[1:-1]
        return match[1], value
    word = re.match(r"[\w.-]*", text, re.ASCII)
    beginning = (word[0] if word else "")[:40] or text[:1]
    raise wrong(place, f"begins with {beginning!r} and is no parameter.", _FORMS)


def _rows(draft: Draft, given: dict[str, _Parameter], params: Path) -> None:
    if not given.get("DATASET_DIR", _Parameter("", Origin("", 0, ""))).value:
        place = (
            given["DATASET_DIR"].origin if "DATASET_DIR" in given else Origin(str(params), 0, "DATASET_DIR")
        )
        raise wrong(place, "is missing or empty.", "Give the folder that holds train.csv and eval.csv.")
    folder, origin = given["DATASET_DIR"]
    draft.put(
        "data.format", "criteo", why="label, I1 … I13, C1 … C26 with commas between, as Intel's csv files"
    )
    draft.put("data.train", f"{folder.rstrip('/')}/train.csv", origin)
    draft.put("data.eval", f"{folder.rstrip('/')}/eval.csv", origin)


def _network(draft: Draft) -> None:
    fixed = "as Intel's code has it"
    draft.put("model.name", "wide_deep", why=fixed)
    draft.put("model.embedding_dim", 32, why=fixed)
    draft.put("model.hidden", [1024, 512, 256], why=fixed)
    draft.put("train.batch_size", 512, why=fixed)


def _gate(draft: Draft, given: dict[str, _Parameter]) -> None:
    if "TARGET_ACCURACY" in given:
        why = (
            "a model that never expects a click reaches 0.744 on Criteo's rows, so ask for something that such a one "
            "cannot reach too, as `auc: 0.75`"
        )
        draft.put("gate.accuracy", given["TARGET_ACCURACY"].value, given["TARGET_ACCURACY"].origin, why=why)
    if "RETRY_LIMIT" in given:
        value, origin = given["RETRY_LIMIT"]
        draft.put("gate.retries", value, origin, why="how often to train on when the gate refuses")
        draft.put("deploy.workflow.retries", value, origin, why="how often a step that crashed begins again")


def _serving(draft: Draft, given: dict[str, _Parameter]) -> None:
    if "namespace" in given:
        value, origin = given["namespace"]
        draft.put("deploy.namespace", value, origin)
        draft.put("deploy.create_namespace", False, origin, why="it is there already")
    if "REPLICAS" in given:
        value, origin = given["REPLICAS"]
        draft.put("deploy.workflow.kind", "argo", why="the package is the pipeline, a workflow of Argo")
        draft.put("deploy.serving.replicas", value, origin)
        draft.put("deploy.serving.max_replicas", None, origin, why="always so many")
        draft.put("deploy.serving.service", "NodePort", why="as Intel's Service")
    if "TF_SERVING_PORT" in given:
        value, origin = given["TF_SERVING_PORT"]
        if value == "8501":
            draft.leave(
                origin,
                "is 8501, behind which Intel's Service has gRPC; here serve.grpc_port is 8500, serve.http_port 8501. "
                "Clients from outside come by a node's port: deploy.serving.grpc_node_port fixes it.",
            )
        else:
            draft.put(
                "serve.grpc_port", value, origin, why="gRPC, as behind Intel's Service; HTTP is on 8501"
            )


def _volumes(draft: Draft, given: dict[str, _Parameter]) -> None:
    """NFS when its server was set, else the claim; the volume is mounted where DATASET_DIR is."""
    data, data_origin = given["DATASET_DIR"]
    server, claim = given.get("NFS_SERVER"), given.get("PVC_NAME")
    by_nfs = server is not None and server.value != _UNSET_SERVER and "NFS_PATH" in given
    if by_nfs and server is not None:
        path = given["NFS_PATH"]
        for role in ("data", "models"):
            draft.put(f"deploy.storage.{role}.kind", "nfs", server.origin)
            draft.put(f"deploy.storage.{role}.server", server.value, server.origin)
            draft.put(f"deploy.storage.{role}.path", path.value, path.origin)
        top = path
    elif claim is not None:
        for role in ("data", "models"):
            draft.put(f"deploy.storage.{role}.kind", "existing", claim.origin)
            draft.put(f"deploy.storage.{role}.claim", claim.value, claim.origin)
        top = given.get("PVC_PATH", _Parameter("", data_origin))
    else:
        return
    inside = top.value and PurePosixPath(data).is_relative_to(top.value)
    mount = (top.value, top.origin) if inside else (data, data_origin)
    draft.put("deploy.storage.data.mount", mount[0], mount[1], why="the volume is seen there")
    for name in ("PVC_NAME", "PVC_PATH") if by_nfs else ("NFS_SERVER", "NFS_PATH"):
        if name in given:
            other = "NFS_SERVER is set" if by_nfs else "NFS_SERVER is not set"
            draft.leave(
                given[name].origin, f"is not used, since {other}: deploy.storage has one kind of volume."
            )
    if not by_nfs and not inside and "PVC_PATH" in given:
        draft.leave(given["PVC_PATH"].origin, "holds no DATASET_DIR; home is mounted by itself.")
