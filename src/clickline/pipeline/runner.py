"""The parent of `clickline up`: starts its children, receives their messages, restarts them, and leaves none behind.

    "flow"    the stages, or "follow" hour after hour   ── messages ──▶ ┐
    "serve"   the endpoint                              ──  stderr  ──▶ ┤ one thread here ──▶ state, logs, progress
    "studio"  the web page; optional                    ──────────────▶ ┘

One thread handles all events. Other threads only request it to stop, or wait for it.
"""

from __future__ import annotations

import atexit
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Literal

from clickline.config import Config
from clickline.errors import ClicklineError
from clickline.pipeline.ipc import error_from_json, error_to_json, replay
from clickline.pipeline.processes import Process, descendants, still_alive, wait_then_kill
from clickline.pipeline.run_state import RunState, utc
from clickline.pipeline.stage_logs import LogWriter
from clickline.pipeline.up_folder import RunInfo, UpFolder
from clickline.progress import Progress

Role = Literal["flow", "follow", "serve", "studio"]

_POLL_SECONDS = 0.5  # between two checks of what sends no event: processes, restarts, the state on disk
_STABLE_SECONDS = 60.0  # the restart delay grows for a child that lived less than this
_MIN_DELAY, _MAX_DELAY = 0.5, 60.0
_GRACE_SECONDS = 1.5  # for work to clean up when it is stopped
_EXIT_SECONDS = 6.0  # for the endpoint to exit after the drain timeout
_STUDIO_SECONDS = 0.5  # for the studio to exit
_KILL_SECONDS = 2.0  # for the endpoint to stop its workers without draining
_SWITCHED = '"event": "the version is current"'
_READ_BYTES = 1 << 16
_MAX_LINE = 1 << 20


