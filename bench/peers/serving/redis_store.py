"""Redis as a store of embedding rows: 8-byte keys, 40-byte values, asked for many at a time with MGET."""

from __future__ import annotations

import shutil
import socket
import subprocess
from pathlib import Path

import numpy as np

from peers.serving.servers import Server, free_ports

__all__ = ["answer_begins", "answer_length", "mget", "start_redis"]

VALUE = 40  # bytes
LOADED_AT_ONCE = 10_000


def start_redis(folder: Path, keys_N: np.ndarray) -> Server:
    """`redis-server` that holds a value for every key, and never writes to disk."""
    program = shutil.which("redis-server")
    if program is None:
        raise RuntimeError("there is no redis-server here: install it (Debian: apt-get install redis-server)")
    told = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    version = told.partition("v=")[2].split()[0]
    folder.mkdir(parents=True)
    (port,) = free_ports(1)
    command = [
        program,
        "--bind",
        "127.0.0.1",
        "--port",
        port,
        "--save",
        "",
        "--appendonly",
        "no",
        "--dir",
        folder,
    ]
    server = Server("Redis, MGET", version, port, folder, command)
    try:
        server.wait_until(lambda: socket.create_connection(("127.0.0.1", port), 1).close())
        _load(port, keys_N)
    except BaseException:
        server.stop()
        raise
    return server


def _load(port: int, keys_N: np.ndarray) -> None:
    value = bytes(range(VALUE))
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        for first in range(0, len(keys_N), LOADED_AT_ONCE):
            part_N = keys_N[first : first + LOADED_AT_ONCE]
            commands = [
                b"*3\r\n$3\r\nSET\r\n$8\r\n%b\r\n$%d\r\n%b\r\n" % (key.tobytes(), VALUE, value)
                for key in part_N
            ]
            connection.sendall(b"".join(commands))
            _expect(connection, b"+OK\r\n" * len(part_N))
        connection.sendall(b"*1\r\n$6\r\nDBSIZE\r\n")
        _expect(connection, b":%d\r\n" % len(keys_N))


def _expect(connection: socket.socket, wanted: bytes) -> None:
    got = b""
    while len(got) < len(wanted):
        part = connection.recv(len(wanted) - len(got))
        if not part:
            raise ConnectionError("redis-server closed the connection")
        got += part
    if got != wanted:
        raise RuntimeError(f"redis-server answered {got[:80]!r} instead of {wanted[:80]!r}")


def mget(keys_N: np.ndarray) -> bytes:
    return b"*%d\r\n$4\r\nMGET\r\n" % (len(keys_N) + 1) + b"".join(
        b"$8\r\n%b\r\n" % key.tobytes() for key in keys_N
    )


def answer_begins(keys: int) -> str:
    """In hex, as `load.py` takes it."""
    return f"*{keys}\r\n${VALUE}\r\n".encode().hex()


def answer_length(keys: int) -> int:
    """Of an answer in which every key was found."""
    return len(f"*{keys}\r\n") + keys * (len(f"${VALUE}\r\n") + VALUE + 2)
