"""gRPC codecs: TensorFlow Serving's protocol, the Open Inference Protocol, and our own ranking."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clickline.client.attempts import PreparedRequest, RawResponse
from clickline.client.columnar import NumericColumn, RequestTable
from clickline.client.packing import DATATYPES, OUTPUTS, pack_values, shape, value_type
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
from clickline.wire.protobuf_writer import bytes_field, encode_varint, string_field

_DTYPES = {"float32": 1, "float64": 2, "int64": 9, "uint64": 23, "text": 7}  # TensorFlow's DataType
_DATATYPE_NAMES = {1: "FP32", 2: "FP64", 3: "INT32", 7: "BYTES", 9: "INT64", 10: "BOOL", 23: "UINT64"}


class TfServingGrpcCodec:
    """Codec of tensorflow.serving.PredictionService, and of our ranking service."""

    def __init__(self, model: str | None) -> None:
        self.model = model or ""  # empty: the model that the server has

    def predict(self, table: RequestTable, version: int | None) -> PreparedRequest[Prediction]:
        spec = bytes_field(1, self._spec(version))
        outputs = [string_field(3, name) for name in OUTPUTS]
        body = b"".join([spec, *_encode_tensors(2, table), *outputs])
        return PreparedRequest("/tensorflow.serving.PredictionService/Predict", body, _decode_prediction)

    def rank(
        self, context: RequestTable | None, candidates: RequestTable, top: int | None
    ) -> PreparedRequest[Ranking]:
        parts = [bytes_field(1, self._spec(None)), *([] if context is None else _encode_tensors(2, context))]
        parts += _encode_tensors(3, candidates)
        if top is not None:
            parts.append(b"\x20" + encode_varint(top))
        return PreparedRequest("/clickline.v1.Ranking/Rank", b"".join(parts), _decode_ranking)

    def metadata(self) -> PreparedRequest[ModelInfo]:
        request = GetModelMetadataRequest(metadata_field=["signature_def"])
        request.model_spec.name = self.model
        method = "/tensorflow.serving.PredictionService/GetModelMetadata"
        return PreparedRequest(method, request.SerializeToString(), _decode_signature)

    def ready(self) -> PreparedRequest[bool]:
        method = "/inference.GRPCInferenceService/ServerReady"
        return PreparedRequest(method, ServerReadyRequest().SerializeToString(), _decode_ready)

    def _spec(self, version: int | None) -> bytes:
        chosen = b"" if version is None else bytes_field(2, b"\x08" + encode_varint(version))
        return string_field(1, self.model) + chosen


def _encode_tensors(field: int, table: RequestTable) -> list[bytes]:
    """The entries of a map<string, TensorProto>."""
    table = table.with_inline_missing()
    values = pack_values(table.columns, "field 8")
    entries = []
    for name, column in table.columns.items():
        key, head = _tensor_header(name, value_type(column), table.rows, column.width)
        content = bytes_field(4, values[name]) if isinstance(column, NumericColumn) else values[name]
        entries.append(
            bytes_field(field, b"".join([key, encode_varint(len(head) + len(content)), head, content]))
        )
    return entries


@lru_cache(maxsize=4096)
def _tensor_header(name: str, kind: str, rows: int, width: int) -> tuple[bytes, bytes]:
    """The bytes before the length of a map entry's tensor, and those before its values: the same for all requests with
    this number of rows."""
    sizes = b"".join(bytes_field(2, b"\x08" + encode_varint(size)) for size in shape(rows, width))
    return string_field(1, name) + b"\x12", b"\x08" + encode_varint(_DTYPES[kind]) + bytes_field(2, sizes)


def _decode_prediction(raw: RawResponse) -> Prediction:
    response = PredictResponse.FromString(raw.body)
    outputs = response.outputs
    logits_B = _floats(outputs["logits"]) if "logits" in outputs else None
    return Prediction(_version(response.model_spec), _floats(outputs["logistic"]), logits_B)


def _floats(tensor: TensorProto) -> NDArray[np.float32]:
    if tensor.tensor_content:
        return np.frombuffer(tensor.tensor_content, dtype="<f4")
    return np.array(tensor.float_val, dtype=np.float32)


def _version(spec: Any) -> int | None:
    return int(spec.version.value) if spec.HasField("version") else None


def _decode_ranking(raw: RawResponse) -> Ranking:
    response = RankResponse.FromString(raw.body)
    scores_K = np.array(response.scores, dtype=np.float32)
    indices_K = np.array(response.indices, dtype=np.int64) if response.indices else np.arange(scores_K.size)
    return Ranking(_version(response.model_spec), scores_K, indices_K)


def _decode_signature(raw: RawResponse) -> ModelInfo:
    response = GetModelMetadataResponse.FromString(raw.body)
    signatures = SignatureDefMap()
    response.metadata["signature_def"].Unpack(signatures)
    signature = signatures.signature_def["serving_default"]

    def tensor_infos(tensors: Mapping[str, Any]) -> dict[str, TensorInfo]:
        return {
            name: TensorInfo(
                _DATATYPE_NAMES.get(info.dtype, str(info.dtype)),
                tuple(dim.size for dim in info.tensor_shape.dim),
            )
            for name, info in tensors.items()
        }

    version = _version(response.model_spec)
    versions = () if version is None else (version,)
    return ModelInfo(
        response.model_spec.name, versions, tensor_infos(signature.inputs), tensor_infos(signature.outputs)
    )


def _decode_ready(raw: RawResponse) -> bool:
    return bool(ServerReadyResponse.FromString(raw.body).ready)


# ── Open Inference Protocol ────────────────────────────────────────────────────────────────────


class InferenceGrpcCodec(TfServingGrpcCodec):
    """Codec of inference.GRPCInferenceService. It has no ranking, which uses our own service on the same port."""

    def predict(self, table: RequestTable, version: int | None) -> PreparedRequest[Prediction]:
        table = table.with_inline_missing()
        values = pack_values(table.columns, "length")
        parts = [string_field(1, self.model), string_field(2, "" if version is None else str(version))]
        for name, column in table.columns.items():
            parts.append(_encode_input(name, value_type(column), table.rows, column.width))
        parts += [bytes_field(6, string_field(1, name)) for name in OUTPUTS]
        parts += [bytes_field(7, values[name]) for name in table.columns]
        return PreparedRequest(
            "/inference.GRPCInferenceService/ModelInfer", b"".join(parts), _decode_inference
        )

    def metadata(self) -> PreparedRequest[ModelInfo]:
        request = ModelMetadataRequest(name=self.model)
        method = "/inference.GRPCInferenceService/ModelMetadata"
        return PreparedRequest(method, request.SerializeToString(), _decode_metadata)


@lru_cache(maxsize=4096)
def _encode_input(name: str, kind: str, rows: int, width: int) -> bytes:
    """Encode an input without its values."""
    sizes = b"".join(map(encode_varint, shape(rows, width)))
    return bytes_field(5, string_field(1, name) + string_field(2, DATATYPES[kind]) + bytes_field(3, sizes))


def _decode_inference(raw: RawResponse) -> Prediction:
    response = ModelInferResponse.FromString(raw.body)
    values = {}
    for place, output in enumerate(response.outputs):
        if response.raw_output_contents:
            values[output.name] = np.frombuffer(response.raw_output_contents[place], dtype="<f4")
        else:
            values[output.name] = np.array(output.contents.fp32_contents, dtype=np.float32)
    version = response.model_version
    return Prediction(int(version) if version.isdigit() else None, values["logistic"], values.get("logits"))


def _decode_metadata(raw: RawResponse) -> ModelInfo:
    response = ModelMetadataResponse.FromString(raw.body)

    def tensor_infos(tensors: Sequence[Any]) -> dict[str, TensorInfo]:
        return {tensor.name: TensorInfo(tensor.datatype, tuple(tensor.shape)) for tensor in tensors}

    versions = tuple(int(version) for version in response.versions if version.isdigit())
    return ModelInfo(response.name, versions, tensor_infos(response.inputs), tensor_infos(response.outputs))
