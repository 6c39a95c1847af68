"""Header blocks (RFC 9113, 4.3): put together from HEADERS and CONTINUATION frames, and decoded. And those we send."""

from __future__ import annotations

from time import monotonic

from hpack import HPACKError

from clickline.serving.http2.frames import (
    COMPRESSION_ERROR,
    END_HEADERS,
    ENHANCE_YOUR_CALM,
    FRAME_SIZE_ERROR,
    PADDED,
    PRIORITY,
    PROTOCOL_ERROR,
    Http2Error,
    unpadded,
)
from clickline.serving.http2.hpack_decoder import HeaderDecoder, TooMuchWork

MAX_HEADERS = 1 << 16  # bytes of a call's headers; a call with more is refused
_MAX_BLOCK = 1 << 20  # bytes of headers that are decoded at all, to keep the table right for other calls
_MAX_CONTINUATIONS = 1024  # frames of one block
_MAX_CACHED_BLOCKS = 256
_MAX_CACHED_BYTES = 256  # of one block


class HeaderBlocks:
    """The header blocks of one connection, one at a time."""

    def __init__(self) -> None:
        self.incomplete_since = 0.0  # when the incomplete block began; 0: there is none
        self._decoder = HeaderDecoder(MAX_HEADERS)
        self._cache: dict[bytes, dict[str, str]] = {}
        self._stream = self._flags = self._continuations = 0  # of the incomplete block
        self._block = bytearray()

    def begin(self, id: int, flags: int, payload: bytes) -> bytes | None:
        """Take the payload of HEADERS. Returns the block if it is complete."""
        if flags & PADDED:
            payload = unpadded(payload)
        if flags & PRIORITY:
            if len(payload) < 5:
                raise Http2Error(FRAME_SIZE_ERROR, "a priority field is truncated")
            payload = payload[5:]
        if flags & END_HEADERS:
            return payload
        self._stream, self._flags, self._continuations = id, flags, 0
        self._block = bytearray(payload)
        self.incomplete_since = monotonic()
        return None

    def proceed(self, id: int, flags: int, payload: bytes) -> tuple[int, bytes] | None:
        """Take the payload of CONTINUATION. Returns the flags of HEADERS and the block if it is complete."""
        if not self.incomplete_since or self._stream != id:
            raise Http2Error(PROTOCOL_ERROR, "a CONTINUATION without HEADERS")
        self._block += payload
        self._continuations += 1
        too_many = len(self._block) > _MAX_BLOCK or self._continuations > _MAX_CONTINUATIONS
        if too_many or not (payload or flags & END_HEADERS):
            raise Http2Error(
                ENHANCE_YOUR_CALM, "a header block is too large, or continues with an empty frame"
            )
        if not flags & END_HEADERS:
            return None
        self.incomplete_since = 0.0
        return self._flags, bytes(self._block)

    def decode(self, block: bytes) -> dict[str, str] | None:
        """Decode a block; None if it exceeds the limit. Most blocks are only references to the header table and
        repeat, so they are cached."""
        if not block or min(block) <= 0x80 or max(block) == 0xFF:
            self._cache.clear()  # this block may change the table
            return self._decode(block)
        headers = self._cache.get(block)
        if headers is None:
            headers = self._decode(block)
            if (
                headers is not None
                and len(self._cache) < _MAX_CACHED_BLOCKS
                and len(block) <= _MAX_CACHED_BYTES
            ):
                self._cache[block] = headers
        return headers

    def _decode(self, block: bytes) -> dict[str, str] | None:
        try:
            fields = self._decoder.decode(block)
        except TooMuchWork as error:
            raise Http2Error(ENHANCE_YOUR_CALM, str(error)) from error
        except (HPACKError, ValueError) as error:
            raise Http2Error(COMPRESSION_ERROR, f"headers cannot be read: {error}") from error
        return None if fields is None else {_text(name): _text(value) for name, value in fields}


def _text(value: bytes | str) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")


def literal(name: bytes, value: bytes) -> bytes:
    """Encode a header without using a table."""
    return b"\0" + _length(len(name)) + name + _length(len(value)) + value


def _length(value: int) -> bytes:
    """Encode an integer with a 7-bit prefix (RFC 7541, 5.1)."""
    if value < 127:
        return bytes([value])
    octets = bytearray([127])
    value -= 127
    while value >= 128:
        octets.append(value & 127 | 128)
        value >>= 7
    octets.append(value)
    return bytes(octets)
