"""Packs columns into bytes, all texts of a request at once, without a Python object per text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from clickline.client.columnar import Column, NumericColumn, SpanColumn, StringColumn, as_spans

Framing = Literal["field 8", "length", "none"]
"""The prefix of each text: the tag and length of protobuf field 8; its length in 4 bytes; none."""

OUTPUTS = ("logistic", "logits")
DATATYPES = {"float32": "FP32", "float64": "FP64", "int64": "INT64", "uint64": "UINT64", "text": "BYTES"}
"""The Open Inference Protocol's names of value types."""

_TAG = 8 << 3 | 2


def value_type(column: Column) -> str:
    return column.values_N.dtype.name if isinstance(column, NumericColumn) else "text"


def shape(rows: int, width: int) -> tuple[int, ...]:
    return (rows,) if width == 1 else (rows, width)


def pack_values(columns: Mapping[str, Column], framing: Framing) -> dict[str, bytes]:
    """The values of each column as contiguous bytes; numbers are little-endian."""
    strings = {name: column for name, column in columns.items() if isinstance(column, StringColumn)}
    framed = _framed_strings(strings, framing) if strings else {}
    texts = {
        name: as_spans(column)
        for name, column in columns.items()
        if name not in framed and not isinstance(column, NumericColumn)
    }
    if texts:
        framed |= zip(texts, _framed_spans(list(texts.values()), framing), strict=True)
    return {
        name: _little_endian(column).tobytes() if isinstance(column, NumericColumn) else framed[name]
        for name, column in columns.items()
    }


def _little_endian(column: NumericColumn) -> NDArray[np.generic]:
    return column.values_N.astype(column.values_N.dtype.newbyteorder("<"), copy=False)


def _framed_strings(columns: Mapping[str, StringColumn], framing: Framing) -> dict[str, bytes]:
    """Join texts with zero bytes as placeholders, then write the prefixes there. {}: not possible with these texts."""
    prefix = {"field 8": 2, "length": 4, "none": 0}[framing]
    if not prefix:
        return {}
    room = "\0" * prefix
    joined = room + room.join(room.join(column.values) for column in columns.values())
    out = np.frombuffer(bytearray(joined.encode()), dtype=np.uint8)
    zeros = np.flatnonzero(out == 0)
    sizes = [column.size for column in columns.values()]
    if zeros.size != sum(sizes) * prefix:  # a text contains a NUL itself
        return {}
    places_N = zeros[::prefix]
    lengths_N = np.diff(places_N, append=out.size) - prefix
    if framing == "field 8" and int(lengths_N.max(initial=0)) >= 0x80:
        return {}  # such a length needs more than one byte
    _write_prefixes(out, places_N, lengths_N, framing)
    return dict(zip(columns, _split_columns(out, np.append(places_N, out.size), sizes), strict=True))


def _framed_spans(columns: Sequence[SpanColumn], framing: Framing) -> list[bytes]:
    data, starts_N = _one_buffer(columns)
    lengths_N = np.concatenate([column.ends_N - column.starts_N for column in columns])
    sizes_N = _prefix_sizes(lengths_N, framing) + lengths_N
    places_N1 = np.zeros(sizes_N.size + 1, dtype=np.int64)
    np.cumsum(sizes_N, out=places_N1[1:])
    # The bytes before a text in the data are copied in place of its prefix, then overwritten.
    source = np.arange(places_N1[-1]) + np.repeat(starts_N + lengths_N - places_N1[1:], sizes_N)
    out = data.take(source, mode="clip") if data.size else np.empty(source.size, dtype=np.uint8)
    _write_prefixes(out, places_N1[:-1], lengths_N, framing)
    return _split_columns(out, places_N1, [column.size for column in columns])


def _split_columns(out: NDArray[np.uint8], places_N1: NDArray[np.int64], sizes: Sequence[int]) -> list[bytes]:
    """The bytes of each column, given the number of its values."""
    data = out.tobytes()
    bounds = [int(places_N1[first]) for first in accumulate(sizes, initial=0)]
    return [data[start:end] for start, end in pairwise(bounds)]


def _one_buffer(columns: Sequence[SpanColumn]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The texts of all columns in one buffer, and where each begins."""
    if all(
        column.data is columns[0].data for column in columns
    ):  # as in a text file, whose lines contain all columns
        return columns[0].data, np.concatenate([column.starts_N for column in columns])
    pieces, starts, size = [], [], 0
    for column in columns:
        first = int(column.starts_N.min(initial=column.data.size))
        piece = column.data[first : int(column.ends_N.max(initial=first))]
        pieces.append(piece)
        starts.append(column.starts_N - (first - size))
        size += piece.size
    return np.concatenate(pieces), np.concatenate(starts)


def _prefix_sizes(lengths_N: NDArray[np.int64], framing: Framing) -> NDArray[np.int64]:
    if framing == "field 8":  # the tag and a varint
        return 2 + np.searchsorted([1 << 7, 1 << 14, 1 << 21, 1 << 28], lengths_N, side="right")
    return np.full(lengths_N.size, 4 if framing == "length" else 0)


def _write_prefixes(
    out: NDArray[np.uint8], places_N: NDArray[np.int64], lengths_N: NDArray[np.int64], framing: Framing
) -> None:
    if framing == "length":
        for octet in range(4):
            out[places_N + octet] = lengths_N >> 8 * octet & 0xFF
    elif framing == "field 8":
        out[places_N] = _TAG
        rest_N = lengths_N
        while places_N.size:  # a varint: 7 bits per byte, while there are more
            places_N = places_N + 1
            more_N = rest_N >= 0x80
            out[places_N] = rest_N & 0x7F | more_N * 0x80
            places_N, rest_N = places_N[more_N], rest_N[more_N] >> 7
