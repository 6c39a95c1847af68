"""TensorFlow Serving over gRPC: Predict, GetModelMetadata, GetModelStatus."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from google.protobuf.message import DecodeError

from clickline.errors import RequestRefused
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


class _Details(NamedTuple):
    model: str
    signature: str
    outputs: tuple[str, ...]


def target(body: bytes) -> Target:
    """Return the model that a request names; all three methods have the model_spec in field 1."""
    return target_of(
        b"".join(piece for _, piece in top_level_fields(body, _SPEC) if isinstance(piece, bytes))
    )


def target_of(spec_bytes: bytes) -> Target:
    """Return the model that a serialized ModelSpec names."""
    spec = _spec(spec_bytes)
    choice = spec.WhichOneof("version_choice")
    if choice == "version_label":
        raise RequestRefused(
            "invalid",
            f'model_spec names the version label "{spec.version_label[:60]}"; versions have only numbers. '
            "Omit the label to use the current version.",
        )
    return Target(spec.name, spec.version.value if choice else None)


def decode(body: bytes, model: ServedModel, limits: Limits) -> Call:
    """Decode a PredictRequest."""
    spec_bytes, requested = b"", []
    for field, piece in top_level_fields(body, _SPEC, _FILTER):
        if isinstance(piece, int):
            continue  # a number instead of a message: an unknown field
        if field == _SPEC:
            spec_bytes += piece  # protobuf concatenates the pieces of one message
        else:
            requested.append(piece)
    spec = _spec(spec_bytes)
    signature = spec.signature_name or SIGNATURES[0]
    if signature not in SIGNATURES:
        raise RequestRefused(
            "invalid", f'There is no signature "{signature[:100]}". Available: {", ".join(SIGNATURES)}.'
        )
    try:
        outputs = requested_outputs(name.decode() for name in requested)
    except UnicodeDecodeError:
        raise malformed(" at output_filter") from None
    reader = RequestReader.of(model.columns)
    rows = reader.tensors(body, _INPUTS, limits.max_rows, limits.ignore_unknown)
    return Call(rows, details=_Details(spec.name, signature, outputs))


def encode(call: Call, answer: Scores) -> bytes:
    """Encode a PredictResponse."""
    details: _Details = call.details
    rows = answer.probability_B.size
    parts = []
    for name in details.outputs:
        output = OUTPUTS[name]
        parts.append(_head(name, rows))
        # Class ids are 0 or 1, whose varint is the same single byte.
        values = output.values(answer)
        parts.append(values.astype("u1").tobytes() if output.is_integer else values.tobytes())
    parts.append(bytes_field(2, spec_bytes(details.model, answer.version, details.signature)))
    return b"".join(parts)


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


def metadata(body: bytes, model: ServedModel) -> bytes:
    """A GetModelMetadataResponse: inputs and outputs of both signatures."""
    spec_bytes, requested = b"", []
    for field, piece in top_level_fields(body, 1, 2):
        if field == 1 and isinstance(piece, bytes):
            spec_bytes += piece
        elif isinstance(piece, bytes):
            requested.append(piece.decode("utf-8", "backslashreplace"))
    for name in requested:
        if name != "signature_def":
            raise RequestRefused(
                "invalid", f'There is no metadata field "{name[:60]}". Available: signature_def.'
            )
    numbers, several = number_columns(model.features), multi_value_columns(model.features)
    signatures = SignatureDefMap()
    for name in SIGNATURES:
        signature = signatures.signature_def[name]
        signature.method_name = "tensorflow/serving/predict"
        for column in model.columns:
            shape = (-1, -1) if column in several else (-1,)
            _describe(signature.inputs[column], column, _FLOAT if column in numbers else _STRING, shape)
        for output, what in OUTPUTS.items():
            _describe(
                signature.outputs[output], output, _INT64 if what.is_integer else _FLOAT, (-1, what.width)
            )
    response = GetModelMetadataResponse()
    response.model_spec.name = _spec(spec_bytes).name
    response.model_spec.version.value = model.number
    response.metadata["signature_def"].Pack(signatures)
    answer: bytes = response.SerializeToString()
    return answer


def _describe(info: ModelSpec, name: str, dtype: int, shape: tuple[int, ...]) -> None:
    info.name = f"{name}:0"
    info.dtype = dtype
    for size in shape:
        info.tensor_shape.dim.add().size = size


def status(versions: Mapping[int, str]) -> bytes:
    """A GetModelStatusResponse; the states are names of TensorFlow Serving's enum."""
    response = GetModelStatusResponse()
    states = GetModelStatusResponse.DESCRIPTOR.fields_by_name["model_version_status"].message_type
    for version, state in sorted(versions.items(), reverse=True):
        entry = response.model_version_status.add(version=version)
        entry.state = states.enum_types_by_name["State"].values_by_name[state].number
        entry.status.SetInParent()  # its code is OK
    answer: bytes = response.SerializeToString()
    return answer


def _spec(spec_bytes: bytes) -> ModelSpec:
    try:
        return ModelSpec.FromString(spec_bytes)
    except DecodeError:
        raise malformed(" at model_spec") from None