class _Child:
    """One child process."""

    def __init__(self, role: Role, request: Mapping[str, Any]) -> None:
        self.role = role
        self.born = time.monotonic()
        # The studio is a higher layer, so it is only known by its module name.
        module = (
            ("clickline.studio", "child") if role == "studio" else ("clickline.pipeline.child_process", role)
        )
        self.socket, theirs = socket.socketpair()
        reading, writing = os.pipe()
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", *module, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,  # Ctrl-C goes to the parent only, which stops its children in order
            )
        except BaseException:
            self.socket.close()
            os.close(reading)
            raise
        finally:
            theirs.close()
            os.close(writing)
        self.output = reading
        self.identity = Process.from_pid(self.process.pid, role) or Process(self.process.pid, "", role)
        self.partial = b""  # the start of an incomplete line
        self.closed = False  # it has closed its socket and is about to exit
        self.done = False
        self.error: Mapping[str, Any] | None = None  # a ClicklineError as JSON
        self.crash: Mapping[str, Any] | None = None  # any other error
        self.deadline: float | None = None  # to exit by itself
        with suppress(OSError):  # it may have exited already
            self.socket.sendall(json.dumps(request).encode() + b"\n")
        self.socket.setblocking(False)
        os.set_blocking(reading, False)

    def messages(self) -> Iterator[dict[str, Any]]:
        """Messages that have arrived."""
        while not self.closed:
            try:
                data = self.socket.recv(_READ_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self.closed = True
                return
            *lines, self.partial = (self.partial + data).split(b"\n")
            for line in lines:
                yield json.loads(line)

    def exit_reason(self) -> str:
        code = self.process.returncode
        if code >= 0:
            return f"with exit code {code}"
        name = signal.Signals(-code).name if -code in set(signal.Signals) else "unknown"
        memory = ", perhaps because memory ran out" if -code == signal.SIGKILL else ""
        return f"by signal {-code} ({name}){memory}"


class _Output:
    """Output of the processes of one child; workers of the endpoint may outlive it while they drain."""

    def __init__(self, descriptor: int, write: Callable[[str], None]) -> None:
        self.descriptor = descriptor
        self._write = write
        self._rest = b""

    def read(self) -> bool:
        """Write the lines that have arrived; False at the end of the output."""
        while True:
            try:
                data = os.read(self.descriptor, _READ_BYTES)
            except BlockingIOError:
                return True
            if not data:
                self.close()
                return False
            *lines, self._rest = (self._rest + data).split(b"\n")
            if len(self._rest) > _MAX_LINE:
                lines.append(self._rest)
                self._rest = b""
            for line in lines:
                self._write(line.decode(errors="replace"))

    def close(self) -> None:
        if self._rest:
            self._write(self._rest.decode(errors="replace"))
            self._rest = b""
        os.close(self.descriptor)


class Runner:
    """One run of `up`, from its lock to its last child."""

    def __init__(
        self,
        config: Config,
        *,
        follow: bool,
        backfill: str | None,
        serve: bool,
        studio: bool,
        progress: Progress,
        program: bool,
    ) -> None:
        """`program`: this process is a user's program, which `down` must not end."""
        self._config = config
        self._work_role: Role = "follow" if follow else "flow"
        self._follow = follow
        self._serve = serve
        self._with_studio = studio
        self._program = program
        self._request = {"config": config.model_dump(mode="json", by_alias=True), "backfill": backfill}
        self.folder = UpFolder(config)
        self._state = RunState(expected_stages(follow=follow, serve=serve))
        self._logs = LogWriter(self.folder.logs, self._state)
        self._progress = progress
        self._own_process = Process.from_pid(os.getpid(), "up")
        self._since = time.time()
        self._children: dict[str, _Child] = {}
        self._outputs: list[_Output] = []
        self._known: dict[int, Process] = {}  # all descendants that are alive
        self._restarts: dict[Role, tuple[float, float]] = {}  # when to restart a child: earliest, latest
        self._delays: dict[Role, float] = {}
        self._work_done = False
        self._was_up = False  # whether the endpoint has ever been up
        self._studio: Mapping[str, Any] | None = None  # its address, while it runs
        self._requested: Literal["", "stop", "kill"] = ""
        self._saved: Mapping[str, Any] = {}
        self._saved_at = 0.0
        self._ended_at: float | None = None
        self._error: BaseException | None = None
        self._up, self._ended = threading.Event(), threading.Event()  # both are set at the end
        self._state_lock = threading.Lock()  # guards `_state`
        self._selector: selectors.BaseSelector
        self._wake_receiver: socket.socket
        self._wake_sender: socket.socket
        self._lock: int

    # ── for other threads ──────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Raises ClicklineError if another run holds the lock."""
        before = self.folder.read()
        self._lock = self.folder.acquire("program" if self._program else "up")
        try:
            self._wait_for_lost_run(before)
        except BaseException:
            os.close(self._lock)
            raise
        self._selector = selectors.DefaultSelector()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        atexit.register(self.stop)
        threading.Thread(target=self._run, name="clickline up", daemon=True).start()

    def wait(self, *, until_up: bool = False, seconds: float | None = None) -> bool:
        """Wait for the end, or until the run is up; returns whether that happened. Raises the error of a failed run."""
        happened = (self._up if until_up else self._ended).wait(seconds)
        if self._ended.is_set() and self._error is not None:
            raise self._error
        return happened

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    @property
    def was_stopped(self) -> bool:
        return bool(self._requested)

    def stop(self) -> None:
        """Stop all processes and return when they have exited. On a KeyboardInterrupt, do not drain."""
        self._request_stop("stop")
        try:
            self._ended.wait()
        except KeyboardInterrupt:
            self._request_stop("kill")
            self._ended.wait()
            raise

    @property
    def studio(self) -> str | None:
        """The address of the studio."""
        return None if self._studio is None else str(self._studio["url"])

    def status(self) -> dict[str, Any]:
        """Stages and work in progress, as in state.json."""
        with self._state_lock:
            return self._state.to_json()

    def _request_stop(self, what: Literal["stop", "kill"]) -> None:
        self._requested = what
        with suppress(OSError):  # the thread has ended
            self._wake_sender.send(b"!")

    # ── the thread ─────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        try:
            self._selector.register(
                self._wake_receiver, selectors.EVENT_READ, lambda: self._wake_receiver.recv(_READ_BYTES)
            )
            self._logs.write("up", f"started: pid {os.getpid()}, {self._work_role}")
            self._launch(self._work_role)
            if self._follow and self._serve:
                self._launch("serve")
            if self._with_studio:
                self._launch_studio()
            while not self._requested and not (self._work_done and not self._serve):
                self._wait_for_events(_POLL_SECONDS)
                self._reap()
                self._start_due()
                self._save()
                if self.folder.stop_requested():
                    self._requested = "stop"
        except BaseException as error:  # noqa: BLE001 - `wait` raises it
            self._fail(error)
        for _ in range(2):  # a progress object that raises is not called again
            try:
                self._end_children()
                break
            except BaseException as error:  # noqa: BLE001
                self._fail(error)
        self._finish()

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        with suppress(Exception):
            if self._state.running is not None:
                self._report(
                    {"stage": self._state.running, "state": "failed", "facts": {"reason": str(error)}}
                )
            self._logs.write("up", f"failed: {type(error).__name__}: {error}")

    def _finish(self) -> None:
        with suppress(Exception):
            wait_then_kill(self._known.values(), 0.0)
            self._known.clear()
            self._studio = None
            state = "failed" if self._error else "stopped" if self._requested else "done"
            self._state.close(state)
            self._ended_at = time.time()
            self._logs.write("up", f"ended: {state}")
            self._save(state, now=True)
            self._logs.close()
        for output in self._outputs:
            with suppress(OSError):
                output.close()
        self._selector.close()
        self._wake_receiver.close()
        self._wake_sender.close()
        os.close(self._lock)
        atexit.unregister(self.stop)
        self._ended.set()
        self._up.set()

    def _wait_for_events(self, seconds: float) -> None:
        if any(child.closed for child in self._children.values()):
            seconds = min(seconds, 0.02)
        for earliest, _ in self._restarts.values():
            seconds = min(seconds, max(0.05, earliest - time.monotonic()))
        for key, _ in self._selector.select(seconds):
            key.data()

    # ── children ───────────────────────────────────────────────────────────────────────────────

    def _launch(self, role: Role) -> None:
        child = _Child(role, self._request)
        self._children[role] = child
        self._known[child.identity.pid] = child.identity
        output = _Output(child.output, lambda line: self._on_output(role, line))
        self._outputs.append(output)
        self._selector.register(child.socket, selectors.EVENT_READ, lambda: self._on_messages(child))
        self._selector.register(output.descriptor, selectors.EVENT_READ, lambda: self._drain_output(output))
        self._logs.write("up", f"{role}: started, pid {child.process.pid}")
        if role == "serve":
            self._report({"stage": "serve", "state": "running", "facts": {"state": "starting"}})
        self._save(now=True)

    def _launch_studio(self) -> None:
        try:
            self._launch("studio")
        except OSError as error:  # the process cannot be started: no reason to end the run
            self._without_studio(str(error.strerror or error))

    def _without_studio(self, why: str) -> None:
        self._report({"say": f"{why} The run continues without the studio."})

    def _on_output(self, role: Role, line: str) -> None:
        self._logs.write(self._stage_of(role), line)
        if role == "serve" and _SWITCHED in line:  # the endpoint reports this in its log only
            with suppress(ValueError, KeyError):
                facts = {
                    **self._state.to_json()["stages"]["serve"]["facts"],
                    "version": json.loads(line)["version"],
                }
                if "grpc" in facts:
                    self._report({"stage": "serve", "state": "running", "facts": facts})

    def _stage_of(self, role: Role) -> str:
        """The log that a role writes to."""
        return role if role in ("serve", "studio") else self._state.running or "up"

    def _drain_output(self, output: _Output) -> None:
        if not output.read():
            self._selector.unregister(output.descriptor)
            self._outputs.remove(output)

    def _on_messages(self, child: _Child) -> None:
        for message in child.messages():
            match message:
                case {"up": facts}:
                    self._was_up = True
                    self._report({"stage": "serve", "state": "running", "facts": facts})
                    self._up.set()
                case {"studio": where}:
                    self._studio = where
                    token = f" (token: {where['token_file']})" if where["token_file"] else ""
                    self._report({"say": f"studio: {where['url']}{token}"})
                    self._save(now=True)
                case {"done": _}:
                    child.done = True
                case {"error": error}:
                    child.error = error
                case {"crash": crash}:
                    child.crash = crash
                case _:
                    self._report(message)
                    following = (message.get("stage"), message.get("state")) == ("follow", "running")
                    if following and not self._serve:
                        self._up.set()
        if child.closed:
            self._close_socket(child)
            child.deadline = child.deadline or time.monotonic() + _GRACE_SECONDS

    def _close_socket(self, child: _Child) -> None:
        if child.socket.fileno() >= 0:
            self._selector.unregister(child.socket)
            child.socket.close()

    def _report(self, message: Mapping[str, Any]) -> None:
        with self._state_lock:
            replay(message, self._state)
        replay(message, self._logs)
        if "stage" in message:
            self._save(now=True)
        try:
            replay(message, self._progress)
        except BaseException:  # an error in the user's code ends the run
            self._progress = Progress()
            raise

    def _reap(self) -> None:
        for child in list(self._children.values()):
            if not child.closed:
                continue
            if child.process.poll() is None:
                if child.deadline is not None and time.monotonic() > child.deadline:
                    child.process.kill()
                continue
            del self._children[child.role]
            self._logs.write("up", f"{child.role}: pid {child.process.pid} ended {child.exit_reason()}")
            if child.role == "serve":
                self._server_ended(child)
            elif child.role == "studio":
                self._studio_ended(child)
            else:
                self._work_ended(child)

    def _work_ended(self, child: _Child) -> None:
        with self._state_lock:
            self._state.clear_work()
        if child.done:
            self._work_done = True
            if self._serve and not self._follow:
                self._launch("serve")
            return
        if child.error is not None:
            raise error_from_json(child.error)
        if self._follow:
            self._report_restart(child, f"training ended {child.exit_reason()}")
            return
        stage = self._stage_of(child.role)
        log = self.folder.logs / f"{stage}.log"
        if child.crash is None:
            raise ClicklineError(
                f"{stage} ended {child.exit_reason()}. Run the same command again to resume. Log: {log}."
            )
        if child.crash.get("errno") is not None:
            raise OSError(child.crash["errno"], child.crash["strerror"], child.crash["filename"])
        raise RuntimeError(f"{child.crash['type']}: {child.crash['message']} The traceback is in {log}.")

    def _server_ended(self, child: _Child) -> None:
        if child.error is not None and not self._was_up:  # it never worked: a restart would not help
            raise error_from_json(child.error)
        why = child.error["message"] if child.error else f"the endpoint ended {child.exit_reason()}"
        self._report_restart(child, why)

    def _studio_ended(self, child: _Child) -> None:
        self._studio = None
        if child.error is not None:  # its port is in use or a package is missing: a restart would not help
            self._without_studio(child.error["message"])
        else:
            delay = self._schedule_restart(child)
            self._report({"say": f"the studio ended {child.exit_reason()}; restarting in {delay:g} s"})
        self._save(now=True)

    def _report_restart(self, child: _Child, why: str) -> None:
        delay = self._schedule_restart(child)
        stage = self._stage_of(child.role)
        if stage != "up":
            self._report({"stage": stage, "state": "failed", "facts": {"reason": why}})
        log = self.folder.logs / f"{stage}.log"
        self._report({"say": f"{why}; restarting in {delay:g} s. Log: {log}"})

    def _schedule_restart(self, child: _Child) -> float:
        """Schedule a restart; returns the delay."""
        lived = time.monotonic() - child.born
        delay = self._delays.get(child.role, _MIN_DELAY) if lived < _STABLE_SECONDS else _MIN_DELAY
        self._delays[child.role] = min(2 * delay, _MAX_DELAY)
        earliest = time.monotonic() + delay
        self._restarts[child.role] = (earliest, earliest + self._config.serve.drain_timeout + _EXIT_SECONDS)
        return delay

    def _start_due(self) -> None:
        now = time.monotonic()
        for role, (earliest, latest) in list(self._restarts.items()):
            # Workers of a killed endpoint keep its ports while they drain.
            left = [process for process in still_alive(self._known.values()) if process.role == role]
            if now >= latest or (now >= earliest and not left):
                wait_then_kill(left, 0.0)
                del self._restarts[role]
                if role == "studio":
                    self._launch_studio()
                else:
                    self._launch(role)

    # ── the end ────────────────────────────────────────────────────────────────────────────────

    def _end_children(self) -> None:
        """Stop the children; kill those that do not exit in time."""
        self._restarts.clear()
        for child in self._children.values():
            more = {"serve": self._config.serve.drain_timeout + _EXIT_SECONDS, "studio": _STUDIO_SECONDS}.get(
                child.role, _GRACE_SECONDS
            )
            child.deadline = time.monotonic() + more
            child.process.terminate()
        killing = False
        while self._children:
            self._wait_for_events(0.05)
            self._update_processes()
            if self._requested == "kill" and not killing:
                killing = True
                for child in self._children.values():
                    child.deadline = time.monotonic() + (_KILL_SECONDS if child.role == "serve" else 0.0)
                    child.process.terminate()  # on a second signal the endpoint stops its workers without draining
            for child in list(self._children.values()):
                if child.process.poll() is not None:
                    self._close_socket(child)
                    del self._children[child.role]
                    self._logs.write(
                        "up", f"{child.role}: pid {child.process.pid} ended {child.exit_reason()}"
                    )
                elif child.deadline is not None and time.monotonic() > child.deadline:
                    child.process.kill()
        # Workers exit with their supervisor; if it was killed they still drain.
        left = still_alive(self._known.values())
        wait_then_kill(left, 0.0 if killing else self._config.serve.drain_timeout + _EXIT_SECONDS)
        for output in list(self._outputs):
            self._drain_output(output)

    def _wait_for_lost_run(self, before: RunInfo) -> None:
        """Wait until the children of a killed run have exited, the endpoint after draining, and its ports are free."""
        left = before.processes if before.state == "lost" else []
        if left:
            pids = ", ".join(str(process.pid) for process in left)
            self._progress.log(f"an earlier run was killed; waiting for its processes to exit: {pids}")
            wait_then_kill(left, float(before.document["drain"]) + _EXIT_SECONDS)

    # ── the state on disk ──────────────────────────────────────────────────────────────────────

    def _update_processes(self) -> None:
        """Record all descendants, so that `down` knows them even after a crash of this process."""
        for child in self._children.values():
            for process in descendants(child.process.pid, child.role):
                self._known[process.pid] = process
        self._known = {process.pid: process for process in still_alive(self._known.values())}

    def _save(self, state: str = "running", *, now: bool = False) -> None:
        """Write state.json if it has changed: at most twice a second, or immediately with `now`."""
        if not now and time.monotonic() - self._saved_at < _POLL_SECONDS:
            return
        self._update_processes()
        own = [self._own_process] if self._own_process is not None and state == "running" else []
        document = {
            "state": state,
            "name": self._config.name,
            "pid": os.getpid(),
            "born": self._own_process.born if self._own_process else "",
            "since": utc(self._since),
            "ended": None if self._ended_at is None else utc(self._ended_at),
            "follow": self._follow,
            "serve": self._serve,
            "drain": self._config.serve.drain_timeout,
            "studio": self._studio,
            **self._state.to_json(),
            "processes": [process.to_json() for process in (*own, *self._known.values())],
            "error": _error_json(self._error),
        }
        self._saved_at = time.monotonic()
        if document != self._saved:
            self._saved = document
            self.folder.write_state({**document, "updated": utc(time.time())})


def expected_stages(*, follow: bool, serve: bool) -> tuple[str, ...]:
    """The stages of a run; with `follow`, the others may run before it."""
    stages = ("follow",) if follow else ("prepare", "train", "evaluate", "gate", "publish")
    return (*stages, "serve") if serve else stages


def _error_json(error: BaseException | None) -> dict[str, Any] | None:
    if error is None:
        return None
    if isinstance(error, ClicklineError):
        return error_to_json(error)
    return {"kind": type(error).__name__, "message": str(error)}
