"""The record of a run: passes what happens to the logs, the caller's progress and state.json."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from clickline.config import Config
from clickline.errors import ClicklineError
from clickline.pipeline.ipc import error_to_json, replay
from clickline.pipeline.run_state import RunState, utc
from clickline.pipeline.stage_logs import LogWriter
from clickline.pipeline.up_folder import UpFolder
from clickline.processes import Process
from clickline.progress import Progress

_SAVE_SECONDS = 0.5  # between two writes of state.json while only figures change


class RunRecord:
    """The record of one run. Not thread-safe, except for `status`."""

    def __init__(
        self, config: Config, folder: UpFolder, *, follow: bool, serve: bool, progress: Progress
    ) -> None:
        self.studio: Mapping[str, Any] | None = None  # its address, while it runs
        self._folder = folder
        self._own_process = Process.current("up")
        self._run = {
            "name": config.name,
            "pid": self._own_process.pid,
            "born": self._own_process.born,
            "since": utc(time.time()),
            "follow": follow,
            "serve": serve,
            "drain": config.serve.drain_timeout,
        }
        self._state = RunState(expected_stages(follow=follow, serve=serve))
        self._state_lock = threading.Lock()
        self._logs = LogWriter(folder.logs, self._state)
        self._progress = progress
        self._saved: Mapping[str, Any] = {}
        self._save_at = 0.0

    @property
    def running(self) -> str | None:
        """The stage in progress; never `serve`."""
        return self._state.running

    def log_name(self, role: str) -> str:
        """The log that a child process writes to."""
        return role if role in ("serve", "studio") else self._state.running or "up"

    def status(self) -> dict[str, Any]:
        """Stages and work in progress, as in state.json."""
        with self._state_lock:
            return self._state.to_json()

    def log(self, name: str, text: str) -> None:
        """Write to a log only."""
        self._logs.write(name, text)

    def say(self, text: str) -> None:
        """Write to the log of the running stage and show it to the user."""
        self.report({"say": text})

    def stage(self, name: str, state: str, facts: Mapping[str, Any]) -> None:
        self.report({"stage": name, "state": state, "facts": facts})

    def report(self, message: Mapping[str, Any]) -> None:
        """Record a message of a child. Raises what the caller's progress raises, which is not called again then."""
        with self._state_lock:
            replay(message, self._state)
        replay(message, self._logs)
        if "stage" in message:
            self._save_at = 0.0
        try:
            replay(message, self._progress)
        except BaseException:  # an error in the user's code ends the run
            self._progress = Progress()
            raise

    def clear_work(self) -> None:
        """Forget the work in progress: its process has ended."""
        with self._state_lock:
            self._state.clear_work()

    def save(self, processes: Callable[[], list[Process]]) -> None:
        """Write state.json if it has changed: at once after a stage has, else at most twice a second."""
        if time.monotonic() >= self._save_at:
            running = {"state": "running", "ended": None, "error": None}
            self._write(running, [self._own_process, *processes()])

    def close(self, state: str, error: BaseException | None) -> None:
        """Record the end of the run."""
        with self._state_lock:
            self._state.close(state)
        self.studio = None
        self._logs.write("up", f"ended: {state}")
        self._write({"state": state, "ended": utc(time.time()), "error": _error_json(error)}, [])
        self._logs.close()

    def _write(self, end: Mapping[str, Any], processes: list[Process]) -> None:
        self._save_at = time.monotonic() + _SAVE_SECONDS
        document = {
            **self._run,
            **end,
            "studio": self.studio,
            **self._state.to_json(),
            "processes": [process.to_json() for process in processes],
        }
        if document != self._saved:
            self._saved = document
            self._folder.write_state({**document, "updated": utc(time.time())})


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
