"""Blocks of HTTP/2 headers, decoded by `hpack`, also those that hold more than anybody may send.

Every block changes the table that later blocks refer to, so one that is too large cannot be thrown away: that would end
the connection and all calls on it. Here it is read to its end for what it does to the table, and the rest of it is
skipped. What that costs is bounded: fields of one block, and bytes for the table that are read in vain.
"""

from __future__ import annotations

from collections.abc import Iterator

from hpack import Decoder, HPACKDecodingError

__all__ = ["HeaderDecoder"]

_MOST_FIELDS = 2048  # of one block: as many as 64 KiB can hold, by the way they are counted
_LARGER_THAN_TABLE = (
    4 * 4096
)  # bytes of a field that does not fit the table: Huffman's longest code has 30 bits
_ENTRY_BYTES = 32  # that each field counts beside its texts (RFC 7541, 4.1)
_UNBOUNDED = 1 << 40  # for `hpack`, which gives up in the middle of a block

_INDEXED, _INTO_TABLE, _RESIZE, _LITERAL = 0x80, 0x40, 0x20, 0
_PREFIX = {_INDEXED: 7, _INTO_TABLE: 6, _RESIZE: 5, _LITERAL: 4}  # bits of the number in a field's first byte

Fields = list[tuple[bytes, bytes]]


class HeaderDecoder:
    """The headers of one connection."""

    def __init__(self, most: int) -> None:
        """`most`: bytes that a block may stand for, as SETTINGS_MAX_HEADER_LIST_SIZE counts them."""
        self._most = most
        self._decoder = Decoder(max_header_list_size=_UNBOUNDED)

    def decode(self, block: bytes) -> Fields | None:
        """The names and values of a block; None: they are more than allowed. Raises HPACKError for a block that cannot
        be read; then nothing that follows can."""
        if len(block) > _MOST_FIELDS:
            return self._decode_large(block)
        found: Fields = list(self._decoder.decode(block, raw=True))
        return found if _size(found) <= self._most else None

    def _decode_large(self, block: bytes) -> Fields | None:
        found: Fields = []
        size = wasted = fields = 0
        for kind, start, end in _walk(block):
            fields += 1
            if fields > _MOST_FIELDS:
                raise HPACKDecodingError(f"more than {_MOST_FIELDS} fields")
            if kind == _RESIZE and size:
                raise HPACKDecodingError("a table size after a field")
            if kind in (_LITERAL, _INDEXED) and (size > self._most or end - start > self._most):
                size += end - start  # no encoder makes a text longer, so it is too long when decoded as well
                continue
            if kind == _INTO_TABLE and end - start > max(_LARGER_THAN_TABLE, self._most - size):
                self._empty_table()  # which is what it does
                size += end - start
                continue
            if size > self._most:
                wasted += end - start
                if wasted > self._most:
                    raise HPACKDecodingError(
                        f"more than {self._most} bytes for the table after too many headers"
                    )
            piece: Fields = list(self._decoder.decode(block[start:end], raw=True))
            size += _size(piece)
            if size <= self._most:
                found += piece
        return found if size <= self._most else None

    def _empty_table(self) -> None:
        allowed = self._decoder.header_table_size
        self._decoder.header_table_size = 0
        self._decoder.header_table_size = allowed


def _size(fields: Fields) -> int:
    return sum(len(name) + len(value) for name, value in fields) + _ENTRY_BYTES * len(fields)


def _walk(block: bytes) -> Iterator[tuple[int, int, int]]:
    """The fields of a block: what each does, where it begins and ends."""
    at, size = 0, len(block)
    while at < size:
        start, first = at, block[at]
        kind = next(kind for kind in _PREFIX if first & kind == kind)
        number, at = _integer(block, at, _PREFIX[kind])
        if kind in (_INTO_TABLE, _LITERAL):
            for _ in range(1 if number else 2):  # the value, and a name that has no number
                length, at = _integer(block, at, 7)
                at += length
        if at > size:
            raise HPACKDecodingError("a field goes on after the block")
        yield kind, start, at


def _integer(block: bytes, at: int, bits: int) -> tuple[int, int]:
    """A number with a prefix of so many bits (RFC 7541, 5.1), and where it ends."""
    if at >= len(block):
        raise HPACKDecodingError("a field goes on after the block")
    most = (1 << bits) - 1
    value = block[at] & most
    at += 1
    if value < most:
        return value, at
    for shift in range(0, 35, 7):
        if at >= len(block):
            break
        octet = block[at]
        at += 1
        value += (octet & 127) << shift
        if octet < 128:
            return value, at
    raise HPACKDecodingError("a number has no end")
