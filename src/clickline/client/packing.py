"""Columns become bytes, all texts of a request at once: no Python object for any of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from clickline.client.columnar import Column, Numbers, Strings, Texts, spans

Framing = Literal["field 8", "sized", "bare"]
"""What stands before each text: tag and length as values of protobuf's field 8 have it; its length in 4 bytes;
nothing."""

_TAG = 8 << 3 | 2


def packed(columns: Mapping[str, Column], framing: Framing) -> dict[str, bytes]:
    """The values of each column, one after the other; numbers as memory holds them, little-endian."""
    strings = {name: column for name, column in columns.items() if isinstance(column, Strings)}
    framed = _framed_strings(strings, framing) if strings else {}
    texts = {
        name: spans(column)
        for name, column in columns.items()
        if name not in framed and not isinstance(column, Numbers)
    }
    if texts:
        framed |= zip(texts, _framed_spans(list(texts.values()), framing), strict=True)
    return {
        name: _little(column).tobytes() if isinstance(column, Numbers) else framed[name]
        for name, column in columns.items()
    }


def _little(column: Numbers) -> NDArray[np.generic]:
    return column.values_N.astype(column.values_N.dtype.newbyteorder("<"), copy=False)


def _framed_strings(columns: Mapping[str, Strings], framing: Framing) -> dict[str, bytes]:
    """Texts joined with room for their heads, which are written over it. {}: that cannot be done with these."""
    head = {"field 8": 2, "sized": 4, "bare": 0}[framing]
    if not head:
        return {}
    room = "\0" * head
    joined = room + room.join(room.join(column.values) for column in columns.values())
    out = np.frombuffer(bytearray(joined.encode()), dtype=np.uint8)
    zeros = np.flatnonzero(out == 0)
    sizes = [column.size for column in columns.values()]
    if zeros.size != sum(sizes) * head:  # a text holds a NUL itself
        return {}
    places_N = zeros[::head]
    lengths_N = np.diff(places_N, append=out.size) - head
    if framing == "field 8" and int(lengths_N.max(initial=0)) >= 0x80:
        return {}  # such a length takes more than a byte
    _write_heads(out, places_N, lengths_N, framing)
    return dict(zip(columns, _cut(out, np.append(places_N, out.size), sizes), strict=True))


def _framed_spans(columns: Sequence[Texts], framing: Framing) -> list[bytes]:
    data, starts_N = _together(columns)
    lengths_N = np.concatenate([column.ends_N - column.starts_N for column in columns])
    sizes_N = _head_sizes(lengths_N, framing) + lengths_N
    places_N1 = np.zeros(sizes_N.size + 1, dtype=np.int64)
    np.cumsum(sizes_N, out=places_N1[1:])
    # What stands before a text in the data is taken along as its head, and written over.
    source = np.arange(places_N1[-1]) + np.repeat(starts_N + lengths_N - places_N1[1:], sizes_N)
    out = data.take(source, mode="clip") if data.size else np.empty(source.size, dtype=np.uint8)
    _write_heads(out, places_N1[:-1], lengths_N, framing)
    return _cut(out, places_N1, [column.size for column in columns])


def _cut(out: NDArray[np.uint8], places_N1: NDArray[np.int64], sizes: Sequence[int]) -> list[bytes]:
    """The bytes of each column, given the number of its values."""
    whole = out.tobytes()
    bounds = [int(places_N1[first]) for first in accumulate(sizes, initial=0)]
    return [whole[start:end] for start, end in pairwise(bounds)]


def _together(columns: Sequence[Texts]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """One buffer, and where the texts of all columns begin in it."""
    if all(column.data is columns[0].data for column in columns):  # as in a file whose lines hold all columns
        return columns[0].data, np.concatenate([column.starts_N for column in columns])
    pieces, starts, size = [], [], 0
    for column in columns:
        first = int(column.starts_N.min(initial=column.data.size))
        piece = column.data[first : int(column.ends_N.max(initial=first))]
        pieces.append(piece)
        starts.append(column.starts_N - (first - size))
        size += piece.size
    return np.concatenate(pieces), np.concatenate(starts)


def _head_sizes(lengths_N: NDArray[np.int64], framing: Framing) -> NDArray[np.int64]:
    if framing == "field 8":  # the tag, and a varint
        return 2 + np.searchsorted([1 << 7, 1 << 14, 1 << 21, 1 << 28], lengths_N, side="right")
    return np.full(lengths_N.size, 4 if framing == "sized" else 0)


def _write_heads(
    out: NDArray[np.uint8], places_N: NDArray[np.int64], lengths_N: NDArray[np.int64], framing: Framing
) -> None:
    if framing == "sized":
        for octet in range(4):
            out[places_N + octet] = lengths_N >> 8 * octet & 0xFF
    elif framing == "field 8":
        out[places_N] = _TAG
        left_N = lengths_N
        while places_N.size:  # a varint: 7 bits at a time, while there are more
            places_N = places_N + 1
            more_N = left_N >= 0x80
            out[places_N] = left_N & 0x7F | more_N * 0x80
            places_N, left_N = places_N[more_N], left_N[more_N] >> 7
