"""Protobuf messages written by hand: for answers, whose values are arrays and go out as one piece of memory."""

from __future__ import annotations


def number(value: int) -> bytes:
    """A varint; for numbers that are not negative."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def block(field: int, content: bytes) -> bytes:
    """A field that is bytes: a message, a text, or a packed list."""
    return number(field << 3 | 2) + number(len(content)) + content


def text(field: int, value: str) -> bytes:
    """A field that is text; an empty one is not written."""
    return block(field, value.encode()) if value else b""
