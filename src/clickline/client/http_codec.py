"""HTTP codecs: TensorFlow Serving's REST API, the Open Inference Protocol, and our own ranking."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import numpy as np
import orjson
from numpy.typing import NDArray

from clickline.client.attempts import PreparedRequest, RawResponse
from clickline.client.columnar import NumericColumn, RequestTable, SpanColumn, StringColumn, as_doubles
from clickline.client.packing import DATATYPES, OUTPUTS, pack_values, shape, value_type
from clickline.client.results import ModelInfo, Prediction, Ranking, TensorInfo

_JSON = {"content-type": "application/json"}
_DATATYPE_NAMES = {"DT_FLOAT": "FP32", "DT_DOUBLE": "FP64", "DT_STRING": "BYTES"}  # others without their DT_
_HEADER_LENGTH = "inference-header-content-length"


class TfServingHttpCodec:
    """Codec of TensorFlow Serving's REST API, in its columnar format, and of our ranking endpoint."""

    def __init__(self, model: str | None) -> None:
        self.model = model or "clickline"  # the path needs a name: the default of `name` in a config

    def predict(self, table: RequestTable, version: int | None) -> PreparedRequest[Prediction]:
        body = _dumps({"inputs": _json_columns(table)})
        return PreparedRequest(f"{self._path('v1', version)}:predict", body, _decode_prediction, _JSON)

    def rank(
        self, context: RequestTable | None, candidates: RequestTable, top: int | None
    ) -> PreparedRequest[Ranking]:
        shared = {} if context is None else _json_columns(context)
        document: dict[str, Any] = {
            "context": {name: values[0] for name, values in shared.items()},
            "candidates": _json_columns(candidates),
        }
        if top is not None:
            document["top_k"] = top
        return PreparedRequest(f"{self._path('v1', None)}:rank", _dumps(document), _decode_ranking, _JSON)

    def metadata(self) -> PreparedRequest[ModelInfo]:
        return PreparedRequest(f"{self._path('v1', None)}/metadata", None, _decode_signature)

    def ready(self) -> PreparedRequest[bool]:
        return PreparedRequest("/v2/health/ready", None, lambda response: True)  # else an error status

    def _path(self, api: str, version: int | None) -> str:
        chosen = "" if version is None else f"/versions/{version}"
        return f"/{api}/models/{quote(self.model, safe='')}{chosen}"


def answering_version(response: RawResponse) -> int | None:
    """The version that our servers report in a header, for protocols without a field for it."""
    version = response.headers.get("clickline-version", "")
    return int(version) if version.isdigit() else None


def _dumps(document: Any) -> bytes:
    return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)  # NaN becomes null: missing


def _json_columns(table: RequestTable) -> dict[str, Any]:
    table = table.with_inline_missing()
    joined = pack_values({n: c for n, c in table.columns.items() if isinstance(c, SpanColumn)}, "none")
    return {
        name: _number_values(column)
        if isinstance(column, NumericColumn)
        else _by_row(
            column.values if isinstance(column, StringColumn) else _split_texts(column, joined[name]),
            column.width,
        )
        for name, column in table.columns.items()
    }


def _number_values(column: NumericColumn) -> NDArray[Any]:
    values_N = column.values_N
    if values_N.dtype == np.float32:  # written as doubles, so that all protocols send the same number
        values_N = as_doubles(values_N)
    values_N = np.ascontiguousarray(values_N)
    return values_N if column.width == 1 else values_N.reshape(-1, column.width)


def _by_row(values: Sequence[Any], width: int) -> Sequence[Any]:
    if width == 1:
        return values
    return [values[at : at + width] for at in range(0, len(values), width)]


def _split_texts(column: SpanColumn, joined: bytes) -> list[Any]:
    ends = np.cumsum(column.ends_N - column.starts_N).tolist()
    spans = zip([0, *ends], ends, strict=False)
    if joined.isascii():
        decoded = joined.decode("ascii")
        return [decoded[start:end] for start, end in spans]
    return [_json_text(joined[start:end]) for start, end in spans]


