"""What is said over HTTP: TensorFlow Serving's REST interface, the Open Inference Protocol, and our own ranking."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import numpy as np
import orjson
from numpy.typing import NDArray

from clickline.client.columnar import Numbers, Strings, Table, Texts, as_doubles
from clickline.client.packing import packed
from clickline.client.request import Ask, Reply
from clickline.client.results import ModelInfo, Prediction, Ranking, TensorInfo

_OUTPUTS = ("logistic", "logits")
_JSON = {"content-type": "application/json"}
_DATATYPES = {"float32": "FP32", "float64": "FP64", "int64": "INT64", "uint64": "UINT64"}
_TOLD = {"DT_FLOAT": "FP32", "DT_DOUBLE": "FP64", "DT_STRING": "BYTES"}  # others lose their DT_
_SPLIT = "inference-header-content-length"


class TfServingHttp:
    """TensorFlow Serving's REST interface, in its columnar form."""

    def __init__(self, model: str | None) -> None:
        self.model = model or "clickline"  # a path needs a name: the one that a config without `name` has

    def predict(self, table: Table, version: int | None) -> Ask[Prediction]:
        body = _dumps({"inputs": _json_columns(table)})
        return Ask(f"{self._path('v1', version)}:predict", body, _predicted, _JSON)

    def rank(self, context: Table | None, candidates: Table, top: int | None) -> Ask[Ranking]:
        shared = {} if context is None else _json_columns(context)
        document: dict[str, Any] = {
            "context": {name: values[0] for name, values in shared.items()},
            "candidates": _json_columns(candidates),
        }
        if top is not None:
            document["top_k"] = top
        return Ask(f"{self._path('v1', None)}:rank", _dumps(document), _ranked, _JSON)

    def metadata(self) -> Ask[ModelInfo]:
        return Ask(f"{self._path('v1', None)}/metadata", None, _signature)

    def ready(self) -> Ask[bool]:
        return Ask("/v2/health/ready", None, lambda reply: True)  # if not, the status says so

    def _path(self, api: str, version: int | None) -> str:
        chosen = "" if version is None else f"/versions/{version}"
        return f"/{api}/models/{quote(self.model, safe='')}{chosen}"


def answering_version(reply: Reply) -> int | None:
    """The version that our servers name in a header, where the protocol has no place for it."""
    version = reply.headers.get("clickline-version", "")
    return int(version) if version.isdigit() else None


def _dumps(document: Any) -> bytes:
    return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)  # NaN becomes null: missing


def _json_columns(table: Table) -> dict[str, Any]:
    table = table.unmarked()
    joined = packed({n: c for n, c in table.columns.items() if isinstance(c, Texts)}, "bare")
    return {
        name: _number_values(column)
        if isinstance(column, Numbers)
        else _by_row(
            column.values if isinstance(column, Strings) else _texts(column, joined[name]), column.width
        )
        for name, column in table.columns.items()
    }


def _number_values(column: Numbers) -> NDArray[Any]:
    values_N = column.values_N
    if values_N.dtype == np.float32:  # written as doubles, so that all protocols say the same number
        values_N = as_doubles(values_N)
    values_N = np.ascontiguousarray(values_N)
    return values_N if column.width == 1 else values_N.reshape(-1, column.width)


def _by_row(values: Sequence[Any], width: int) -> Sequence[Any]:
    if width == 1:
        return values
    return [values[at : at + width] for at in range(0, len(values), width)]


def _texts(column: Texts, joined: bytes) -> list[Any]:
    ends = np.cumsum(column.ends_N - column.starts_N).tolist()
    spans = zip([0, *ends], ends, strict=False)
    if joined.isascii():
        whole = joined.decode("ascii")
        return [whole[start:end] for start, end in spans]
    return [_text(joined[start:end]) for start, end in spans]


def _text(value: bytes) -> Any:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"b64": base64.b64encode(value).decode()}


def _predicted(reply: Reply) -> Prediction:
    outputs = orjson.loads(reply.body)["outputs"]
    logits_B = _floats(outputs["logits"]) if "logits" in outputs else None
    return Prediction(answering_version(reply), _floats(outputs["logistic"]), logits_B)


def _floats(values: Any) -> NDArray[np.float32]:
    return np.array(values, dtype=np.float32).reshape(-1)


def _ranked(reply: Reply) -> Ranking:
    document = orjson.loads(reply.body)
    scores_K = _floats(document["scores"])
    indices = document.get("indices")
    indices_K = np.arange(scores_K.size) if indices is None else np.array(indices, dtype=np.int64)
    return Ranking(int(document["version"]), scores_K, indices_K)


def _signature(reply: Reply) -> ModelInfo:
    document = orjson.loads(reply.body)
    spec = document["model_spec"]
    signature = document["metadata"]["signature_def"]["signature_def"]["serving_default"]

    def told(tensors: Mapping[str, Any]) -> dict[str, TensorInfo]:
        return {
            name: TensorInfo(
                _TOLD.get(info["dtype"], info["dtype"].removeprefix("DT_")),
                tuple(int(dim["size"]) for dim in info["tensor_shape"]["dim"]),
            )
            for name, info in tensors.items()
        }

    return ModelInfo(
        spec["name"], (int(spec["version"]),), told(signature["inputs"]), told(signature["outputs"])
    )


# ── Open Inference Protocol ────────────────────────────────────────────────────────────────────


class InferenceHttp(TfServingHttp):
    """The Open Inference Protocol, tensors as bytes behind the JSON. Ranking is as above, on the same port."""

    def predict(self, table: Table, version: int | None) -> Ask[Prediction]:
        table = table.unmarked()
        values = packed(table.columns, "sized")
        inputs = [
            {
                "name": name,
                "datatype": _DATATYPES[column.values_N.dtype.name]
                if isinstance(column, Numbers)
                else "BYTES",
                "shape": [table.rows] if column.width == 1 else [table.rows, column.width],
                "parameters": {"binary_data_size": len(values[name])},
            }
            for name, column in table.columns.items()
        ]
        outputs = [{"name": name, "parameters": {"binary_data": True}} for name in _OUTPUTS]
        head = _dumps({"inputs": inputs, "outputs": outputs})
        headers = {"content-type": "application/octet-stream", _SPLIT: str(len(head))}
        body = b"".join([head, *(values[name] for name in table.columns)])
        return Ask(f"{self._path('v2', version)}/infer", body, _inferred, headers)

    def metadata(self) -> Ask[ModelInfo]:
        return Ask(self._path("v2", None), None, _described)


def _inferred(reply: Reply) -> Prediction:
    split = int(reply.headers.get(_SPLIT, len(reply.body)))
    document = orjson.loads(reply.body[:split])
    values = {}
    for output in document["outputs"]:
        size = output.get("parameters", {}).get("binary_data_size")
        if size is None:
            values[output["name"]] = _floats(output["data"])
        else:
            values[output["name"]] = np.frombuffer(reply.body[split : split + size], dtype="<f4")
            split += size
    version = document.get("model_version") or ""
    return Prediction(int(version) if version.isdigit() else None, values["logistic"], values.get("logits"))


def _described(reply: Reply) -> ModelInfo:
    document = orjson.loads(reply.body)

    def told(tensors: Sequence[Mapping[str, Any]]) -> dict[str, TensorInfo]:
        return {tensor["name"]: TensorInfo(tensor["datatype"], tuple(tensor["shape"])) for tensor in tensors}

    versions = tuple(int(version) for version in document["versions"] if version.isdigit())
    return ModelInfo(document["name"], versions, told(document["inputs"]), told(document["outputs"]))
