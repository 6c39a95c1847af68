"""A brpc client without dependencies: scores one row of a JSON object, variable to values, by Paddle Serving's general
model over baidu_std.

    python brpc_client.py 127.0.0.1:8510 '{"C1": [7], "C2": [3, 4], "dense_input": [1.5, 0.2]}' [TOKEN]

Whole numbers are feasigns, fractions numbers. `clickline versions client-config N` lists the variables.
"""

from __future__ import annotations

import json
import socket
import struct
import sys

SERVICE = b"baidu.paddle_serving.predictor.general_model.GeneralModelService"


def varint(value: int) -> bytes:
    value %= 2**64
    out = b""
    while value >= 0x80:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def field(number: int, content: bytes) -> bytes:
    """A message, text or list."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def tensor(name: str, values: list[float]) -> bytes:
    """A variable of one row: its values, elem_type, shape and name."""
    if any(isinstance(value, float) for value in values):
        listed = field(2, struct.pack(f"<{len(values)}f", *values)) + b"\x50\x01"  # elem_type 1: float32
    else:
        listed = field(1, b"".join(map(varint, values)))  # elem_type 0: int64
    return listed + field(11, varint(1) + varint(len(values))) + field(13, name.encode())


def fields(message: bytes) -> dict[int, bytes | int]:
    """The last field of each number."""
    found: dict[int, bytes | int] = {}
    at = 0

    def read_varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            at += 1
            value |= (message[at - 1] & 0x7F) << shift
            shift += 7
            if message[at - 1] < 0x80:
                return value

    while at < len(message):
        key = read_varint()
        value = read_varint()
        if key & 7 == 2:
            found[key >> 3] = message[at : at + value]
            at += value
        else:
            found[key >> 3] = value
    return found


def main(address: str, feed: str, token: str = "") -> None:
    request = b"".join(field(1, tensor(name, values)) for name, values in json.loads(feed).items())
    request += field(2, b"logistic")
    call = field(1, SERVICE) + field(2, b"inference")
    meta = field(1, call) + b"\x20\x01" + (field(7, token.encode()) if token else b"")  # correlation_id 1
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(
            struct.pack(">4sLL", b"PRPC", len(meta) + len(request), len(meta)) + meta + request
        )
        stream = connection.makefile("rb")
        _, size, meta_size = struct.unpack(">4sLL", stream.read(12))
        answer = fields(stream.read(meta_size))
        body = stream.read(size - meta_size)
    error = fields(answer[2])
    if error.get(1):
        sys.exit(f"error {error[1]}: {error[2].decode()}")
    scores = fields(fields(fields(body)[1])[1])[2]
    print(struct.unpack(f"<{len(scores) // 4}f", scores)[0])


if __name__ == "__main__":
    main(*sys.argv[1:])
