"""Writers of the record formats, in plain Python, for tests only."""

from __future__ import annotations

import gzip
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence

import pyarrow as pa

Feature = Sequence[bytes] | Sequence[int] | Sequence[float]


def varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def field(number: int, payload: bytes) -> bytes:
    """A length-prefixed field."""
    return varint(number << 3 | 2) + varint(len(payload)) + payload


def feature(values: Feature, *, packed: bool = True) -> bytes:
    """A Feature message; the kind is that of the first value."""
    if not values:
        return b""
    if isinstance(values[0], bytes):
        return field(1, b"".join(field(1, v) for v in values))  # type: ignore[arg-type]
    if isinstance(values[0], float):
        if packed:
            return field(2, field(1, b"".join(struct.pack("<f", v) for v in values)))
        return field(2, b"".join(b"\x0d" + struct.pack("<f", v) for v in values))
    if packed:
        return field(3, field(1, b"".join(varint(int(v)) for v in values)))
    return field(3, b"".join(b"\x08" + varint(int(v)) for v in values))


def entry(name: str, feature_message: bytes) -> bytes:
    return field(1, field(1, name.encode()) + field(2, feature_message))


def example(features: Mapping[str, Feature], *, packed: bool = True) -> bytes:
    return field(
        1, b"".join(entry(name, feature(values, packed=packed)) for name, values in features.items())
    )


def crc32c(data: bytes) -> int:
    """CRC-32C bit by bit, straight from its definition."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def tfrecord(records: Iterable[bytes]) -> bytes:
    out = []
    for record in records:
        length = struct.pack("<Q", len(record))
        out += [length, masked(length), record, masked(record)]
    return b"".join(out)


def snappy_frames(data: bytes) -> bytes:
    """Snappy's framing format, as Go's snappy.NewWriter makes it: every other piece left uncompressed."""
    codec, out = pa.Codec("snappy"), [b"\xff\x06\x00\x00sNaPpY"]
    for i, at in enumerate(range(0, len(data), 60_000)):
        piece = data[at : at + 60_000]
        body = masked(piece) + (piece if i % 2 else codec.compress(piece, asbytes=True))
        out.append(struct.pack("<I", len(body) << 8 | i % 2) + body)
    return b"".join(out)


COMPRESS = {
    "none": (0, lambda data: data),
    "snappy": (1, snappy_frames),
    "raw snappy": (1, lambda data: pa.Codec("snappy").compress(data, asbytes=True)),
    "gzip": (2, lambda data: gzip.compress(data, mtime=0)),
}


def recordio_chunk(records: Sequence[bytes], compressor: str = "none", *, count_last: bool = False) -> bytes:
    """One chunk; `count_last` is the header of the Go package, which writes the count of records last."""
    payload = b"".join(struct.pack("<I", len(r)) + r for r in records)
    number, compress = COMPRESS[compressor]
    payload = compress(payload)
    crc = zlib.crc32(payload)
    if count_last:
        header = struct.pack("<5I", 0x01020304, crc, number, len(payload), len(records))
    else:
        header = struct.pack("<5I", 0x01020304, len(records), crc, number, len(payload))
    return header + payload


def recordio(
    records: Sequence[bytes], compressor: str = "none", *, chunk: int = 3, count_last: bool = False
) -> bytes:
    """A file of chunks of `chunk` records."""
    return b"".join(
        recordio_chunk(records[at : at + chunk], compressor, count_last=count_last)
        for at in range(0, len(records), chunk)
    )
