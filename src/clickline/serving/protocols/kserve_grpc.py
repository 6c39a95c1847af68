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
    Model,
    Scores,
    Target,
    chosen_outputs,
    number_columns,
    several_columns,
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
from clickline.wire.protobuf_writer import block, number, text
from clickline.wire.request_reader import RequestReader, malformed, pieces

_NAME, _VERSION, _ID, _OUTPUTS = 1, 2, 3, 6  # fields of ModelInferRequest
_INT64_LIST, _FLOAT_LIST = 3, 6  # fields of InferTensorContents


class _Details(NamedTuple):
    model: str
    request_id: str
    outputs: tuple[str, ...]
    raw: bool


def target(body: bytes) -> Target:
    """Whom a request is for: ModelInfer, ModelReady and ModelMetadata have the name in field 1, the version in 2."""
    found = _small(body, _NAME, _VERSION)
    return Target(found.model_name, version_number(found.model_version))


def decode(body: bytes, model: Model, limits: Limits) -> Call:
    """The rows of a ModelInferRequest."""
    found = _small(body, _NAME, _ID, _OUTPUTS)
    outputs = chosen_outputs(output.name for output in found.outputs)
    reader = RequestReader.of(model.columns)
    rows, raw = reader.inputs(body, limits.max_rows, limits.ignore_unknown)
    return Call(rows, details=_Details(found.model_name, found.id, outputs, raw))


def encode(call: Call, answer: Scores) -> bytes:
    """A ModelInferResponse: values raw if they came raw."""
    details: _Details = call.details
    rows = answer.probability_B.size
    parts = [text(1, details.model), text(2, str(answer.version)), text(3, details.request_id)]
    behind = []
    for name in details.outputs:
        values = OUTPUTS[name].values(answer)
        parts.append(_head(name, rows, details.raw))
        if details.raw:
            behind.append(block(6, values.tobytes()))
        else:  # class ids are 0 or 1, and so is each one's varint: the same single byte
            parts.append(values.astype("u1").tobytes() if OUTPUTS[name].whole else values.tobytes())
    return b"".join(parts + behind)


@lru_cache(maxsize=4096)
def _head(name: str, rows: int, raw: bool) -> bytes:
    """All of an output that comes before its values; it depends on how many they are, not on them."""
    output = OUTPUTS[name]
    shape = number(rows) + number(output.width)
    head = text(1, name) + text(2, "INT64" if output.whole else "FP32") + block(3, shape)
    values = 0
    if not raw:
        values = rows * output.width * (1 if output.whole else 4)
        contents = number((_INT64_LIST if output.whole else _FLOAT_LIST) << 3 | 2) + number(values)
        head += number(5 << 3 | 2) + number(len(contents) + values) + contents
    return number(5 << 3 | 2) + number(len(head) + values) + head


def _small(body: bytes, *fields: int) -> ModelInferRequest:
    """The message with these fields only, whatever else it holds; none of them is a tensor."""
    small = b"".join(
        block(field, piece) for field, piece in pieces(body, *fields) if isinstance(piece, bytes)
    )
    try:
        return ModelInferRequest.FromString(small)
    except DecodeError:
        raise malformed() from None


# ── what the server and the model are, and how they are ────────────────────────────────────────


def server_live() -> bytes:
    """A ServerLiveResponse: who can answer is alive."""
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


def model_metadata(body: bytes, model: Model, versions: Sequence[int]) -> bytes:
    """A ModelMetadataResponse: the versions that answer, inputs and outputs."""
    response = ModelMetadataResponse(
        name=target(body).model, versions=[str(version) for version in versions], platform="clickline"
    )
    numbers, several = number_columns(model.features), several_columns(model.features)
    for column in model.columns:
        shape = [-1, -1] if column in several else [-1]
        response.inputs.add(name=column, datatype="FP32" if column in numbers else "BYTES", shape=shape)
    for name, output in OUTPUTS.items():
        response.outputs.add(
            name=name, datatype="INT64" if output.whole else "FP32", shape=[-1, output.width]
        )
    answer: bytes = response.SerializeToString()
    return answer
