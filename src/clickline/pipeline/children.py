"""The child processes of `clickline up`: starts them, reads their messages and output, schedules restarts.

"flow"    the stages, or "follow" hour after hour   ── messages ──▶ ┐
"serve"   the endpoint                              ──  output  ──▶ ┤ Children.wait
"studio"  the web page; optional                    ──────────────▶ ┘
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Literal

from clickline.processes import Backoff, ChildProcess, Process, descendants, still_alive, wait_then_kill

Role = Literal["flow", "follow", "serve", "studio"]

EXIT_SECONDS = 6.0  # for the endpoint to exit after the drain timeout
GRACE_SECONDS = 1.5  # for work to clean up when it is stopped

_STABLE_SECONDS = 60.0  # the restart delay grows for a child that lived less than this
_MIN_DELAY, _MAX_DELAY = 0.5, 60.0
_SCAN_SECONDS = 5.0  # between two looks for descendants, which read every process of the machine
_READ_BYTES = 1 << 16
_MAX_LINE = 1 << 20


class _Lines:
    """Splits what arrives at a socket or pipe into lines, without blocking."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self.rest = b""  # the start of an incomplete line
        self.ended = False

    def read(self) -> Iterator[bytes]:
        """Lines that have arrived."""
        while not self.ended:
            try:
                data = os.read(self.descriptor, _READ_BYTES)
            except BlockingIOError:
                return
            except OSError:  # ECONNRESET
                data = b""
            self.ended = not data
            *lines, self.rest = (self.rest + data).split(b"\n")
            yield from lines


class Child(ChildProcess):
    """One child process and its result."""

    def __init__(self, role: Role, request: Mapping[str, Any]) -> None:
        # The studio is a higher layer, so it is only known by its module name.
        module = (
            ("clickline.studio", "child") if role == "studio" else ("clickline.pipeline.child_process", role)
        )
        reading, writing = os.pipe()
        try:
            environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
            super().__init__(*module, request=request, output=writing, environment=environment)
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        self.role = role
        self.inbox, self.output = _Lines(self.socket.fileno()), _Lines(reading)
        self.done = False
        self.error: Mapping[str, Any] | None = None  # a ClicklineError as JSON
        self.crash: Mapping[str, Any] | None = None  # any other error
        self.deadline: float | None = None  # to exit by itself


