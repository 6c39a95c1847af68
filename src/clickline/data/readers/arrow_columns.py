"""Converts Arrow columns to raw columns without copying text; used by the Parquet and custom readers."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from clickline.data.readers.reader import (
    BAD_UTF8,
    MAX_LISTED_BAD_ROWS,
    missing_column_error,
    preview,
    unlisted_rows,
)
from clickline.errors import DataError
from clickline.records import BadRow, IntegerColumn, NumberColumn, RawColumn, RawRows, TextColumn

MAX_BATCH_ROWS = 1 << 16  # per block: a column that is small in Arrow may be large as raw values

_ALLOWED = (
    "text, binary, integers, floats, decimals, booleans, dates, timestamps, dictionaries and lists of those"
)
_PRECISION = {16: 11, 32: 24, 64: 53}  # bits of the significand, by bits of the float
_PER_SECOND = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}


def to_rows(file: str, first_line: int, batch: pa.RecordBatch, wanted: tuple[str, ...]) -> RawRows:
    """The wanted columns of a record batch; rows with text that is not valid UTF-8 are bad."""
    for name in wanted:
        if len(batch.schema.get_all_field_indices(name)) != 1:
            raise missing_column_error(file, name, batch.schema.names)
    lines_B = np.arange(first_line, first_line + batch.num_rows)
    batch = batch.select(list(wanted))
    bad: list[BadRow] = []
    if invalid := _not_utf8(file, batch):
        bad = _bad_rows(file, first_line, invalid)
        good_B = np.ones(batch.num_rows, dtype=np.bool_)
        good_B[list(invalid)] = False
        batch, lines_B = batch.filter(pa.array(good_B)), lines_B[good_B]
    columns = {name: to_raw(f"{file}: column {name!r}", batch.column(name)) for name in wanted}
    return RawRows(len(lines_B), columns, lines_B, bad)


def _bad_rows(file: str, first_line: int, invalid: dict[int, tuple[str, bytes]]) -> list[BadRow]:
    order = sorted(invalid)
    bad = []
    for b in order[:MAX_LISTED_BAD_ROWS]:
        name, value = invalid[b]
        detail = f"column {name!r} holds bytes that are not UTF-8"
        bad.append(BadRow(file, first_line + b, BAD_UTF8, detail, preview(value)))
    if rest := order[MAX_LISTED_BAD_ROWS:]:
        bad.append(unlisted_rows(file, first_line + rest[0], BAD_UTF8, len(rest)))
    return bad


def to_raw(name: str, column: pa.Array | pa.ChunkedArray) -> RawColumn:
    """Convert one column; `name` is used in messages. A null is a missing value, a null list an empty one.

    Timestamps become seconds since 1970 UTC; those without a time zone are taken as UTC. A date becomes its ISO text,
    as in a CSV. A decimal becomes its exact text with all digits of its scale: 64-bit ids often come as decimal(20,0),
    and a double would merge them.
    """
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
        if isinstance(column, pa.ChunkedArray):
            raise DataError(f"{name} has more than 2 GiB of text in one batch; write smaller batches")
    kind = column.type
    if _is_list(kind):
        if _is_list(kind.value_type):
            raise _unusable(name, kind)
        lengths_B = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
        offsets_B1 = np.zeros(len(column) + 1, dtype=np.int64)
        np.cumsum(lengths_B, out=offsets_B1[1:])
        return _flat(name, column.flatten(), kind, offsets_B1)
    return _flat(name, column, kind, None)


def _flat(name: str, column: Any, declared_type: Any, offsets_B1: NDArray[np.int64] | None) -> RawColumn:
    kind = column.type
    if pa.types.is_dictionary(kind):
        if _is_text(kind.value_type):
            dictionary = _text(column.dictionary)
            index_N = pc.fill_null(column.indices, 0).cast(pa.int64()).to_numpy()
            if len(dictionary.starts_N) == 0:  # then every value is null
                dictionary = TextColumn(
                    dictionary.data, np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
                )
            starts_N = dictionary.starts_N[index_N]
            ends_N = np.where(_valid(column), dictionary.ends_N[index_N], starts_N)
            return TextColumn(dictionary.data, starts_N, ends_N, offsets_B1)
        return _flat(name, column.dictionary_decode(), declared_type, offsets_B1)
    if pa.types.is_decimal(kind):
        column = _decimal_text(column)
    elif pa.types.is_date(kind):
        column = column.cast(pa.date32()).cast(pa.string())
    if _is_text(column.type):
        text = _text(column)
        return TextColumn(text.data, text.starts_N, text.ends_N, offsets_B1)
    if pa.types.is_null(kind):
        empty_N = np.zeros(len(column), dtype=np.int64)
        return TextColumn(np.empty(0, dtype=np.uint8), empty_N, empty_N, offsets_B1)
    if pa.types.is_floating(kind):
        numbers_N = column.cast(pa.float64()).to_numpy(zero_copy_only=False)
        return NumberColumn(numbers_N, offsets_B1, _PRECISION[kind.bit_width])
    missing_N = ~_valid(column)
    if pa.types.is_unsigned_integer(kind) or pa.types.is_boolean(kind):
        values_N = pc.fill_null(column.cast(pa.uint64()), 0).to_numpy()
        return IntegerColumn(values_N, missing_N, signed=False, offsets_B1=offsets_B1)
    if pa.types.is_signed_integer(kind):
        integers_N = pc.fill_null(column.cast(pa.int64()), 0).to_numpy()
    elif pa.types.is_timestamp(kind):
        integers_N = pc.fill_null(column.view(pa.int64()), 0).to_numpy() // _PER_SECOND[kind.unit]
    else:
        raise _unusable(name, declared_type)
    timestamps = pa.types.is_timestamp(kind)
    return IntegerColumn(integers_N.view(np.uint64), missing_N, True, offsets_B1, timestamps)


def _decimal_text(column: Any) -> Any:
    """Decimals as Arrow prints them, but never with an exponent."""
    text = column.cast(pa.string())
    exponent_N = pc.fill_null(pc.match_substring(text, "E"), False)
    if not pc.any(exponent_N).as_py():
        return text
    plain = [format(Decimal(number), "f") for number in text.filter(exponent_N).to_pylist()]
    return pc.replace_with_mask(text, exponent_N, pa.array(plain, pa.string()))


def _text(column: Any) -> TextColumn:
    """Text spans over Arrow's own buffer."""
    if not (_is_wide(column.type) or pa.types.is_string(column.type) or pa.types.is_binary(column.type)):
        column = column.cast(pa.large_binary())  # views and fixed-size texts: the only case with a copy
    _, offsets, data = column.buffers()
    if len(column) == 0 or offsets is None:
        empty_N = np.zeros(len(column), dtype=np.int64)
        return TextColumn(np.empty(0, dtype=np.uint8), empty_N, empty_N)
    edges = np.frombuffer(offsets, dtype=np.int64 if _is_wide(column.type) else np.int32)
    edges_N1 = edges[column.offset : column.offset + len(column) + 1].astype(np.int64)
    data_bytes = np.empty(0, dtype=np.uint8) if data is None else np.frombuffer(data, dtype=np.uint8)
    starts_N, ends_N = edges_N1[:-1], edges_N1[1:]
    if column.null_count:
        ends_N = np.where(_valid(column), ends_N, starts_N)
    return TextColumn(data_bytes, starts_N, ends_N)


