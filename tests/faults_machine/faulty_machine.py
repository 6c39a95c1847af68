"""Machines that misbehave: a small disk, a clock that jumps, a slow disk, a slow line between two processes."""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

DAY = 86_400


# ── a small disk ───────────────────────────────────────────────────────────────────────────────


class Disk:
    """A disk of its own that can be full to the last byte."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ballast = folder / "ballast"

    def fill(self, leave: int = 0) -> None:
        """Fill the disk until only this many bytes are free."""
        with suppress(OSError), self._ballast.open("wb", buffering=0) as ballast:
            for size in (1 << 20, 4096):
                with suppress(OSError):
                    while ballast.write(bytes(size)) == size:
                        pass
        os.truncate(self._ballast, max(0, self._ballast.stat().st_size - leave))

    def make_room(self) -> None:
        self._ballast.unlink()


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Disk]:
    libc = ctypes.CDLL(None, use_errno=True)
    folder.mkdir()
    if libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, f"size={size}".encode()):
        pytest.skip(f"this machine lets no test mount a disk: {os.strerror(ctypes.get_errno())}")
    try:
        yield Disk(folder)
    finally:
        assert libc.umount2(os.fsencode(folder), 2) == 0  # at once for everybody, whatever is still open


# ── a clock that jumps, a slow disk ────────────────────────────────────────────────────────────


class Machine:
    """What processes with `environment` believe of the clock, and how slow their files are; see machine.c."""

    def __init__(self, library: Path, file: Path) -> None:
        self._file = file
        self._wrong = 0
        self._slow = 0
        self._write()
        self.environment = {"LD_PRELOAD": str(library), "TROUBLE_MACHINE": str(file)}

    def set_clock(self, wrong_by: int) -> None:
        """Seconds ahead of the right time, or behind it."""
        self._wrong = wrong_by
        self._write()

    def slow_down(self, microseconds: int) -> None:
        """Each reading, writing and syncing of a file under `folder`."""
        self._slow = microseconds
        self._write()

    def with_slow(self, folder: Path) -> dict[str, str]:
        """The environment of processes for which this folder lies on the slow disk."""
        return {**self.environment, "TROUBLE_FOLDER": str(folder)}

    def _write(self) -> None:
        with self._file.open("r+b" if self._file.exists() else "w+b") as file:
            file.write(struct.pack("qq", self._wrong, self._slow))


def faulty_machine(folder: Path) -> Machine:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (cc): another clock for one process takes a small library")
    library = folder / "machine.so"
    source = Path(__file__).with_name("machine.c")
    options = ["-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([compiler, *options, "-o", library, source, "-ldl"], check=True, timeout=60)
    return Machine(library, folder / "machine")


# ── a slow line ────────────────────────────────────────────────────────────────────────────────


class Line:
    """A proxy to another port: slow, or for now not forwarding at all."""

    def __init__(self, port: int) -> None:
        self._to = port
        self.delay = 0.0  # seconds that each piece is under way
        self.piece = 1 << 16  # bytes
        self._flows = threading.Event()
        self._flows.set()
        self._ended = threading.Event()
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]

    def stall(self) -> None:
        """Forward nothing, without an error."""
        self._flows.clear()

    def flow(self) -> None:
        self._flows.set()

    def __enter__(self) -> Line:
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._flows.set()
        for one in (self._listener, *tuple(self._open)):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in self._threads:
            thread.join(10)

    def _start(self, what: object, *arguments: object) -> None:
        thread = threading.Thread(target=what, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):  # the end
            while True:
                near = self._listener.accept()[0]
                try:
                    far = socket.create_connection(("127.0.0.1", self._to), 5)
                except OSError:
                    near.close()
                    continue
                for one in (near, far):
                    one.settimeout(None)
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    self._open.add(one)
                self._start(self._carry, near, far)
                self._start(self._carry, far, near)

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while piece := source.recv(self.piece):
                self._flows.wait()
                self._ended.wait(self.delay)
                target.sendall(piece)
        for one, how in ((source, socket.SHUT_RD), (target, socket.SHUT_WR)):
            with suppress(OSError):
                one.shutdown(how)