class Children:
    """The children of one run. Not thread-safe, except for `wake`."""

    def __init__(
        self,
        request: Mapping[str, Any],
        drain: float,
        on_message: Callable[[Child, dict[str, Any]], None],
        on_output: Callable[[Role, str], None],
    ) -> None:
        """`request`: the first message to each child."""
        self._request = request
        self._drain = drain
        self._on_message, self._on_output = on_message, on_output
        self._running: dict[Role, Child] = {}
        # Processes of the endpoint may write after it has exited: they still drain.
        self._outputs: list[tuple[Role, _Lines]] = []
        self._known: dict[int, Process] = {}  # children and descendants
        self._scan_at = 0.0
        self._restarts: dict[Role, tuple[float, float]] = {}  # when to restart a child: earliest, latest
        self._delays: dict[Role, Backoff] = defaultdict(lambda: Backoff(_MIN_DELAY, _MAX_DELAY))
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ, lambda: self._woken.recv(_READ_BYTES))

    def __iter__(self) -> Iterator[Child]:
        """The children that have not exited yet."""
        return iter(list(self._running.values()))

    def wake(self) -> None:
        """Make `wait` return, from any thread."""
        with suppress(OSError):  # closed: the run has ended
            self._waker.send(b"!")

    def start(self, role: Role) -> Child:
        child = self._running[role] = Child(role, self._request)
        output = child.output
        self._outputs.append((role, output))
        self._selector.register(child.socket, selectors.EVENT_READ, lambda: self._read_messages(child))
        self._selector.register(
            output.descriptor, selectors.EVENT_READ, lambda: self._read_output(role, output)
        )
        self._known[child.pid] = Process.from_pid(child.pid, role) or Process(child.pid, "", role)
        self._scan_at = time.monotonic() + _MIN_DELAY
        return child

    def wait(self, seconds: float) -> None:
        """Handle messages and output for up to `seconds`; returns after the first of them."""
        if any(child.inbox.ended for child in self):
            seconds = min(seconds, 0.02)
        for earliest, _ in self._restarts.values():
            seconds = min(seconds, max(0.05, earliest - time.monotonic()))
        for key, _ in self._selector.select(seconds):
            key.data()

    def exited(self) -> Iterator[Child]:
        """Children that have exited since the last call; one that is past its deadline is killed."""
        for child in self:
            if child.process.poll() is not None:
                self._read_messages(child)
                self._close_socket(child)
                del self._running[child.role]
                yield child
            elif child.deadline is not None and time.monotonic() > child.deadline:
                child.process.kill()

    def restart_later(self, child: Child) -> float:
        """Schedule a restart; returns the delay."""
        if child.lifetime >= _STABLE_SECONDS:
            self._delays[child.role].reset()
        delay = self._delays[child.role].next()
        earliest = time.monotonic() + delay
        self._restarts[child.role] = (earliest, earliest + self._drain + EXIT_SECONDS)
        return delay

    def due(self) -> Iterator[Role]:
        """Roles to be started again now."""
        now = time.monotonic()
        for role, (earliest, latest) in list(self._restarts.items()):
            if now < earliest:
                continue
            # Workers of a killed endpoint keep its ports while they drain.
            left = [process for process in still_alive(self._known.values()) if process.role == role]
            if now >= latest or not left:
                wait_then_kill(left, 0.0)
                del self._restarts[role]
                yield role

    def processes(self, *, scan: bool = False) -> list[Process]:
        """All living descendants. New ones are found within seconds, or at once with `scan`."""
        if scan or time.monotonic() >= self._scan_at:
            self._scan_at = time.monotonic() + _SCAN_SECONDS
            for child in self:
                self._known |= {process.pid: process for process in descendants(child.pid, child.role)}
        alive = still_alive(self._known.values())
        self._known = {process.pid: process for process in alive}
        return alive

    def terminate(self, *, work: float, serve: float, studio: float) -> None:
        """Terminate all children and start no other. `exited` kills those that take longer than these seconds."""
        self._restarts.clear()
        for child in self:
            child.deadline = time.monotonic() + {"serve": serve, "studio": studio}.get(child.role, work)
            child.process.terminate()

    def close(self) -> None:
        """Kill what is left and read the rest of the output."""
        wait_then_kill(self.processes(), 0.0)
        for role, output in list(self._outputs):
            self._read_output(role, output)
            self._close_output(role, output)
        self._selector.close()
        self._woken.close()
        self._waker.close()

    def _read_messages(self, child: Child) -> None:
        for line in child.inbox.read():
            self._on_message(child, json.loads(line))
        if child.inbox.ended:  # it is about to exit
            self._close_socket(child)
            child.deadline = child.deadline or time.monotonic() + GRACE_SECONDS

    def _close_socket(self, child: Child) -> None:
        if child.socket.fileno() >= 0:
            self._selector.unregister(child.socket)
            child.socket.close()

    def _read_output(self, role: Role, output: _Lines) -> None:
        for line in output.read():
            self._on_output(role, line.decode(errors="replace"))
        if output.rest and (output.ended or len(output.rest) > _MAX_LINE):
            self._on_output(role, output.rest.decode(errors="replace"))
            output.rest = b""
        if output.ended:
            self._close_output(role, output)

    def _close_output(self, role: Role, output: _Lines) -> None:
        if (role, output) in self._outputs:
            self._outputs.remove((role, output))
            self._selector.unregister(output.descriptor)
            os.close(output.descriptor)
