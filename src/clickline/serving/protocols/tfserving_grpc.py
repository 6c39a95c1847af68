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
    Model,
    Scores,
    Target,
    chosen_outputs,
    number_columns,
    several_columns,
)
from clickline.wire.messages import (
    GetModelMetadataResponse,
    GetModelStatusResponse,
    ModelSpec,
    SignatureDefMap,
)
from clickline.wire.protobuf_writer import block, number, text
from clickline.wire.request_reader import RequestReader, malformed, pieces

SIGNATURES = ("serving_default", "predict")

_SPEC, _INPUTS, _FILTER = 1, 2, 3  # fields of PredictRequest
_FLOAT, _STRING, _INT64 = 1, 7, 9  # numbers of DataType
_FLOAT_LIST, _INT64_LIST = 5, 10  # fields of TensorProto


class _Details(NamedTuple):
    model: str
    signature: str
    outputs: tuple[str, ...]


def target(body: bytes) -> Target:
    """Whom a request of any of the three methods is for: all have the model_spec in field 1."""
    return target_of(b"".join(piece for _, piece in pieces(body, _SPEC) if isinstance(piece, bytes)))


def target_of(spec_bytes: bytes) -> Target:
    """Whom a serialized ModelSpec names."""
    spec = _spec(spec_bytes)
    choice = spec.WhichOneof("version_choice")
    if choice == "version_label":
        raise RequestRefused(
            "invalid",
            f'model_spec asks for the version labelled "{spec.version_label[:60]}"; versions have numbers only. '
            "Leave the label out for the current version.",
        )
    return Target(spec.name, spec.version.value if choice else None)


def decode(body: bytes, model: Model, limits: Limits) -> Call:
    """The rows of a PredictRequest."""
    spec_bytes, asked = b"", []
    for field, piece in pieces(body, _SPEC, _FILTER):
        if isinstance(piece, int):
            continue  # a number where none belongs: an unknown field
        if field == _SPEC:
            spec_bytes += piece  # pieces of one message, as protobuf joins them
        else:
            asked.append(piece)
    spec = _spec(spec_bytes)
    signature = spec.signature_name or SIGNATURES[0]
    if signature not in SIGNATURES:
        raise RequestRefused(
            "invalid", f'There is no signature "{signature[:100]}". There are: {", ".join(SIGNATURES)}.'
        )
    try:
        outputs = chosen_outputs(name.decode() for name in asked)
    except UnicodeDecodeError:
        raise malformed(" at output_filter") from None
    reader = RequestReader.of(model.columns)
    rows = reader.tensors(body, _INPUTS, limits.max_rows, limits.ignore_unknown)
    return Call(rows, details=_Details(spec.name, signature, outputs))


def encode(call: Call, answer: Scores) -> bytes:
    """A PredictResponse."""
    details: _Details = call.details
    rows = answer.probability_B.size
    parts = []
    for name in details.outputs:
        output = OUTPUTS[name]
        parts.append(_head(name, rows))
        # Class ids are 0 or 1, and so is each one's varint: the same single byte.
        values = output.values(answer)
        parts.append(values.astype("u1").tobytes() if output.whole else values.tobytes())
    parts.append(block(2, spec_bytes(details.model, answer.version, details.signature)))
    return b"".join(parts)


def spec_bytes(model: str, version: int, signature: str = "") -> bytes:
    """A serialized ModelSpec."""
    return text(1, model) + block(2, b"\x08" + number(version)) + text(3, signature)


@lru_cache(maxsize=4096)
def _head(name: str, rows: int) -> bytes:
    """All of an output's map entry that comes before its values; it depends on how many they are, not on them."""
    output = OUTPUTS[name]
    dtype, field, size = (_INT64, _INT64_LIST, 1) if output.whole else (_FLOAT, _FLOAT_LIST, 4)
    shape = b"".join(block(2, b"\x08" + number(dim)) for dim in (rows, output.width))
    values = rows * output.width * size
    tensor = b"\x08" + number(dtype) + block(2, shape) + number(field << 3 | 2) + number(values)
    entry = block(1, name.encode()) + number(2 << 3 | 2) + number(len(tensor) + values) + tensor
    return number(1 << 3 | 2) + number(len(entry) + values) + entry


# ── what the model is, and how it is ───────────────────────────────────────────────────────────


def metadata(body: bytes, model: Model) -> bytes:
    """A GetModelMetadataResponse: inputs and outputs of both signatures."""
    spec_bytes, asked = b"", []
    for field, piece in pieces(body, 1, 2):
        if field == 1 and isinstance(piece, bytes):
            spec_bytes += piece
        elif isinstance(piece, bytes):
            asked.append(piece.decode("utf-8", "backslashreplace"))
    for name in asked:
        if name != "signature_def":
            raise RequestRefused(
                "invalid", f'There is no metadata field "{name[:60]}". There is: signature_def.'
            )
    numbers, several = number_columns(model.features), several_columns(model.features)
    signatures = SignatureDefMap()
    for name in SIGNATURES:
        signature = signatures.signature_def[name]
        signature.method_name = "tensorflow/serving/predict"
        for column in model.columns:
            shape = (-1, -1) if column in several else (-1,)
            _describe(signature.inputs[column], column, _FLOAT if column in numbers else _STRING, shape)
        for output, what in OUTPUTS.items():
            _describe(signature.outputs[output], output, _INT64 if what.whole else _FLOAT, (-1, what.width))
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
    """A GetModelStatusResponse: the state of each version, by TensorFlow Serving's word for it."""
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
