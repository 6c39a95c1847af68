"""Blocks of HTTP/2 headers, decoded by `hpack`, also those that hold more than anybody may send.

Every block changes the table that later blocks refer to, so one that is too large cannot be thrown away: that would end
the connection and all calls on it. Here it is read to its end for what it does to the table, and the rest of it is
skipped. What is done in vain is bounded by what it costs: references are skipped at once, a literal takes some
microseconds, and a byte in Huffman's code a fifth of one, if it goes into the table.
"""

from __future__ import annotations

import re

from hpack import Decoder, HPACKDecodingError

_SMALL = 2048  # bytes of a block that `hpack` takes as a whole
_MOST_LITERALS = 16384  # of one block: about 0.1 seconds
_MOST_HUFFMAN = 1 << 18  # bytes for the table, after a block was found to be too large: 0.05 seconds
_LARGER_THAN_TABLE = (
    4 * 4096
)  # bytes of a field that does not fit the table: Huffman's longest code has 30 bits
_ENTRY_BYTES = 32  # that each field counts beside its texts (RFC 7541, 4.1)
_UNBOUNDED = 1 << 40  # for `hpack`, which gives up in the middle of a block

_INDEXED, _INTO_TABLE, _RESIZE, _LITERAL = 0x80, 0x40, 0x20, 0
_HUFFMAN = 0x80  # of a text's length: it is in Huffman's code
_PREFIX = {_INDEXED: 7, _INTO_TABLE: 6, _RESIZE: 5, _LITERAL: 4}  # bits of the number in a field's first byte

_REFERENCES = re.compile(rb"(?:[\x81-\xfe]|\xff[\x80-\xff]{0,4}[\x00-\x7f])++")  # indexed fields, in a row

Fields = list[tuple[bytes, bytes]]


class TooMuchWork(Exception):
    """A block would take too long to read; then nothing that follows can be read."""


class HeaderDecoder:
    """The headers of one connection."""

    def __init__(self, most: int) -> None:
        """`most`: bytes that a block may stand for, as SETTINGS_MAX_HEADER_LIST_SIZE counts them."""
        self._most = most
        self._decoder = Decoder(max_header_list_size=_UNBOUNDED)

    def decode(self, block: bytes) -> Fields | None:
        """The names and values of a block; None: they are more than allowed. Raises TooMuchWork, and HPACKError for a
        block that cannot be read; then nothing that follows can."""
        if len(block) > _SMALL:
            return self._decode_large(block)
        found: Fields = list(self._decoder.decode(block, raw=True))
        return found if _size(found) <= self._most else None

    def _decode_large(self, block: bytes) -> Fields | None:
        found: Fields = []
        at = size = literals = wasted = 0
        while at < len(block):
            skipped = _REFERENCES.match(block, at) if size > self._most else None
            if skipped is not None:
                at = skipped.end()
                continue
            start, (kind, at, huffman) = at, _field(block, at)
            literals += kind != _INDEXED
            if literals > _MOST_LITERALS:
                raise TooMuchWork(f"more than {_MOST_LITERALS} literal fields in one block")
            if kind == _RESIZE and size:
                raise HPACKDecodingError("a table size after a field")
            if kind == _LITERAL and (size > self._most or at - start > self._most):
                size += at - start  # no encoder makes a text longer, so it is too long when decoded as well
                continue
            if kind == _INTO_TABLE and at - start > max(_LARGER_THAN_TABLE, self._most - size):
                self._empty_table()  # which is what it does
                size += at - start
                continue
            if size > self._most:
                wasted += huffman
                if wasted > _MOST_HUFFMAN:
                    raise TooMuchWork(
                        f"more than {_MOST_HUFFMAN} bytes in Huffman's code after too many headers"
                    )
            piece: Fields = list(self._decoder.decode(block[start:at], raw=True))
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


def _field(block: bytes, at: int) -> tuple[int, int, int]:
    """What the field there does, where it ends, and how many of its bytes are in Huffman's code."""
    first, huffman = block[at], 0
    kind = next(kind for kind in _PREFIX if first & kind == kind)
    number, at = _integer(block, at, _PREFIX[kind])
    if kind in (_INTO_TABLE, _LITERAL):
        for _ in range(1 if number else 2):  # the value, and a name that has no number
            coded = at < len(block) and block[at] & _HUFFMAN
            length, at = _integer(block, at, 7)
            at += length
            huffman += length if coded else 0
    if at > len(block):
        raise HPACKDecodingError("a field goes on after the block")
    return kind, at, huffman


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
