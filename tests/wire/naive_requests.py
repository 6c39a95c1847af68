"""A naive request reader to compare the kernels with: protobuf's own parser, then plain Python.

The messages are ours with some changes: text, and messages that the kernels do not parse, are bytes (so that only what
they parse decides what is malformed), and maps are lists of their entries.
"""

from __future__ import annotations

import struct
from importlib.resources import files
from typing import Any

import numpy as np
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from clickline.records import (
    ABSENT,
    INTEGER,
    PRECISION,
    TEXT,
    IntegerColumn,
    NumberColumn,
    RequestRows,
    TextColumn,
)

NOT_TENSORS = ("model_spec", "parameters", "outputs")


def _loosen(message: DescriptorProto) -> None:
    message.options.ClearField("map_entry")
    for field in message.field:
        if field.type == FieldDescriptorProto.TYPE_STRING or field.name in NOT_TENSORS:
            field.type = FieldDescriptorProto.TYPE_BYTES
            field.ClearField("type_name")
    for nested in message.nested_type:
        _loosen(nested)


def _pool() -> DescriptorPool:
    pool = DescriptorPool()
    for file in FileDescriptorSet.FromString(
        files("clickline.wire").joinpath("messages.binpb").read_bytes()
    ).file:
        for message in file.message_type:
            _loosen(message)
        pool.Add(file)
    return pool


POOL = _pool()
PredictRequest = GetMessageClass(POOL.FindMessageTypeByName("tensorflow.serving.PredictRequest"))
ModelInferRequest = GetMessageClass(POOL.FindMessageTypeByName("inference.ModelInferRequest"))


class Refused(Exception):
    pass


def _cast(kind: str):
    return lambda value: np.array([value & 0xFFFF], dtype="u2").view(kind)[0].item()


def _bfloat16(value: int) -> float:
    return struct.unpack("<f", struct.pack("<I", (value & 0xFFFF) << 16))[0]


# dtype: its list, its type in memory, the conversion of a list value
TENSORFLOW = {
    1: ("float_val", "<f4", float),
    2: ("double_val", "<f8", float),
    3: ("int_val", "<i4", int),
    4: ("int_val", "u1", int),
    5: ("int_val", "<i2", int),
    6: ("int_val", "i1", int),
    7: ("string_val", None, bytes),
    9: ("int64_val", "<i8", int),
    10: ("bool_val", "bool", int),
    14: ("half_val", "bf16", _bfloat16),
    17: ("int_val", "<u2", int),
    19: ("half_val", "<f2", _cast("f2")),
    22: ("uint32_val", "<u4", int),
    23: ("uint64_val", "<u8", int),
}
INFERENCE = {
    b"BOOL": ("bool_contents", "bool", int),
    b"INT8": ("int_contents", "i1", int),
    b"INT16": ("int_contents", "<i2", int),
    b"INT32": ("int_contents", "<i4", int),
    b"INT64": ("int64_contents", "<i8", int),
    b"UINT8": ("uint_contents", "u1", int),
    b"UINT16": ("uint_contents", "<u2", int),
    b"UINT32": ("uint_contents", "<u4", int),
    b"UINT64": ("uint64_contents", "<u8", int),
    b"FP16": (None, "<f2", float),
    b"BF16": (None, "bf16", float),
    b"FP32": ("fp32_contents", "<f4", float),
    b"FP64": ("fp64_contents", "<f8", float),
    b"BYTES": ("bytes_contents", None, bytes),
}


def _raw_values(content: bytes, kind: str) -> list[Any]:
    if kind == "bf16":
        if len(content) % 2:
            raise Refused
        return [_bfloat16(value) for value in np.frombuffer(content, "<u2").tolist()]
    if len(content) % np.dtype(kind).itemsize:
        raise Refused
    if kind == "bool":
        return [int(byte != 0) for byte in content]
    return np.frombuffer(content, kind).tolist()


def _raw_texts(content: bytes) -> list[bytes]:
    found, at = [], 0
    while at < len(content):
        if at + 4 > len(content):
            raise Refused
        (size,) = struct.unpack_from("<I", content, at)
        if at + 4 + size > len(content):
            raise Refused
        found.append(content[at + 4 : at + 4 + size])
        at += 4 + size
    return found


