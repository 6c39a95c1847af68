"""Decodes HTTP/2 header blocks with `hpack`, including blocks that exceed the allowed size.

Every block may change the table that later blocks refer to, so one that is too large cannot be discarded: that would
end the connection and all calls on it. Here it is read to its end only for its effect on the table. The work for such
a block is bounded: references are skipped at once, a literal takes a few microseconds, and a Huffman-coded byte that
goes into the table a fifth of a microsecond.
"""

from __future__ import annotations

import re

from hpack import Decoder, HPACKDecodingError

_SMALL_BLOCK = 2048  # bytes of a block that `hpack` decodes at once
_MAX_LITERALS = 16384  # of one block: about 0.1 seconds
_MAX_HUFFMAN = 1 << 18  # bytes for the table, after a block has exceeded the limit: 0.05 seconds
_EXCEEDS_TABLE = 4 * 4096  # bytes of a field that cannot fit the table: the longest Huffman code has 30 bits
_ENTRY_BYTES = 32  # overhead of each field (RFC 7541, 4.1)
_UNBOUNDED = 1 << 40  # for `hpack`, which would stop in the middle of a block

_INDEXED, _INDEXED_LITERAL, _RESIZE, _LITERAL = 0x80, 0x40, 0x20, 0
_HUFFMAN = 0x80  # flag of a string's length: it is Huffman-coded
_PREFIX_BITS = {
    _INDEXED: 7,
    _INDEXED_LITERAL: 6,
    _RESIZE: 5,
    _LITERAL: 4,
}  # bits of the number in a field's first byte

_REFERENCES = re.compile(rb"(?:[\x81-\xfe]|\xff[\x80-\xff]{0,4}[\x00-\x7f])++")  # consecutive indexed fields

Fields = list[tuple[bytes, bytes]]


class TooMuchWork(Exception):
    """A block would take too long to decode; nothing after it can be decoded."""


class HeaderDecoder:
    """Decodes the header blocks of one connection."""

    def __init__(self, limit: int) -> None:
        """`limit`: decoded bytes of a block, as SETTINGS_MAX_HEADER_LIST_SIZE counts them."""
        self._limit = limit
        self._decoder = Decoder(max_header_list_size=_UNBOUNDED)

    def decode(self, block: bytes) -> Fields | None:
        """Return the names and values of a block, or None if they exceed the limit. Raises TooMuchWork, and
        HPACKError for a block that cannot be decoded; nothing after it can be decoded."""
        if len(block) > _SMALL_BLOCK:
            return self._decode_large(block)
        fields: Fields = list(self._decoder.decode(block, raw=True))
        return fields if _size(fields) <= self._limit else None

    def _decode_large(self, block: bytes) -> Fields | None:
        fields: Fields = []
        at = size = literals = wasted_huffman = 0
        while at < len(block):
            skipped = _REFERENCES.match(block, at) if size > self._limit else None
            if skipped is not None:
                at = skipped.end()
                continue
            start, (kind, at, huffman) = at, _field(block, at)
            literals += kind != _INDEXED
            if literals > _MAX_LITERALS:
                raise TooMuchWork(f"more than {_MAX_LITERALS} literal fields in one block")
            if kind == _RESIZE and size:
                raise HPACKDecodingError("a table size update after a field")
            if kind == _LITERAL and (size > self._limit or at - start > self._limit):
                size += (
                    at - start
                )  # encoding never makes a string longer, so the decoded one is too long as well
                continue
            if kind == _INDEXED_LITERAL and at - start > max(_EXCEEDS_TABLE, self._limit - size):
                self._clear_table()  # the effect of a field larger than the table
                size += at - start
                continue
            if size > self._limit:
                wasted_huffman += huffman
                if wasted_huffman > _MAX_HUFFMAN:
                    raise TooMuchWork(f"more than {_MAX_HUFFMAN} Huffman-coded bytes after too many headers")
            decoded: Fields = list(self._decoder.decode(block[start:at], raw=True))
            size += _size(decoded)
            if size <= self._limit:
                fields += decoded
        return fields if size <= self._limit else None

    def _clear_table(self) -> None:
        allowed = self._decoder.header_table_size
        self._decoder.header_table_size = 0
        self._decoder.header_table_size = allowed


def _size(fields: Fields) -> int:
    return sum(len(name) + len(value) for name, value in fields) + _ENTRY_BYTES * len(fields)


def _field(block: bytes, at: int) -> tuple[int, int, int]:
    """Return the kind of the field at `at`, where it ends, and its number of Huffman-coded bytes."""
    first, huffman = block[at], 0
    kind = next(kind for kind in _PREFIX_BITS if first & kind == kind)
    number, at = _integer(block, at, _PREFIX_BITS[kind])
    if kind in (_INDEXED_LITERAL, _LITERAL):
        for _ in range(1 if number else 2):  # the value, and a name that is not indexed
            coded = at < len(block) and block[at] & _HUFFMAN
            length, at = _integer(block, at, 7)
            at += length
            huffman += length if coded else 0
    if at > len(block):
        raise HPACKDecodingError("a field continues after the block")
    return kind, at, huffman


def _integer(block: bytes, at: int, bits: int) -> tuple[int, int]:
    """Return an integer with a prefix of `bits` bits (RFC 7541, 5.1), and where it ends."""
    if at >= len(block):
        raise HPACKDecodingError("a field continues after the block")
    limit = (1 << bits) - 1
    value = block[at] & limit
    at += 1
    if value < limit:
        return value, at
    for shift in range(0, 35, 7):
        if at >= len(block):
            break
        byte = block[at]
        at += 1
        value += (byte & 127) << shift
        if byte < 128:
            return value, at
    raise HPACKDecodingError("an integer does not end")
