"""Decodes a request's bytes to rows, without a Python object per value; texts stay in place in the bytes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from clickline.errors import RequestRefused
from clickline.protobuf_wire import NameTable
from clickline.records import (
    PRECISION,
    IntegerColumn,
    NumberColumn,
    RawColumn,
    RequestRows,
    TextColumn,
)
from clickline.wire import decode_values, parse_tensors, tensor_layout
from clickline.wire.messages import POOL
from clickline.wire.name_matching import nearest_name

_DTYPES = POOL.FindEnumTypeByName("tensorflow.DataType").values_by_number
_ALLOWED_TYPES = "text, a number or a bool"


def top_level_fields(body: bytes, *fields: int) -> Iterator[tuple[int, bytes | int]]:
    """The top-level fields with these numbers, in order: messages and texts as bytes, varints as numbers."""
    wanted = sum(1 << number for number in fields)
    data = np.frombuffer(body, dtype=np.uint8)
    spans_P3 = np.empty((8, 3), dtype=np.int64)
    count = parse_tensors.find_fields(data, wanted, spans_P3)
    if count > len(spans_P3):
        spans_P3 = np.empty((count, 3), dtype=np.int64)
        parse_tensors.find_fields(data, wanted, spans_P3)
    if count < 0:
        raise malformed()
    for tag, start, end in spans_P3[:count].tolist():
        yield tag >> 3, body[start:end] if tag & 7 else start


def malformed(where: str = "") -> RequestRefused:
    """The error for bytes that are not the expected protobuf message."""
    return RequestRefused(
        "invalid", f"The request is malformed{where}: its bytes are not the protobuf message expected here."
    )


def unknown_field(name: str, columns: tuple[str, ...]) -> RequestRefused:
    """The error for a field that the model does not have."""
    near = nearest_name(name, columns)
    if near is not None:
        remedy = f'Did you mean "{near}"?'
    else:
        listed = ", ".join(columns[:12]) + (f", … ({len(columns)} in all)" if len(columns) > 12 else "")
        remedy = f"Its fields: {listed}."
    return RequestRefused("invalid", f'"{name[:100]}" is not a field of this model. {remedy}')


class RequestReader:
    """Reads the requests of a model with these columns."""

    def __init__(self, columns: tuple[str, ...]) -> None:
        self.columns = columns
        self._names = NameTable.of(columns)

    @staticmethod
    @lru_cache(maxsize=16)
    def of(columns: tuple[str, ...]) -> RequestReader:
        """The cached reader for these columns."""
        return RequestReader(columns)

    def tensors(self, body: bytes, field: int, max_rows: int, ignore_unknown: bool) -> RequestRows:
        """Rows of the map<string, TensorProto> in this field of a PredictRequest or a RankRequest."""
        data, header_CF = self._parse(body, field, ignore_unknown)
        return self._decode(data, header_CF, tensor_layout.MAP_VALUE, max_rows)

    def tensors_if_any(
        self, body: bytes, field: int, max_rows: int, ignore_unknown: bool
    ) -> RequestRows | None:
        """Like `tensors`; None if the map has no tensor for any column."""
        data, header_CF = self._parse(body, field, ignore_unknown)
        if not header_CF[:, tensor_layout.END].any():
            return None
        return self._decode(data, header_CF, tensor_layout.MAP_VALUE, max_rows)

    def _parse(
        self, body: bytes, field: int, ignore_unknown: bool
    ) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        data = np.frombuffer(body, dtype=np.uint8)
        header_CF = np.zeros((len(self.columns), tensor_layout.HEADER_FIELDS), dtype=np.int64)
        status, start, end = parse_tensors.parse_predict(
            data, field << 3 | 2, *self._names, ignore_unknown, header_CF
        )
        if status:
            raise self._field_error(status, bytes(body[start:end]))
        return data, header_CF

    def inputs(self, body: bytes, max_rows: int, ignore_unknown: bool) -> tuple[RequestRows, bool]:
        """Rows of a ModelInferRequest, and whether it used raw_input_contents."""
        data = np.frombuffer(body, dtype=np.uint8)
        header_CF = np.zeros((len(self.columns), tensor_layout.HEADER_FIELDS), dtype=np.int64)
        status, start, end, inputs, raws = parse_tensors.parse_infer(
            data, *self._names, ignore_unknown, header_CF
        )
        if status:
            raise self._field_error(status, bytes(body[start:end]))
        if raws and raws != inputs:
            raise RequestRefused(
                "invalid",
                f"raw_input_contents has {raws} entries for {inputs} inputs. Send one for each input, or none.",
            )
        return self._decode(data, header_CF, tensor_layout.INPUT_CONTENTS, max_rows), raws > 0

    def _decode(
        self, data: NDArray[np.uint8], header_CF: NDArray[np.int64], inner_tag: int, max_rows: int
    ) -> RequestRows:
        kind_C = np.empty(len(self.columns), dtype=np.uint8)
        status, c, rows, special = parse_tensors.validate(header_CF, max_rows, data.size, kind_C)
        if status:
            raise self._shape_error(status, c, rows, data, header_CF, inner_tag, max_rows)
        shape = len(self.columns), rows
        starts_CB = np.empty(shape, dtype=np.int64)
        ends_CB = np.empty(shape, dtype=np.int64)
        numbers_CB = np.empty(shape, dtype=np.float64)
        integers_CB = np.empty(shape, dtype=np.int64)
        infinite = decode_values.decode_columns(
            data, inner_tag, header_CF, kind_C, starts_CB, ends_CB, numbers_CB, integers_CB
        )
        if infinite >= 0:
            raise _infinity_error(self.columns[infinite])
        multi = {}
        if special:
            for c, header in enumerate(header_CF):
                width, element = header[tensor_layout.WIDTH], header[tensor_layout.ELEMENT]
                if header[tensor_layout.END] and (width != 1 or element == tensor_layout.U64):
                    multi[self.columns[c]] = self._multi_valued(data, inner_tag, header, self.columns[c])
        return RequestRows(rows, data, kind_C, starts_CB, ends_CB, numbers_CB, integers_CB, multi)

    def _multi_valued(
        self, data: NDArray[np.uint8], inner_tag: int, header: NDArray[np.int64], name: str
    ) -> RawColumn:
        rows, width, element = (
            int(header[n]) for n in (tensor_layout.ROWS, tensor_layout.WIDTH, tensor_layout.ELEMENT)
        )
        size = rows * width
        starts_N, ends_N = np.empty(size, dtype=np.int64), np.empty(size, dtype=np.int64)
        numbers_N, integers_N = np.empty(size, dtype=np.float64), np.empty(size, dtype=np.int64)
        if decode_values.decode_column(data, inner_tag, header, starts_N, ends_N, numbers_N, integers_N):
            raise _infinity_error(name)
        offsets_B1 = None if width == 1 else np.arange(rows + 1, dtype=np.int64) * width
        if element == tensor_layout.BYTES:
            return TextColumn(data, starts_N, ends_N, offsets_B1)
        if element >= tensor_layout.F16:
            return NumberColumn(numbers_N, offsets_B1, PRECISION[int(tensor_layout.KIND[element])])
        none_N = np.zeros(size, dtype=np.bool_)
        return IntegerColumn(integers_N.view(np.uint64), none_N, element != tensor_layout.U64, offsets_B1)

    def _field_error(self, status: int, name: bytes) -> RequestRefused:
        text = name.decode("utf-8", "backslashreplace")
        if status == tensor_layout.UNKNOWN:
            return unknown_field(text, self.columns)
        if status == tensor_layout.DUPLICATE:
            return RequestRefused("invalid", f"{text} is sent twice. Send each field once.")
        return malformed(f' at field "{text[:100]}"' if name else "")

    def _shape_error(
        self,
        status: int,
        c: int,
        other: int,
        data: NDArray[np.uint8],
        header_CF: NDArray[np.int64],
        inner_tag: int,
        max_rows: int,
    ) -> RequestRefused:
        header, name = header_CF[c].tolist(), self.columns[c]
        rows = header[tensor_layout.ROWS]
        if status == tensor_layout.NO_ROWS:
            message = (
                f"The request has no rows. Send at least one field of the model, such as {self.columns[0]}."
            )
            if header_CF[:, tensor_layout.END].any():
                message = "The request has no rows: its tensors are empty. Send at least one row."
        elif status == tensor_layout.UNSUPPORTED_TYPE:
            message = f"{name} has {_type_name(data, header, inner_tag)}; allowed: {_ALLOWED_TYPES}."
        elif status == tensor_layout.TOO_MANY:
            message = f"{name} has {rows} rows; allowed: up to {max_rows}. Send the rest in further requests."
        elif status == tensor_layout.RAGGED:
            first = self.columns[other]
            message = (
                f"{name} has {rows} rows and {first} has {header_CF[other, tensor_layout.ROWS]}; "
                "all fields of a request must have the same number of rows."
            )
        else:
            message = f"{name} {_shape_message(header)}"
        return RequestRefused("invalid", message)


def _infinity_error(name: str) -> RequestRefused:
    return RequestRefused(
        "invalid", f"{name} contains infinity; allowed: a finite number, or NaN for missing."
    )


def _type_name(data: NDArray[np.uint8], header: list[int], inner_tag: int) -> str:
    number = header[tensor_layout.TYPE]
    if inner_tag == tensor_layout.MAP_VALUE:
        if number == 0:
            return "no dtype"
        return f"dtype {_DTYPES[number].name if number in _DTYPES else number}"
    text = data[number >> 32 : number & 0xFFFFFFFF].tobytes().decode("utf-8", "backslashreplace")
    return f'datatype "{text[:40]}"' if text else "no datatype"


def _shape_message(header: list[int]) -> str:
    rank, rows, width, count = (
        header[n] for n in (tensor_layout.RANK, tensor_layout.ROWS, tensor_layout.WIDTH, tensor_layout.COUNT)
    )
    if rank > 2:
        return f"has {rank} dimensions; allowed: [rows] or [rows, values]."
    shape = f"[{rows}, {width}]" if rank == 2 else f"[{rows}]" if rank else "of one value"
    if rows < 0 or width < 0:
        return f"has shape {shape}; allowed: sizes of at least 0."
    content = f"{count} values" if count >= 0 else "bytes that are not a whole number of values"
    if count < 0 and header[tensor_layout.ELEMENT] == tensor_layout.BYTES:
        content = "text that is not in the list for text, or does not match its lengths"
    if header[tensor_layout.RAW_COUNT]:
        return "has values in contents and in raw_input_contents; allowed: one of them."
    return f"has shape {shape} and {content}; they must match."
