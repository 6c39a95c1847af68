"""The Open Inference Protocol (KServe v2) over gRPC: health, metadata, infer with typed and raw contents."""

from __future__ import annotations

from functools import lru_cache
from importlib.metadata import version

from google.protobuf.message import DecodeError

from clickline.errors import RequestRefused
from clickline.scoring.scorer import Scores
from clickline.serving.open_versions import OpenVersions, ScorerLike
from clickline.serving.protocols.kserve_http import describe_model
from clickline.serving.protocols.request import (
    OUTPUTS,
    Call,
    Request,
    Response,
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
_RELEASE = version("clickline")
_INT64_LIST, _FLOAT_LIST = 3, 6  # fields of InferTensorContents


class Infer(Request):
    """Scores tensors."""

    protocol = "inference_grpc"

    def read_target(self) -> None:
        self._request = _small(self.body, _NAME, _VERSION, _ID, _OUTPUTS)
        self.model, self.version = self._request.model_name, version_number(self._request.model_version)

    def decode(self, model: ScorerLike) -> Call:
        self.outputs = requested_outputs(output.name for output in self._request.outputs)
        reader = RequestReader.of(model.columns)
        rows, self.raw = reader.inputs(self.body, self.limits.max_rows, self.limits.ignore_unknown)
        return Call(rows)

    def encode(self, answer: Scores) -> Response:
        """A ModelInferResponse, with raw values if the inputs were raw."""
        rows = answer.probability_B.size
        parts = [
            string_field(1, self.model),
            string_field(2, str(answer.version)),
            string_field(3, self._request.id),
        ]
        behind = []
        for name in self.outputs:
            values = OUTPUTS[name].values(answer)
            parts.append(_head(name, rows, self.raw))
            if self.raw:
                behind.append(bytes_field(6, values.tobytes()))
            else:  # class ids are 0 or 1, whose varint is the same single byte
                parts.append(values.astype("u1").tobytes() if OUTPUTS[name].is_integer else values.tobytes())
        return Response(b"".join(parts + behind))


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


def _target(body: bytes) -> tuple[str, int | None]:
    """The model and version in fields 1 and 2 of ModelReady and ModelMetadata, as in ModelInfer."""
    found = _small(body, _NAME, _VERSION)
    return found.model_name, version_number(found.model_version)


def server_live(body: bytes, versions: OpenVersions) -> bytes:
    """A ServerLiveResponse: always live if it can answer."""
    answer: bytes = ServerLiveResponse(live=True).SerializeToString()
    return answer


def server_ready(body: bytes, versions: OpenVersions) -> bytes:
    """A ServerReadyResponse."""
    answer: bytes = ServerReadyResponse(ready=versions.current is not None).SerializeToString()
    return answer


def model_ready(body: bytes, versions: OpenVersions) -> bytes:
    """A ModelReadyResponse."""
    target = _target(body)
    try:
        versions.find(*target)
        ready = True
    except RequestRefused:
        ready = False
    answer: bytes = ModelReadyResponse(ready=ready).SerializeToString()
    return answer


def server_metadata(body: bytes, versions: OpenVersions) -> bytes:
    """A ServerMetadataResponse."""
    answer: bytes = ServerMetadataResponse(name="clickline", version=_RELEASE).SerializeToString()
    return answer


def model_metadata(body: bytes, versions: OpenVersions) -> bytes:
    """A ModelMetadataResponse: available versions, inputs and outputs."""
    answer: bytes = ModelMetadataResponse(**describe_model(*_target(body), versions)).SerializeToString()
    return answer
