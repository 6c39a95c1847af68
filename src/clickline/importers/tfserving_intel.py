"""Imports the kustomize parameters of Intel's Wide & Deep on Kubernetes with TensorFlow Serving.

A line is `NAME=value`, `NAME: value`, a row of the table that `kustomize cfg list-setters` prints, or one of the
commands `kustomize cfg set . NAME value -R`, `kustomize edit set namespace NAME` and `argo submit … -p NAME=value`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from clickline.importers.config_draft import ConfigDraft
from clickline.importers.source_files import Origin, read_source, source_error

_NAME = r"[A-Z][A-Z0-9_]*"
_COMMAND = re.compile(r"(?:kustomize|kpt) +cfg +set +(\S+) +(\S+) +(\S+)(?: +-R)?", re.ASCII)
_NAMESPACE = re.compile(r"kustomize +edit +set +namespace +(\S+)", re.ASCII)
_PAIR = re.compile(rf"(?:export +)?({_NAME}) *[=:] *(.*)", re.ASCII)
_ROW = re.compile(rf"\|? *({_NAME}) *(?:\|| ) *([^|\s]+)(?: *\|.*| +.*)?", re.ASCII)
_HEAD = re.compile(r"\|? *NAME *\|? *VALUE\b.*")
_RULE = re.compile(r"[-|+: ]+")
_PARAMETER_FORMS = (
    "Write NAME=value, or keep the lines of `kustomize cfg set . NAME value -R` or "
    "`argo submit … -p NAME=value`."
)

_FOLDERS = "datasets, checkpoints and versions are in home."
_NAMES = "processes run under user and group ids, not names."
_NO_COUNTERPART = {
    "GROUP_NAME": _NAMES,
    "USER_NAME": _NAMES,
    "OUTPUT_DIR": _FOLDERS,
    "CHECKPOINT_DIR": f"{_FOLDERS} Training resumes from its own checkpoint automatically.",
    "MODEL_DIR": "the model code is part of the installed package.",
    "STEPS": "train.epochs limits training; if the gate fails, training continues from where it stopped.",
}
_HANDLED = (
    *("DATASET_DIR", "NFS_SERVER", "NFS_PATH", "PVC_NAME", "PVC_PATH", "FS_ID", "GROUP_ID", "USER_ID"),
    *("REPLICAS", "RETRY_LIMIT", "TARGET_ACCURACY", "TF_SERVING_PORT", "namespace"),
)
_IDENTITY = {"FS_ID": "fs_group", "GROUP_ID": "group", "USER_ID": "user"}
_UNSET_SERVER = "0.0.0.0"  # what the packages come with


class _Parameter(NamedTuple):
    value: str
    origin: Origin


def tfserving_intel(params: Path, overrides: Sequence[str] = ()) -> ConfigDraft:
    """A draft config from a parameter file, and from `NAME=value` that override it."""
    draft = ConfigDraft(f"the parameters of Intel's Wide & Deep, {params}")
    given = _parameters(params, draft)
    for text in overrides:
        place = Origin("-p", 0, "")
        name, value = _parameter(text, place)
        if name in given:
            draft.skip(given[name].origin, f"is overridden by -p {name}.")
        given[name] = _Parameter(value, place._replace(key=name))
    draft.put("name", "wide-deep", why="the model name in requests")
    _data(draft, given, params)
    _network(draft)
    _gate(draft, given)
    _serving(draft, given)
    _volumes(draft, given)
    for name, key in _IDENTITY.items():
        if name in given and given[name].value == "0":
            draft.skip(
                given[name].origin, f"is root, but no pod runs as root: deploy.identity.{key} is 10001."
            )
        elif name in given:
            draft.put(f"deploy.identity.{key}", given[name].value, given[name].origin)
    for name, (_, origin) in given.items():
        if name in _NO_COUNTERPART:
            draft.skip(origin, _NO_COUNTERPART[name])
        elif name not in _HANDLED:
            draft.skip(origin, "is a parameter that the importer does not know. Its value was not read.")
    draft.hint(
        "Hard-coded by Intel and not imported: 26 columns hashed into 1000 buckets each (here ids have 64 bits and do "
        "not collide), and numbers scaled with statistics that include the eval rows (here only the training rows)."
    )
    return draft


def _parameters(path: Path, draft: ConfigDraft) -> dict[str, _Parameter]:
    parameters: dict[str, _Parameter] = {}
    for number, line in enumerate(read_source(path).splitlines(), 1):
        text = line.strip()
        if not text or text.startswith("#") or _HEAD.fullmatch(text) or _RULE.fullmatch(text):
            continue
        place = Origin(str(path), number, "")
        for name, value in _line(text, place):
            if name in parameters:
                draft.skip(parameters[name].origin, f"is overridden in line {number}.")
            parameters[name] = _Parameter(value, place._replace(key=name))
    if not parameters:
        raise source_error(Origin(str(path), 0, ""), "contains no parameters.", _PARAMETER_FORMS)
    return parameters


def _line(text: str, place: Origin) -> list[tuple[str, str]]:
    """The parameters of one line: several in `argo submit FILE -n NAMESPACE -p NAME=value …`, else one."""
    if not text.startswith("argo submit"):
        return [_parameter(text, place)]
    try:
        words = iter(shlex.split(text)[2:])
    except ValueError:
        raise source_error(place, "has an unclosed quote.", _PARAMETER_FORMS) from None
    found = []
    for word in words:
        flag, _, value = word.partition("=")
        if flag in ("-p", "--parameter"):
            found.append(_parameter(value or next(words, ""), place))
        elif flag in ("-n", "--namespace"):
            found.append(("namespace", value or next(words, "")))
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
                raise source_error(place._replace(key=match[1]), "has an unclosed quote.", _PARAMETER_FORMS)
            value = value[1:-1]
        return match[1], value
    word = re.match(r"[\w.-]*", text, re.ASCII)
    beginning = (word[0] if word else "")[:40] or text[:1]
    raise source_error(place, f"begins with {beginning!r} and is not a parameter.", _PARAMETER_FORMS)


def _data(draft: ConfigDraft, given: dict[str, _Parameter], params: Path) -> None:
    if not given.get("DATASET_DIR", _Parameter("", Origin("", 0, ""))).value:
        place = (
            given["DATASET_DIR"].origin if "DATASET_DIR" in given else Origin(str(params), 0, "DATASET_DIR")
        )
        raise source_error(place, "is missing or empty.", "Name the folder with train.csv and eval.csv.")
    folder, origin = given["DATASET_DIR"]
    if folder.endswith(".tfrecords"):
        why = "the records of preprocess_csv_tfrecords.py: scaled numbers, hash buckets"
        draft.put("data.format", "intel_tfrecord", origin, why=why)
        draft.put("data.train", folder, origin)
        eval_name = PurePosixPath(folder).name.replace("train", "eval")
        if eval_name != PurePosixPath(folder).name:
            draft.put("data.eval", str(PurePosixPath(folder).with_name(eval_name)), origin)
        return
    draft.put(
        "data.format", "criteo", why="label, I1 … I13, C1 … C26, comma-separated, as in Intel's csv files"
    )
    draft.put("data.train", f"{folder.rstrip('/')}/train.csv", origin)
    draft.put("data.eval", f"{folder.rstrip('/')}/eval.csv", origin)


def _network(draft: ConfigDraft) -> None:
    fixed = "as in Intel's code"
    draft.put("model.name", "wide_deep", why=fixed)
    draft.put("model.embedding_dim", 32, why=fixed)
    draft.put("model.hidden", [1024, 512, 256], why=fixed)
    draft.put("train.batch_size", 512, why=fixed)


def _gate(draft: ConfigDraft, given: dict[str, _Parameter]) -> None:
    if "TARGET_ACCURACY" in given:
        why = (
            "a model that never predicts a click reaches 0.744 on Criteo, so also require something that it cannot "
            "reach, such as `auc: 0.75`"
        )
        draft.put("gate.accuracy", given["TARGET_ACCURACY"].value, given["TARGET_ACCURACY"].origin, why=why)
    if "RETRY_LIMIT" in given:
        value, origin = given["RETRY_LIMIT"]
        draft.put("gate.extra_epochs", value, origin, why="how many more epochs to train if the gate fails")
        draft.put("deploy.workflow.retries", value, origin, why="how often a failed step is retried")


def _serving(draft: ConfigDraft, given: dict[str, _Parameter]) -> None:
    if "namespace" in given:
        value, origin = given["namespace"]
        draft.put("deploy.namespace", value, origin)
        draft.put("deploy.create_namespace", False, origin, why="it already exists")
    if "REPLICAS" in given:
        value, origin = given["REPLICAS"]
        draft.put("deploy.workflow.kind", "argo", why="the package is the pipeline, an Argo Workflow")
        draft.put("deploy.serving.replicas", value, origin)
        draft.put("deploy.serving.max_replicas", None, origin, why="a fixed number of replicas")
        draft.put("deploy.serving.service", "NodePort", why="as in Intel's Service")
    if "TF_SERVING_PORT" in given:
        value, origin = given["TF_SERVING_PORT"]
        if value == "8501":
            draft.skip(
                origin,
                "is 8501, which Intel's Service uses for gRPC; here serve.grpc_port is 8500 and serve.http_port 8501. "
                "Clients outside the cluster use a node port, which deploy.serving.grpc_node_port sets.",
            )
        else:
            draft.put("serve.grpc_port", value, origin, why="gRPC, as in Intel's Service; HTTP is on 8501")


def _volumes(draft: ConfigDraft, given: dict[str, _Parameter]) -> None:
    """Import the NFS server if it was set, else the claim; the volume is mounted where DATASET_DIR is."""
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
    draft.put("deploy.storage.data.mount", mount[0], mount[1], why="where the volume is mounted")
    for name in ("PVC_NAME", "PVC_PATH") if by_nfs else ("NFS_SERVER", "NFS_PATH"):
        if name in given:
            other = "NFS_SERVER is set" if by_nfs else "NFS_SERVER is not set"
            draft.skip(
                given[name].origin, f"is not used, because {other}: deploy.storage has one kind of volume."
            )
    if not by_nfs and not inside and "PVC_PATH" in given:
        draft.skip(given["PVC_PATH"].origin, "does not contain DATASET_DIR; home is mounted automatically.")