def _is_wide(kind: Any) -> bool:
    return bool(pa.types.is_large_string(kind) or pa.types.is_large_binary(kind))


def _valid(column: Any) -> NDArray[np.bool_]:
    valid_N: NDArray[np.bool_] = column.is_valid().to_numpy(zero_copy_only=False)
    return valid_N


def _is_text(kind: Any) -> bool:
    return any(
        is_kind(kind)
        for is_kind in (
            pa.types.is_string,
            pa.types.is_large_string,
            pa.types.is_string_view,
            pa.types.is_binary,
            pa.types.is_large_binary,
            pa.types.is_binary_view,
            pa.types.is_fixed_size_binary,
        )
    ) and not pa.types.is_decimal(kind)


def _is_list(kind: Any) -> bool:
    return bool(
        pa.types.is_list(kind)
        or pa.types.is_large_list(kind)
        or pa.types.is_fixed_size_list(kind)
        or pa.types.is_list_view(kind)
        or pa.types.is_large_list_view(kind)
    )


def _unusable(name: str, kind: Any) -> DataError:
    return DataError(f"{name} has the Arrow type {kind}; readable are {_ALLOWED}; cast it, or leave it out")


def _not_utf8(file: str, batch: pa.RecordBatch) -> dict[int, tuple[str, bytes]]:
    """Rows with text that is not UTF-8, with column and value: Arrow does not check the text of a file."""
    found: dict[int, tuple[str, bytes]] = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            column.validate(full=True)
        except pa.ArrowInvalid as error:
            raw = to_raw(f"{file}: column {name!r}", column)
            values = _not_utf8_values(raw) if isinstance(raw, TextColumn) else []
            if not values:
                raise DataError(f"{file}: column {name!r} is not a valid Arrow column: {error}") from error
            for b, value in values:
                found.setdefault(b, (name, value))
    return found


def _not_utf8_values(column: TextColumn) -> list[tuple[int, bytes]]:
    """Row and value of each text that is not UTF-8 (rare: plain Python)."""
    found = []
    at_N = np.arange(len(column.starts_N))
    rows_N = at_N if column.offsets_B1 is None else np.searchsorted(column.offsets_B1, at_N, side="right") - 1
    for b, start, end in zip(rows_N.tolist(), column.starts_N.tolist(), column.ends_N.tolist(), strict=True):
        value = column.data[start:end].tobytes()
        try:
            value.decode()
        except UnicodeDecodeError:
            found.append((b, value))
    return found
