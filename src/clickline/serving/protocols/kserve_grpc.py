"""The Open Inference Protocol (KServe v2) over gRPC: health, metadata, infer with typed and raw contents."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from google.protobuf.message import DecodeError

from clickline.serving.protocols.call import (
    OUTPUTS,
    Call,
    Limits,
    Scores,
    ServedModel,
    Target,
    multi_value_columns,
    number_columns,
    requested_outputs,
    version_number,
)
from clickline.wire.messages import (
    ModelInferRequest,
    ModelMetadataResponse,
    ModelReadyResponse,
    ServerLiveResponse,
    ServerMetadataResponse,
    ServerReadyResponse,
)
from clickline.wire.protobuf_writer import bytes_field, encode_varint, string_field
from clickline.wire.request_reader import RequestReader, malformed, top_level_fields

_NAME, _VERSION, _ID, _OUTPUTS = 1, 2, 3, 6  # fields of ModelInferRequest
_INT64_LIST, _FLOAT_LIST = 3, 6  # fields of InferTensorContents


class _Details(NamedTuple):
    model: str
    request_id: str
    outputs: tuple[str, ...]
    raw: bool


def target(body: bytes) -> Target:
    """Return the model that a request names. ModelInfer, ModelReady and ModelMetadata have the name in field 1, the
    version in field 2."""
    found = _small(body, _NAME, _VERSION)
    return Target(found.model_name, version_number(found.model_version))


def decode(body: bytes, model: ServedModel, limits: Limits) -> Call:
    """Decode a ModelInferRequest."""
    found = _small(body, _NAME, _ID, _OUTPUTS)
    outputs = requested_outputs(output.name for output in found.outputs)
    reader = RequestReader.of(model.columns)
    rows, raw = reader.inputs(body, limits.max_rows, limits.ignore_unknown)
    return Call(rows, details=_Details(found.model_name, found.id, outputs, raw))


def encode(call: Call, answer: Scores) -> bytes:
    """Encode a ModelInferResponse, with raw values if the inputs were raw."""
    details: _Details = call.details
    rows = answer.probability_B.size
    parts = [
        string_field(1, details.model),
        string_field(2, str(answer.version)),
        string_field(3, details.request_id),
    ]
    behind = []
    for name in details.outputs:
        values = OUTPUTS[name].values(answer)
        parts.append(_head(name, rows, details.raw))
        if details.raw:
            behind.append(bytes_field(6, values.tobytes()))
        else:  # class ids are 0 or 1, whose varint is the same single byte
            parts.append(values.astype("u1").tobytes() if OUTPUTS[name].is_integer else values.tobytes())
    return b"".join(parts + behind)


@lru_cache(maxsize=4096)
def _head(name: str, rows: int, raw: bool) -> bytes:
    """The bytes of an output before its values; they depend only on the number of values."""
    output = OUTPUTS[name]
    shape = encode_varint(rows) + encode_varint(output.width)
    head = (
        string_field(1, name)
        + string_field(2, "INT64" if output.is_integer else "FP32")
        + bytes_field(3, shape)
    )
    values = 0
    if not raw:
        values = rows * output.width * (1 if output.is_integer else 4)
        contents = encode_varint(
            (_INT64_LIST if output.is_integer else _FLOAT_LIST) << 3 | 2
        ) + encode_varint(values)
        head += encode_varint(5 << 3 | 2) + encode_varint(len(contents) + values) + contents
    return encode_varint(5 << 3 | 2) + encode_varint(len(head) + values) + head


def _small(body: bytes, *fields: int) -> ModelInferRequest:
    """Parse only these fields of a message; none of them is a tensor."""
    small = b"".join(
        bytes_field(field, piece)
        for field, piece in top_level_fields(body, *fields)
        if isinstance(piece, bytes)
    )
    try:
        return ModelInferRequest.FromString(small)
    except DecodeError:
        raise malformed() from None


# ── metadata and health ────────────────────────────────────────────────────────────────────────


def server_live() -> bytes:
    """A ServerLiveResponse: always live if it can answer."""
    answer: bytes = ServerLiveResponse(live=True).SerializeToString()
    return answer


def server_ready(ready: bool) -> bytes:
    """A ServerReadyResponse."""
    answer: bytes = ServerReadyResponse(ready=ready).SerializeToString()
    return answer


def model_ready(ready: bool) -> bytes:
    """A ModelReadyResponse."""
    answer: bytes = ModelReadyResponse(ready=ready).SerializeToString()
    return answer


def server_metadata(version: str) -> bytes:
    """A ServerMetadataResponse."""
    answer: bytes = ServerMetadataResponse(name="clickline", version=version).SerializeToString()
    return answer


def model_metadata(body: bytes, model: ServedModel, versions: Sequence[int]) -> bytes:
    """A ModelMetadataResponse: available versions, inputs and outputs."""
    response = ModelMetadataResponse(
        name=target(body).model, versions=[str(version) for version in versions], platform="clickline"
    )
    numbers, several = number_columns(model.features), multi_value_columns(model.features)
    for column in model.columns:
        shape = [-1, -1] if column in several else [-1]
        response.inputs.add(name=column, datatype="FP32" if column in numbers else "BYTES", shape=shape)
    for name, output in OUTPUTS.items():
        response.outputs.add(
            name=name, datatype="INT64" if output.is_integer else "FP32", shape=[-1, output.width]
        )
    answer: bytes = response.SerializeToString()
    return answer
