"""TensorFlow Serving over gRPC: Predict, GetModelMetadata, GetModelStatus."""

from __future__ import annotations

from functools import lru_cache
from typing import ClassVar

from google.protobuf.message import DecodeError

from clickline.errors import RequestRefused
from clickline.scoring.scorer import Scores
from clickline.serving.open_versions import OpenVersions, ScorerLike
from clickline.serving.protocols.request import (
    OUTPUTS,
    Call,
    Request,
    Response,
    input_tensors,
    requested_outputs,
)
from clickline.wire.messages import (
    GetModelMetadataResponse,
    GetModelStatusResponse,
    ModelSpec,
    SignatureDefMap,
)
from clickline.wire.protobuf_writer import bytes_field, encode_varint, string_field
from clickline.wire.request_reader import RequestReader, malformed, top_level_fields

SIGNATURES = ("serving_default", "predict")

_SPEC, _INPUTS, _FILTER = 1, 2, 3  # fields of PredictRequest
_FLOAT, _STRING, _INT64 = 1, 7, 9  # numbers of DataType
_FLOAT_LIST, _INT64_LIST = 5, 10  # fields of TensorProto


class SpecRequest(Request):
    """A prediction request whose field 1 is a ModelSpec."""

    fields: ClassVar[tuple[int, ...]]  # what `read_target` finds besides: small fields, no tensors

    def read_target(self) -> None:
        self.spec, self.found = read_spec(self.body, *self.fields)
        self.model, self.version = self.spec.name, spec_version(self.spec)


def read_spec(body: bytes, *fields: int) -> tuple[ModelSpec, list[bytes | int]]:
    """The ModelSpec in field 1 of a message, and its other fields with these numbers."""
    spec, found = b"", []
    for field, piece in top_level_fields(body, _SPEC, *fields):
        if field != _SPEC:
            found.append(piece)
        elif isinstance(piece, bytes):  # a number instead of a message is an unknown field
            spec += piece  # protobuf concatenates the pieces of one message
    try:
        return ModelSpec.FromString(spec), found
    except DecodeError:
        raise malformed(" at model_spec") from None


def spec_version(spec: ModelSpec) -> int | None:
    """The version that a ModelSpec names."""
    choice = spec.WhichOneof("version_choice")
    if choice == "version_label":
        raise RequestRefused(
            "invalid",
            f'model_spec names the version label "{spec.version_label[:60]}"; versions have only numbers. '
            "Omit the label to use the current version.",
        )
    return spec.version.value if choice else None


class Predict(SpecRequest):
    """Scores rows."""

    protocol = "tfserving_grpc"
    fields = (_FILTER,)

    def decode(self, model: ScorerLike) -> Call:
        self.signature = self.spec.signature_name or SIGNATURES[0]
        if self.signature not in SIGNATURES:
            raise RequestRefused(
                "invalid",
                f'There is no signature "{self.signature[:100]}". Available: {", ".join(SIGNATURES)}.',
            )
        try:
            self.outputs = requested_outputs(name.decode() for name in self.found if isinstance(name, bytes))
        except UnicodeDecodeError:
            raise malformed(" at output_filter") from None
        reader = RequestReader.of(model.columns)
        return Call(reader.tensors(self.body, _INPUTS, self.limits.max_rows, self.limits.ignore_unknown))

    def encode(self, answer: Scores) -> Response:
        rows = answer.probability_B.size
        parts = []
        for name in self.outputs:
            output = OUTPUTS[name]
            parts.append(_head(name, rows))
            # Class ids are 0 or 1, whose varint is the same single byte.
            values = output.values(answer)
            parts.append(values.astype("u1").tobytes() if output.is_integer else values.tobytes())
        parts.append(bytes_field(2, spec_bytes(self.model, answer.version, self.signature)))
        return Response(b"".join(parts))


def spec_bytes(model: str, version: int, signature: str = "") -> bytes:
    """A serialized ModelSpec."""
    return (
        string_field(1, model) + bytes_field(2, b"\x08" + encode_varint(version)) + string_field(3, signature)
    )


@lru_cache(maxsize=4096)
def _head(name: str, rows: int) -> bytes:
    """The bytes of an output's map entry before its values; they depend only on the number of values."""
    output = OUTPUTS[name]
    dtype, field, size = (_INT64, _INT64_LIST, 1) if output.is_integer else (_FLOAT, _FLOAT_LIST, 4)
    shape = b"".join(bytes_field(2, b"\x08" + encode_varint(dim)) for dim in (rows, output.width))
    values = rows * output.width * size
    tensor = (
        b"\x08"
        + encode_varint(dtype)
        + bytes_field(2, shape)
        + encode_varint(field << 3 | 2)
        + encode_varint(values)
    )
    entry = (
        bytes_field(1, name.encode())
        + encode_varint(2 << 3 | 2)
        + encode_varint(len(tensor) + values)
        + tensor
    )
    return encode_varint(1 << 3 | 2) + encode_varint(len(entry) + values) + entry


# ── metadata and status ────────────────────────────────────────────────────────────────────────


def metadata(body: bytes, versions: OpenVersions) -> bytes:
    """A GetModelMetadataResponse: inputs and outputs of both signatures."""
    spec, requested = read_spec(body, 2)
    model = versions.find(spec.name, spec_version(spec)).scorer
    for piece in requested:
        if isinstance(piece, bytes) and piece != b"signature_def":
            name = piece.decode("utf-8", "backslashreplace")
            raise RequestRefused(
                "invalid", f'There is no metadata field "{name[:60]}". Available: signature_def.'
            )
    signatures = SignatureDefMap()
    for name in SIGNATURES:
        signature = signatures.signature_def[name]
        signature.method_name = "tensorflow/serving/predict"
        for column, number, several in input_tensors(model):
            _describe(
                signature.inputs[column],
                column,
                _FLOAT if number else _STRING,
                (-1, -1) if several else (-1,),
            )
        for output, what in OUTPUTS.items():
            _describe(
                signature.outputs[output], output, _INT64 if what.is_integer else _FLOAT, (-1, what.width)
            )
    response = GetModelMetadataResponse()
    response.model_spec.name = spec.name
    response.model_spec.version.value = model.number
    response.metadata["signature_def"].Pack(signatures)
    answer: bytes = response.SerializeToString()
    return answer


def _describe(info: ModelSpec, name: str, dtype: int, shape: tuple[int, ...]) -> None:
    info.name = f"{name}:0"
    info.dtype = dtype
    for size in shape:
        info.tensor_shape.dim.add().size = size


def status(body: bytes, versions: OpenVersions) -> bytes:
    """A GetModelStatusResponse."""
    spec, _ = read_spec(body)
    response = GetModelStatusResponse()
    enum = GetModelStatusResponse.DESCRIPTOR.fields_by_name["model_version_status"].message_type
    for number, state in versions.states(spec.name, spec_version(spec)).items():
        entry = response.model_version_status.add(version=number)
        entry.state = enum.enum_types_by_name["State"].values_by_name[state].number
        entry.status.SetInParent()  # its code is OK
    answer: bytes = response.SerializeToString()
    return answer
