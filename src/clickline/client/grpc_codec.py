"""What is said over gRPC: TensorFlow Serving's protocol, the Open Inference Protocol, and our own ranking."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clickline.client.columnar import Column, Numbers, Table
from clickline.client.packing import packed
from clickline.client.request import Ask, Reply
from clickline.client.results import ModelInfo, Prediction, Ranking, TensorInfo
from clickline.wire.messages import (
    GetModelMetadataRequest,
    GetModelMetadataResponse,
    ModelInferResponse,
    ModelMetadataRequest,
    ModelMetadataResponse,
    PredictResponse,
    RankResponse,
    ServerReadyRequest,
    ServerReadyResponse,
    SignatureDefMap,
    TensorProto,
)
from clickline.wire.protobuf_writer import block, number, text

_OUTPUTS = ("logistic", "logits")
_DTYPES = {"float32": 1, "float64": 2, "int64": 9, "uint64": 23, "text": 7}  # numbers of DataType
_DATATYPES = {"float32": "FP32", "float64": "FP64", "int64": "INT64", "uint64": "UINT64", "text": "BYTES"}
_TOLD = {1: "FP32", 2: "FP64", 3: "INT32", 7: "BYTES", 9: "INT64", 10: "BOOL", 23: "UINT64"}  # of DataType


def _kind(column: Column) -> str:
    return column.values_N.dtype.name if isinstance(column, Numbers) else "text"


def _shape(rows: int, width: int) -> tuple[int, ...]:
    return (rows,) if width == 1 else (rows, width)


class TfServingGrpc:
    """tensorflow.serving.PredictionService."""

    def __init__(self, model: str | None) -> None:
        self.model = model or ""  # no name: the model that is there

    def predict(self, table: Table, version: int | None) -> Ask[Prediction]:
        spec = block(1, self._spec(version))
        outputs = [text(3, name) for name in _OUTPUTS]
        body = b"".join([spec, *_tensors(2, table), *outputs])
        return Ask("/tensorflow.serving.PredictionService/Predict", body, _predicted)

    def rank(self, context: Table | None, candidates: Table, top: int | None) -> Ask[Ranking]:
        parts = [block(1, self._spec(None)), *([] if context is None else _tensors(2, context))]
        parts += _tensors(3, candidates)
        if top is not None:
            parts.append(b"\x20" + number(top))
        return Ask("/clickline.v1.Ranking/Rank", b"".join(parts), _ranked)

    def metadata(self) -> Ask[ModelInfo]:
        request = GetModelMetadataRequest(metadata_field=["signature_def"])
        request.model_spec.name = self.model
        method = "/tensorflow.serving.PredictionService/GetModelMetadata"
        return Ask(method, request.SerializeToString(), _signature)

    def ready(self) -> Ask[bool]:
        method = "/inference.GRPCInferenceService/ServerReady"
        return Ask(method, ServerReadyRequest().SerializeToString(), _is_ready)

    def _spec(self, version: int | None) -> bytes:
        chosen = b"" if version is None else block(2, b"\x08" + number(version))
        return text(1, self.model) + chosen


def _tensors(field: int, table: Table) -> list[bytes]:
    """The entries of a map<string, TensorProto>."""
    table = table.unmarked()
    values = packed(table.columns, "field 8")
    entries = []
    for name, column in table.columns.items():
        key, head = _tensor_head(name, _kind(column), table.rows, column.width)
        content = block(4, values[name]) if isinstance(column, Numbers) else values[name]
        entries.append(block(field, b"".join([key, number(len(head) + len(content)), head, content])))
    return entries


@lru_cache(maxsize=4096)
def _tensor_head(name: str, kind: str, rows: int, width: int) -> tuple[bytes, bytes]:
    """What stands before the length of a map entry's tensor, and before the tensor's values: alike in requests of as
    many rows."""
    sizes = b"".join(block(2, b"\x08" + number(size)) for size in _shape(rows, width))
    return text(1, name) + b"\x12", b"\x08" + number(_DTYPES[kind]) + block(2, sizes)


def _predicted(reply: Reply) -> Prediction:
    response = PredictResponse.FromString(reply.body)
    outputs = response.outputs
    logits_B = _floats(outputs["logits"]) if "logits" in outputs else None
    return Prediction(_version(response.model_spec), _floats(outputs["logistic"]), logits_B)


def _floats(tensor: TensorProto) -> NDArray[np.float32]:
    if tensor.tensor_content:
        return np.frombuffer(tensor.tensor_content, dtype="<f4")
    return np.array(tensor.float_val, dtype=np.float32)


def _version(spec: Any) -> int | None:
    return int(spec.version.value) if spec.HasField("version") else None


def _ranked(reply: Reply) -> Ranking:
    response = RankResponse.FromString(reply.body)
    scores_K = np.array(response.scores, dtype=np.float32)
    indices_K = np.array(response.indices, dtype=np.int64) if response.indices else np.arange(scores_K.size)
    return Ranking(_version(response.model_spec), scores_K, indices_K)


def _signature(reply: Reply) -> ModelInfo:
    response = GetModelMetadataResponse.FromString(reply.body)
    signatures = SignatureDefMap()
    response.metadata["signature_def"].Unpack(signatures)
    signature = signatures.signature_def["serving_default"]

    def told(tensors: Mapping[str, Any]) -> dict[str, TensorInfo]:
        return {
            name: TensorInfo(
                _TOLD.get(info.dtype, str(info.dtype)), tuple(dim.size for dim in info.tensor_shape.dim)
            )
            for name, info in tensors.items()
        }

    version = _version(response.model_spec)
    versions = () if version is None else (version,)
    return ModelInfo(response.model_spec.name, versions, told(signature.inputs), told(signature.outputs))


def _is_ready(reply: Reply) -> bool:
    return bool(ServerReadyResponse.FromString(reply.body).ready)


# ── Open Inference Protocol ────────────────────────────────────────────────────────────────────


class InferenceGrpc(TfServingGrpc):
    """inference.GRPCInferenceService. It has no ranking: that is asked for as above, on the same port."""

    def predict(self, table: Table, version: int | None) -> Ask[Prediction]:
        table = table.unmarked()
        values = packed(table.columns, "sized")
        parts = [text(1, self.model), text(2, "" if version is None else str(version))]
        for name, column in table.columns.items():
            parts.append(_input(name, _kind(column), table.rows, column.width))
        parts += [block(6, text(1, name)) for name in _OUTPUTS]
        parts += [block(7, values[name]) for name in table.columns]
        return Ask("/inference.GRPCInferenceService/ModelInfer", b"".join(parts), _inferred)

    def metadata(self) -> Ask[ModelInfo]:
        request = ModelMetadataRequest(name=self.model)
        method = "/inference.GRPCInferenceService/ModelMetadata"
        return Ask(method, request.SerializeToString(), _described)


@lru_cache(maxsize=4096)
def _input(name: str, kind: str, rows: int, width: int) -> bytes:
    """An input without its values."""
    shape = b"".join(map(number, _shape(rows, width)))
    return block(5, text(1, name) + text(2, _DATATYPES[kind]) + block(3, shape))


def _inferred(reply: Reply) -> Prediction:
    response = ModelInferResponse.FromString(reply.body)
    values = {}
    for place, output in enumerate(response.outputs):
        if response.raw_output_contents:
            values[output.name] = np.frombuffer(response.raw_output_contents[place], dtype="<f4")
        else:
            values[output.name] = np.array(output.contents.fp32_contents, dtype=np.float32)
    version = response.model_version
    return Prediction(int(version) if version.isdigit() else None, values["logistic"], values.get("logits"))


def _described(reply: Reply) -> ModelInfo:
    response = ModelMetadataResponse.FromString(reply.body)

    def told(tensors: Sequence[Any]) -> dict[str, TensorInfo]:
        return {tensor.name: TensorInfo(tensor.datatype, tuple(tensor.shape)) for tensor in tensors}

    versions = tuple(int(version) for version in response.versions if version.isdigit())
    return ModelInfo(response.name, versions, told(response.inputs), told(response.outputs))