def _json_text(value: bytes) -> Any:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"b64": base64.b64encode(value).decode()}


def _decode_prediction(response: RawResponse) -> Prediction:
    outputs = orjson.loads(response.body)["outputs"]
    logits_B = _floats(outputs["logits"]) if "logits" in outputs else None
    return Prediction(answering_version(response), _floats(outputs["logistic"]), logits_B)


def _floats(values: Any) -> NDArray[np.float32]:
    return np.array(values, dtype=np.float32).reshape(-1)


def _decode_ranking(response: RawResponse) -> Ranking:
    document = orjson.loads(response.body)
    scores_K = _floats(document["scores"])
    indices = document.get("indices")
    indices_K = np.arange(scores_K.size) if indices is None else np.array(indices, dtype=np.int64)
    return Ranking(int(document["version"]), scores_K, indices_K)


def _decode_signature(response: RawResponse) -> ModelInfo:
    document = orjson.loads(response.body)
    spec = document["model_spec"]
    signature = document["metadata"]["signature_def"]["signature_def"]["serving_default"]

    def tensor_infos(tensors: Mapping[str, Any]) -> dict[str, TensorInfo]:
        return {
            name: TensorInfo(
                _DATATYPE_NAMES.get(info["dtype"], info["dtype"].removeprefix("DT_")),
                tuple(int(dim["size"]) for dim in info["tensor_shape"]["dim"]),
            )
            for name, info in tensors.items()
        }

    return ModelInfo(
        spec["name"],
        (int(spec["version"]),),
        tensor_infos(signature["inputs"]),
        tensor_infos(signature["outputs"]),
    )


# ── Open Inference Protocol ────────────────────────────────────────────────────────────────────


class InferenceHttpCodec(TfServingHttpCodec):
    """Codec of the Open Inference Protocol, with tensors as bytes after the JSON. Ranking uses our own endpoint."""

    def predict(self, table: RequestTable, version: int | None) -> PreparedRequest[Prediction]:
        table = table.with_inline_missing()
        values = pack_values(table.columns, "length")
        inputs = [
            {
                "name": name,
                "datatype": DATATYPES[value_type(column)],
                "shape": shape(table.rows, column.width),
                "parameters": {"binary_data_size": len(values[name])},
            }
            for name, column in table.columns.items()
        ]
        outputs = [{"name": name, "parameters": {"binary_data": True}} for name in OUTPUTS]
        header = _dumps({"inputs": inputs, "outputs": outputs})
        headers = {"content-type": "application/octet-stream", _HEADER_LENGTH: str(len(header))}
        body = b"".join([header, *(values[name] for name in table.columns)])
        return PreparedRequest(f"{self._path('v2', version)}/infer", body, _decode_inference, headers)

    def metadata(self) -> PreparedRequest[ModelInfo]:
        return PreparedRequest(self._path("v2", None), None, _decode_metadata)


def _decode_inference(response: RawResponse) -> Prediction:
    split = int(response.headers.get(_HEADER_LENGTH, len(response.body)))
    document = orjson.loads(response.body[:split])
    values = {}
    for output in document["outputs"]:
        size = output.get("parameters", {}).get("binary_data_size")
        if size is None:
            values[output["name"]] = _floats(output["data"])
        else:
            values[output["name"]] = np.frombuffer(response.body[split : split + size], dtype="<f4")
            split += size
    version = document.get("model_version") or ""
    return Prediction(int(version) if version.isdigit() else None, values["logistic"], values.get("logits"))


def _decode_metadata(response: RawResponse) -> ModelInfo:
    document = orjson.loads(response.body)

    def tensor_infos(tensors: Sequence[Mapping[str, Any]]) -> dict[str, TensorInfo]:
        return {tensor["name"]: TensorInfo(tensor["datatype"], tuple(tensor["shape"])) for tensor in tensors}

    versions = tuple(int(version) for version in document["versions"] if version.isdigit())
    return ModelInfo(
        document["name"], versions, tensor_infos(document["inputs"]), tensor_infos(document["outputs"])
    )