def _table(shape: list[int], values: list[Any], max_rows: int) -> list[list[Any]]:
    if len(shape) > 2 or any(size < 0 for size in shape):
        raise Refused
    rows, width = ([*shape, 1, 1][:2]) if shape else (1, 1)
    if rows > max_rows or len(values) != rows * width:
        raise Refused
    if any(isinstance(value, float) and abs(value) == float("inf") for value in values):
        raise Refused
    return [values[row * width : (row + 1) * width] for row in range(rows)]


def _check_rows(found: dict[str, Any]) -> dict[str, Any]:
    sizes = {len(table) for _, table in found.values()}
    if len(sizes) != 1 or sizes == {0}:
        raise Refused
    return found


def read_predict(body: bytes, columns: tuple[str, ...], max_rows: int, ignore: bool) -> dict[str, Any]:
    """For each column, the type of its values and its values by row."""
    try:
        request = PredictRequest.FromString(body)
    except DecodeError:
        raise Refused from None
    last = {entry.key: entry.value for entry in request.inputs}
    found = {}
    for key, tensor in last.items():
        name = key.decode("utf-8", "replace")
        if name not in columns:
            if ignore:
                continue
            raise Refused
        if tensor.dtype not in TENSORFLOW:
            raise Refused
        field, kind, convert = TENSORFLOW[tensor.dtype]
        shape = [dim.size for dim in tensor.tensor_shape.dim]
        if tensor.tensor_content:
            if kind is None:
                raise Refused
            values = _raw_values(tensor.tensor_content, kind)
        else:
            values = [convert(value) for value in getattr(tensor, field)]
            if len(values) == 1 and shape and shape[0] > 1 and shape[1:2] in ([], [1]):
                values *= min(shape[0], max_rows + 1)
        found[name] = (tensor.dtype, _table(shape, values, max_rows))
    return _check_rows(found)


def read_infer(body: bytes, columns: tuple[str, ...], max_rows: int, ignore: bool) -> dict[str, Any]:
    try:
        request = ModelInferRequest.FromString(body)
    except DecodeError:
        raise Refused from None
    raws = list(request.raw_input_contents)
    if raws and len(raws) != len(request.inputs):
        raise Refused
    found: dict[str, Any] = {}
    for n, tensor in enumerate(request.inputs):
        name = tensor.name.decode("utf-8", "replace")
        if name not in columns:
            if ignore:
                continue
            raise Refused
        if name in found or tensor.datatype not in INFERENCE:
            raise Refused
        field, kind, convert = INFERENCE[tensor.datatype]
        if raws:
            if any(len(values) for _, values in tensor.contents.ListFields()):
                raise Refused
            values = _raw_texts(raws[n]) if kind is None else _raw_values(raws[n], kind)
        else:
            values = [convert(value) for value in getattr(tensor.contents, field)] if field else []
        found[name] = (tensor.datatype, _table(list(tensor.shape), values, max_rows))
    return _check_rows(found)


def tables(rows: RequestRows, columns: tuple[str, ...]) -> dict[str, list[list[Any]]]:
    """The values of decoded rows, by row."""
    found: dict[str, list[list[Any]]] = {}
    for c, name in enumerate(columns):
        if name in rows.multi:
            assert rows.kind_C[c] == ABSENT
            column = rows.multi[name]
            if isinstance(column, TextColumn):
                values = _texts(rows.data, column.starts_N, column.ends_N)
            elif isinstance(column, NumberColumn):
                values = column.values_N.tolist()
            else:
                assert isinstance(column, IntegerColumn) and not column.missing_N.any()
                values = (column.values_N.view(np.int64) if column.signed else column.values_N).tolist()
            bounds = range(rows.rows + 1) if column.offsets_B1 is None else column.offsets_B1.tolist()
            found[name] = [values[bounds[row] : bounds[row + 1]] for row in range(rows.rows)]
        elif rows.kind_C[c] != ABSENT:
            readers = {
                TEXT: lambda c=c: _texts(rows.data, rows.starts_CB[c], rows.ends_CB[c]),
                INTEGER: lambda c=c: rows.integers_CB[c].tolist(),
                **dict.fromkeys(PRECISION, lambda c=c: rows.numbers_CB[c].tolist()),
            }
            found[name] = [[value] for value in readers[int(rows.kind_C[c])]()]
    return found


def _texts(data: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> list[bytes]:
    return [data[start:end].tobytes() for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
