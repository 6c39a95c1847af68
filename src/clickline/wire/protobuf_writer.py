"""Encodes protobuf fields directly, for messages whose values are arrays and are sent as one block of memory."""

from __future__ import annotations


def encode_varint(value: int) -> bytes:
    """The varint of a non-negative number."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def bytes_field(field: int, content: bytes) -> bytes:
    """A length-delimited field: a message, bytes, or a packed list."""
    return encode_varint(field << 3 | 2) + encode_varint(len(content)) + content


def string_field(field: int, value: str) -> bytes:
    """A string field; an empty string is not written."""
    return bytes_field(field, value.encode()) if value else b""
