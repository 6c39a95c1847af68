"""The parent of `clickline up`: starts the children, hears them, starts them again, and leaves none behind.

    W "work"   the flow, or with follow hour after hour   ── events ──▶ ┐
    S "serve"  the endpoint                               ── stderr ──▶ ┤ one thread here ──▶ state, logs, watchers
      "studio" the page, without which all goes on        ─────────────▶ ┘

Everything happens in one thread, which waits for whatever comes first. Others only ask it to stop, or wait for it.
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
from clickline.pipeline.ipc import error_of, replay, told_error
from clickline.pipeline.processes import Process, descendants, end_all, living
from clickline.pipeline.run_state import Board, utc
from clickline.pipeline.stage_logs import Journal
from clickline.pipeline.up_folder import Seen, UpFolder
from clickline.progress import Progress

Role = Literal["flow", "follow", "serve", "studio"]

_TICK = 0.5  # seconds between two looks at what needs no event: processes, pauses, the state on disk
_QUICK_DEATH = 60.0  # a child that lived for less is started again after a longer pause than the last time
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 60.0
_GRACE_SECONDS = 1.5  # for work to clean up when told to stop
_LAST_SECONDS = 6.0  # for the endpoint to end after the time to drain
_STUDIO_SECONDS = 0.5  # for the page to end
_AT_ONCE_SECONDS = 2.0  # for the endpoint to end its workers when nobody wants to wait
_SWITCHED = '"event": "the version is current"'
_PIECE = 1 << 16
_LONGEST_LINE = 1 << 20


class _Child:
    """One process, as long as it lives."""

    def __init__(self, role: Role, hello: Mapping[str, Any]) -> None:
        self.role = role
        self.born = time.monotonic()
        # The studio lies above us: it is known by its name alone.
        module = (
            ("clickline.studio", "child") if role == "studio" else ("clickline.pipeline.child_process", role)
        )
        self.end, theirs = socket.socketpair()
        reading, writing = os.pipe()
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", *module, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,  # Ctrl-C is for the parent, which ends its children in order
            )
        except BaseException:
            self.end.close()
            os.close(reading)
            raise
        finally:
            theirs.close()
            os.close(writing)
        self.output = reading
        self.identity = Process.of(self.process.pid, role) or Process(self.process.pid, "", role)
        self.heard = b""  # the beginning of a line
        self.hung_up = False  # it has closed its end: it is about to be gone
        self.done = False
        self.error: Mapping[str, Any] | None = None  # a ClicklineError, as it was told
        self.crash: Mapping[str, Any] | None = None  # any other
        self.deadline: float | None = None  # to end by itself
        with suppress(OSError):  # it may be dead already
            self.end.sendall(json.dumps(hello).encode() + b"\n")
        self.end.setblocking(False)
        os.set_blocking(reading, False)

    def messages(self) -> Iterator[dict[str, Any]]:
        """What has come in."""
        while not self.hung_up:
            try:
                piece = self.end.recv(_PIECE)
            except BlockingIOError:
                return
            except OSError:
                piece = b""
            if not piece:
                self.hung_up = True
                return
            *lines, self.heard = (self.heard + piece).split(b"\n")
            for line in lines:
                yield json.loads(line)

    def how_it_ended(self) -> str:
        code = self.process.returncode
        if code >= 0:
            return f"with exit code {code}"
        name = signal.Signals(-code).name if -code in set(signal.Signals) else "unknown"
        memory = ", perhaps because memory ran out" if -code == signal.SIGKILL else ""
        return f"by signal {-code} ({name}){memory}"


class _Output:
    """What the processes of one child print; those of the endpoint may outlive it by the time to drain."""

    def __init__(self, descriptor: int, write: Callable[[str], None]) -> None:
        self.descriptor = descriptor
        self._write = write
        self._rest = b""

    def read(self) -> bool:
        """Write the lines that have come; False at the end."""
        while True:
            try:
                piece = os.read(self.descriptor, _PIECE)
            except BlockingIOError:
                return True
            if not piece:
                self.close()
                return False
            *lines, self._rest = (self._rest + piece).split(b"\n")
            if len(self._rest) > _LONGEST_LINE:
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
        """`program`: the process is somebody's program, which `down` must not end."""
        self._config = config
        self._work_role: Role = "follow" if follow else "flow"
        self._follow = follow
        self._serve = serve
        self._show = studio
        self._program = program
        self._hello = {"config": config.model_dump(mode="json", by_alias=True), "backfill": backfill}
        self.folder = UpFolder(config)
        self._board = Board(expected_stages(follow=follow, serve=serve))
        self._journal = Journal(self.folder.logs, self._board)
        self._progress = progress
        self._us = Process.of(os.getpid(), "up")
        self._since = time.time()
        self._children: dict[str, _Child] = {}
        self._outputs: list[_Output] = []
        self._seen: dict[int, Process] = {}  # children and theirs, as long as they live
        self._again: dict[Role, tuple[float, float]] = {}  # when to start a child again: not before, at last
        self._pauses: dict[Role, float] = {}
        self._work_done = False
        self._served = False  # whether the endpoint was ever up
        self._studio: Mapping[str, Any] | None = None  # where the page is, while it is
        self._asked: Literal["", "stop", "kill"] = ""
        self._saved: Mapping[str, Any] = {}
        self._saved_at = 0.0
        self._ended_at: float | None = None
        self._error: BaseException | None = None
        self._up, self._ended = threading.Event(), threading.Event()  # the end is the end of waiting for both
        self._telling = threading.Lock()  # of the board
        self._selector: selectors.BaseSelector
        self._waking: socket.socket
        self._wake: socket.socket
        self._lock: int

    # ── for other threads ──────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Raises ClicklineError if another run holds the lock."""
        before = self.folder.look()
        self._lock = self.folder.hold("program" if self._program else "up")
        try:
            self._clear_up_after(before)
        except BaseException:
            os.close(self._lock)
            raise
        self._selector = selectors.DefaultSelector()
        self._waking, self._wake = socket.socketpair()
        atexit.register(self.stop)
        threading.Thread(target=self._run, name="clickline up", daemon=True).start()

    def wait(self, *, until_up: bool = False, seconds: float | None = None) -> bool:
        """Wait for the end, or until what was asked for is up; True when it came. Raises what the run failed with."""
        came = (self._up if until_up else self._ended).wait(seconds)
        if self._ended.is_set() and self._error is not None:
            raise self._error
        return came

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    @property
    def was_stopped(self) -> bool:
        return bool(self._asked)

    def stop(self) -> None:
        """End everything, and return when it is gone. A KeyboardInterrupt meanwhile: without draining."""
        self._ask("stop")
        try:
            self._ended.wait()
        except KeyboardInterrupt:
            self._ask("kill")
            self._ended.wait()
            raise

    @property
    def studio(self) -> str | None:
        """The address of the page."""
        return None if self._studio is None else str(self._studio["url"])

    def facts(self) -> dict[str, Any]:
        """Stages and work, as in state.json."""
        with self._telling:
            return self._board.document()

    def _ask(self, what: Literal["stop", "kill"]) -> None:
        self._asked = what
        with suppress(OSError):  # it has ended
            self._wake.send(b"!")

    # ── the thread ─────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        try:
            self._selector.register(self._waking, selectors.EVENT_READ, lambda: self._waking.recv(_PIECE))
            self._journal.line("up", f"begun: pid {os.getpid()}, {self._work_role}")
            self._launch(self._work_role)
            if self._follow and self._serve:
                self._launch("serve")
            if self._show:
                self._launch_studio()
            while not self._asked and not (self._work_done and not self._serve):
                self._hear(_TICK)
                self._reap()
                self._restart()
                self._save()
                if self.folder.is_asked_to_stop():
                    self._asked = "stop"
        except BaseException as error:  # noqa: BLE001 - whoever waits raises it
            self._fail(error)
        for _ in range(2):  # a watcher that raises is not told any more
            try:
                self._end_children()
                break
            except BaseException as error:  # noqa: BLE001
                self._fail(error)
        self._finish()

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        with suppress(Exception):
            if self._board.running is not None:
                self._tell({"stage": self._board.running, "state": "failed", "facts": {"reason": str(error)}})
            self._journal.line("up", f"failed: {type(error).__name__}: {error}")

    def _finish(self) -> None:
        with suppress(Exception):
            end_all(self._seen.values(), 0.0)
            self._seen.clear()
            self._studio = None
            state = "failed" if self._error else "stopped" if self._asked else "done"
            self._board.close(state)
            self._ended_at = time.time()
            self._journal.line("up", f"ended: {state}")
            self._save(state, now=True)
            self._journal.close()
        for output in self._outputs:
            with suppress(OSError):
                output.close()
        self._selector.close()
        self._waking.close()
        self._wake.close()
        os.close(self._lock)
        atexit.unregister(self.stop)
        self._ended.set()
        self._up.set()

    def _hear(self, seconds: float) -> None:
        if any(child.hung_up for child in self._children.values()):
            seconds = min(seconds, 0.02)
        for earliest, _ in self._again.values():
            seconds = min(seconds, max(0.05, earliest - time.monotonic()))
        for key, _ in self._selector.select(seconds):
            key.data()

    # ── children ───────────────────────────────────────────────────────────────────────────────

    def _launch(self, role: Role) -> None:
        child = _Child(role, self._hello)
        self._children[role] = child
        self._seen[child.identity.pid] = child.identity
        output = _Output(child.output, lambda line: self._printed(role, line))
        self._outputs.append(output)
        self._selector.register(child.end, selectors.EVENT_READ, lambda: self._listen(child))
        self._selector.register(output.descriptor, selectors.EVENT_READ, lambda: self._copy(output))
        self._journal.line("up", f"{role}: started, pid {child.process.pid}")
        if role == "serve":
            self._tell({"stage": "serve", "state": "running", "facts": {"state": "starting"}})
        self._save(now=True)

    def _launch_studio(self) -> None:
        try:
            self._launch("studio")
        except OSError as error:  # no process to be had now: no reason to end the run
            self._without_studio(str(error.strerror or error))

    def _without_studio(self, why: str) -> None:
        self._tell({"say": f"{why} The run goes on without the studio."})

    def _printed(self, role: Role, line: str) -> None:
        self._journal.line(self._stage_of(role), line)
        if role == "serve" and _SWITCHED in line:  # the endpoint tells this in its log alone
            with suppress(ValueError, KeyError):
                facts = {
                    **self._board.document()["stages"]["serve"]["facts"],
                    "version": json.loads(line)["version"],
                }
                if "grpc" in facts:
                    self._tell({"stage": "serve", "state": "running", "facts": facts})

    def _stage_of(self, role: Role) -> str:
        """Whose log it is."""
        return role if role in ("serve", "studio") else self._board.running or "up"

    def _copy(self, output: _Output) -> None:
        if not output.read():
            self._selector.unregister(output.descriptor)
            self._outputs.remove(output)

    def _listen(self, child: _Child) -> None:
        for message in child.messages():
            match message:
                case {"up": facts}:
                    self._served = True
                    self._tell({"stage": "serve", "state": "running", "facts": facts})
                    self._up.set()
                case {"studio": where}:
                    self._studio = where
                    token = f" (token: {where['token_file']})" if where["token_file"] else ""
                    self._tell({"say": f"studio: {where['url']}{token}"})
                    self._save(now=True)
                case {"done": _}:
                    child.done = True
                case {"error": error}:
                    child.error = error
                case {"crash": crash}:
                    child.crash = crash
                case _:
                    self._tell(message)
                    following = (message.get("stage"), message.get("state")) == ("follow", "running")
                    if following and not self._serve:
                        self._up.set()
        if child.hung_up:
            self._hang_up(child)
            child.deadline = child.deadline or time.monotonic() + _GRACE_SECONDS

    def _hang_up(self, child: _Child) -> None:
        if child.end.fileno() >= 0:
            self._selector.unregister(child.end)
            child.end.close()

    def _tell(self, message: Mapping[str, Any]) -> None:
        with self._telling:
            replay(message, self._board)
        replay(message, self._journal)
        if "stage" in message:
            self._save(now=True)
        try:
            replay(message, self._progress)
        except BaseException:  # the user's code: it ends the run, and is not called again
            self._progress = Progress()
            raise

    def _reap(self) -> None:
        for child in list(self._children.values()):
            if not child.hung_up:
                continue
            if child.process.poll() is None:
                if child.deadline is not None and time.monotonic() > child.deadline:
                    child.process.kill()
                continue
            del self._children[child.role]
            self._journal.line("up", f"{child.role}: pid {child.process.pid} ended {child.how_it_ended()}")
            if child.role == "serve":
                self._endpoint_ended(child)
            elif child.role == "studio":
                self._studio_ended(child)
            else:
                self._work_ended(child)

    def _work_ended(self, child: _Child) -> None:
        with self._telling:
            self._board.forget_work()
        if child.done:
            self._work_done = True
            if self._serve and not self._follow:
                self._launch("serve")
            return
        if child.error is not None:
            raise error_of(child.error)
        if self._follow:
            self._start_again(child, f"learning ended {child.how_it_ended()}")
            return
        stage = self._stage_of(child.role)
        log = self.folder.logs / f"{stage}.log"
        if child.crash is None:
            raise ClicklineError(
                f"{stage} was ended {child.how_it_ended()}. Run the same command again: it goes on where it was. "
                f"The log: {log}."
            )
        if child.crash.get("errno") is not None:
            raise OSError(child.crash["errno"], child.crash["strerror"], child.crash["filename"])
        raise RuntimeError(f"{child.crash['type']}: {child.crash['message']} The traceback is in {log}.")

    def _endpoint_ended(self, child: _Child) -> None:
        if child.error is not None and not self._served:  # it never worked: another try would not help
            raise error_of(child.error)
        why = child.error["message"] if child.error else f"the endpoint ended {child.how_it_ended()}"
        self._start_again(child, why)

    def _studio_ended(self, child: _Child) -> None:
        self._studio = None
        if child.error is not None:  # its port is taken, or a package is missing: another try would not help
            self._without_studio(child.error["message"])
        else:
            pause = self._come_again(child)
            self._tell(
                {"say": f"the studio ended {child.how_it_ended()}; it is started again in {pause:g} s"}
            )
        self._save(now=True)

    def _start_again(self, child: _Child, why: str) -> None:
        pause = self._come_again(child)
        stage = self._stage_of(child.role)
        if stage != "up":
            self._tell({"stage": stage, "state": "failed", "facts": {"reason": why}})
        log = self.folder.logs / f"{stage}.log"
        self._tell({"say": f"{why}; it is started again in {pause:g} s. The log: {log}"})

    def _come_again(self, child: _Child) -> float:
        """Plan another start; how long the pause is."""
        lived = time.monotonic() - child.born
        pause = self._pauses.get(child.role, _FIRST_PAUSE) if lived < _QUICK_DEATH else _FIRST_PAUSE
        self._pauses[child.role] = min(2 * pause, _LONGEST_PAUSE)
        earliest = time.monotonic() + pause
        self._again[child.role] = (earliest, earliest + self._config.serve.drain + _LAST_SECONDS)
        return pause

    def _restart(self) -> None:
        now = time.monotonic()
        for role, (earliest, latest) in list(self._again.items()):
            # Workers of an endpoint that was killed have its ports while they drain.
            left = [process for process in living(self._seen.values()) if process.role == role]
            if now >= latest or (now >= earliest and not left):
                end_all(left, 0.0)
                del self._again[role]
                if role == "studio":
                    self._launch_studio()
                else:
                    self._launch(role)

    # ── the end ────────────────────────────────────────────────────────────────────────────────

    def _end_children(self) -> None:
        """Tell them to stop; kill what does not in time."""
        self._again.clear()
        for child in self._children.values():
            more = {"serve": self._config.serve.drain + _LAST_SECONDS, "studio": _STUDIO_SECONDS}.get(
                child.role, _GRACE_SECONDS
            )
            child.deadline = time.monotonic() + more
            child.process.terminate()
        hurried = False
        while self._children:
            self._hear(0.05)
            self._look_at_processes()
            if self._asked == "kill" and not hurried:
                hurried = True
                for child in self._children.values():
                    child.deadline = time.monotonic() + (_AT_ONCE_SECONDS if child.role == "serve" else 0.0)
                    child.process.terminate()  # a second signal: the endpoint ends its workers at once
            for child in list(self._children.values()):
                if child.process.poll() is not None:
                    self._hang_up(child)
                    del self._children[child.role]
                    self._journal.line(
                        "up", f"{child.role}: pid {child.process.pid} ended {child.how_it_ended()}"
                    )
                elif child.deadline is not None and time.monotonic() > child.deadline:
                    child.process.kill()
        # Workers end with their supervisor; those of one that was killed get the time to drain.
        left = living(self._seen.values())
        end_all(left, 0.0 if hurried else self._config.serve.drain + _LAST_SECONDS)
        for output in list(self._outputs):
            self._copy(output)

    def _clear_up_after(self, before: Seen) -> None:
        """Children of a run that was killed end by themselves, the endpoint by draining; ports are free then."""
        left = before.processes if before.state == "lost" else []
        if left:
            pids = ", ".join(str(process.pid) for process in left)
            self._progress.say(f"an earlier run was killed; its processes are about to end: {pids}")
            end_all(left, float(before.document["drain"]) + _LAST_SECONDS)

    # ── the state on disk ──────────────────────────────────────────────────────────────────────

    def _look_at_processes(self) -> None:
        """Children of children too, so that whoever ends this run after a crash knows them all."""
        for child in self._children.values():
            for process in descendants(child.process.pid, child.role):
                self._seen[process.pid] = process
        self._seen = {process.pid: process for process in living(self._seen.values())}

    def _save(self, state: str = "running", *, now: bool = False) -> None:
        """When something has changed; at most twice a second, but at once for a stage."""
        if not now and time.monotonic() - self._saved_at < _TICK:
            return
        self._look_at_processes()
        us = [self._us] if self._us is not None and state == "running" else []
        document = {
            "state": state,
            "name": self._config.name,
            "pid": os.getpid(),
            "born": self._us.born if self._us else "",
            "since": utc(self._since),
            "ended": None if self._ended_at is None else utc(self._ended_at),
            "follow": self._follow,
            "serve": self._serve,
            "drain": self._config.serve.drain,
            "studio": self._studio,
            **self._board.document(),
            "processes": [process.to_json() for process in (*us, *self._seen.values())],
            "error": _told(self._error),
        }
        self._saved_at = time.monotonic()
        if document != self._saved:
            self._saved = document
            self.folder.write({**document, "updated": utc(time.time())})


def expected_stages(*, follow: bool, serve: bool) -> tuple[str, ...]:
    """Those that a run will go through; following may begin with the others."""
    stages = ("follow",) if follow else ("prepare", "train", "evaluate", "gate", "publish")
    return (*stages, "serve") if serve else stages


def _told(error: BaseException | None) -> dict[str, Any] | None:
    if error is None:
        return None
    if isinstance(error, ClicklineError):
        return told_error(error)
    return {"kind": type(error).__name__, "message": str(error)}
