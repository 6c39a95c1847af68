"""<home>/up: the lock and the state of the run of a home.

    lock           held by the parent for its lifetime; contains its pid
    state.json     stages, work, processes, how the run ended
    logs/          one file per stage
    stop           requests a run inside a program to stop
    detached.log   output of a run in the background

Only the holder of the lock writes here, except for `stop`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clickline.config import Config
from clickline.errors import ClicklineError, ConfigError, Mistake
from clickline.pipeline.status_text import timestamp
from clickline.processes import Process, still_alive
from clickline.storage.file_lock import acquire, read_owner, write_owner
from clickline.storage.filesystems import protocol_of

_OWNER_SECONDS = 1.0  # until the process that takes the lock has written its pid


@dataclass(frozen=True)
class RunInfo:
    """The run of a home. `state` is never, starting, running, done, stopped, failed or lost."""

    state: str
    document: Mapping[str, Any]  # state.json of this run; empty if it has none yet
    holder: Process | None  # of the lock

    @property
    def run_id(self) -> tuple[object, object]:
        """Identifies the run by its parent process."""
        return self.document.get("pid"), self.document.get("born")

    @property
    def stage(self) -> str | None:
        """The stage that is running, or in which the run ended."""
        if self.document.get("stage"):
            return str(self.document["stage"])
        stages = self.document.get("stages", {})
        ended = [name for name, one in stages.items() if one["state"] in ("failed", "stopped", "refused")]
        running = [name for name, one in stages.items() if one["state"] == "running"]
        return next(iter((*ended, *running)), None)

    @property
    def processes(self) -> list[Process]:
        """Processes of the run that are alive: the parent and its descendants."""
        return still_alive(Process.from_json(one) for one in self.document.get("processes", ()))


class UpFolder:
    """The folder of one home."""

    def __init__(self, config: Config) -> None:
        if protocol_of(config.home) != "file":
            problem = f"is {config.home}. `up` keeps its lock, state and logs there."
            remedy = "Give a folder on this machine; the registry may be elsewhere (publish.registry)."
            raise ConfigError([Mistake("clickline.yaml", 0, "home", problem, remedy)])
        self.home = Path(config.home)
        self.path = self.home / "up"
        self.logs = self.path / "logs"
        self.detached_log = self.path / "detached.log"
        self._lock = self.path / "lock"
        self._state = self.path / "state.json"
        self._stop = self.path / "stop"

    def read(self) -> RunInfo:
        """The active run, or how the last one ended."""
        for _ in range(2):  # a run may start between reading the lock and reading the state
            holder, document = self._lock_holder(), self._read_state()
            if holder is not None:
                ours = (document.get("pid"), document.get("born")) == (holder.pid, holder.born)
                return RunInfo(document["state"] if ours else "starting", document if ours else {}, holder)
        if not document:
            return RunInfo("never", {}, None)
        state = document["state"]
        return RunInfo("lost" if state == "running" else state, document, None)

    def acquire(self, role: str) -> int:
        """Take the lock; it is released when the descriptor is closed or the process ends."""
        self.logs.mkdir(parents=True, exist_ok=True)
        lock = acquire(self._lock)
        if lock is None:
            raise self._in_use_error()
        self._stop.unlink(missing_ok=True)  # it was meant for another run
        write_owner(lock, Process.current(role).to_json())
        return lock

    def check_free(self) -> None:
        if self.read().holder is not None:
            raise self._in_use_error()

    def write_state(self, document: Mapping[str, Any]) -> None:
        """Replace state.json atomically. If the disk is full the old one stays, and the run continues."""
        hidden = self._state.with_name(".state.json.new")
        with suppress(OSError):
            hidden.write_text(json.dumps(document, indent=1))
            hidden.replace(self._state)

    def request_stop(self) -> None:
        """Request a run inside a user's program to stop: a signal would end the whole program."""
        self._stop.touch()

    def stop_requested(self) -> bool:
        return self._stop.exists()

    def _in_use_error(self) -> ClicklineError:
        run = self.read()
        since = f" since {timestamp(run.document['since'])}" if "since" in run.document else ""
        pid = f", pid {run.holder.pid}" if run.holder else ""
        stage = f", stage {run.stage}" if run.stage else ""
        return ClicklineError(
            f"`clickline up` is running for {self.home}{since}{pid}{stage}. `clickline status` shows its progress, "
            "`clickline down` stops it. To publish a new version meanwhile, run `clickline prepare`, `train` and "
            "`publish`: the running endpoint picks it up."
        )

    def _lock_holder(self) -> Process | None:
        """The process that holds the lock."""
        deadline = time.monotonic() + _OWNER_SECONDS
        while True:
            owner = read_owner(self._lock)
            if owner is None:
                return None
            with suppress(ValueError, KeyError):
                holder = Process.from_json(owner)
                if holder.alive:  # else it is the previous holder
                    return holder
            if time.monotonic() > deadline:
                return Process(0, "")
            time.sleep(0.01)

    def _read_state(self) -> dict[str, Any]:
        """Read state.json; empty if there is none or it is damaged (a power failure)."""
        try:
            document = json.loads(self._state.read_text())
        except (OSError, ValueError):
            return {}
        return document if isinstance(document, dict) and "state" in document else {}
