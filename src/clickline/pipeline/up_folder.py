"""<home>/up: who runs here, and how far it is.

    lock           held by the parent as long as it lives; holds its pid
    state.json     stages, work, processes, how it ended
    logs/          a file a stage
    stop           asks a run inside a program to end
    detached.log   what a run in the background prints

Only the holder of the lock writes here, but for `stop`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clickline.config import Config
from clickline.errors import ClicklineError, ConfigError, Mistake
from clickline.pipeline.processes import Process, living
from clickline.pipeline.status_text import moment
from clickline.storage.file_lock import holder_of, sign, take
from clickline.storage.filesystems import protocol_of

_PID_SECONDS = 1.0  # from the lock to the pid in it


@dataclass(frozen=True)
class Seen:
    """What is found in the folder. `state`: never, starting, running, done, stopped, failed, lost."""

    state: str
    document: Mapping[str, Any]  # state.json of the run that is meant; empty if it has none yet
    holder: Process | None  # of the lock

    @property
    def run(self) -> tuple[object, object]:
        """Which run it is: that of this parent."""
        return self.document.get("pid"), self.document.get("born")

    @property
    def stage(self) -> str | None:
        """The stage that runs, or that the run ended in."""
        if self.document.get("stage"):
            return str(self.document["stage"])
        stages = self.document.get("stages", {})
        ended = [name for name, one in stages.items() if one["state"] in ("failed", "stopped", "refused")]
        running = [name for name, one in stages.items() if one["state"] == "running"]
        return next(iter((*ended, *running)), None)

    @property
    def processes(self) -> list[Process]:
        """Those of the run that live: the parent, its children and theirs."""
        return living(Process.from_json(one) for one in self.document.get("processes", ()))


class UpFolder:
    """The folder of one home."""

    def __init__(self, config: Config) -> None:
        if protocol_of(config.home) != "file":
            raise ConfigError(
                [
                    Mistake(
                        "clickline.yaml",
                        0,
                        "home",
                        f"is {config.home}. `up` keeps its lock, state and logs there.",
                        "Give a folder on this machine; the registry may be elsewhere (publish.registry).",
                    )
                ]
            )
        self.home = Path(config.home)
        self.path = self.home / "up"
        self.logs = self.path / "logs"
        self.detached_log = self.path / "detached.log"
        self._lock = self.path / "lock"
        self._state = self.path / "state.json"
        self._stop = self.path / "stop"

    def look(self) -> Seen:
        """Who runs here, or how the last run ended."""
        for _ in range(2):  # a run may begin between the look at the lock and the one at the state
            holder, document = self._holder(), self._read()
            if holder is not None:
                ours = (document.get("pid"), document.get("born")) == (holder.pid, holder.born)
                return Seen(document["state"] if ours else "starting", document if ours else {}, holder)
        if not document:
            return Seen("never", {}, None)
        state = document["state"]
        return Seen("lost" if state == "running" else state, document, None)

    def hold(self, role: str) -> int:
        """Take the lock; it is free again when the descriptor is closed or the process ends."""
        self.logs.mkdir(parents=True, exist_ok=True)
        held = take(self._lock)
        if held is None:
            raise self._is_taken()
        self._stop.unlink(missing_ok=True)  # it was meant for another run
        us = Process.of(os.getpid(), role)
        sign(held, us.to_json() if us else {})
        return held

    def refuse_if_taken(self) -> None:
        if self.look().holder is not None:
            raise self._is_taken()

    def write(self, document: Mapping[str, Any]) -> None:
        """Put it whole in place of the one before. On a full disk the one before stays: no reason to stop."""
        hidden = self._state.with_name(".state.json.new")
        with suppress(OSError):
            hidden.write_text(json.dumps(document, indent=1))
            hidden.replace(self._state)

    def ask_to_stop(self) -> None:
        """For a run inside somebody's program, where a signal would end the whole program."""
        self._stop.touch()

    def is_asked_to_stop(self) -> bool:
        return self._stop.exists()

    def _is_taken(self) -> ClicklineError:
        seen = self.look()
        since = f" since {moment(seen.document['since'])}" if "since" in seen.document else ""
        pid = f", pid {seen.holder.pid}" if seen.holder else ""
        stage = f", stage {seen.stage}" if seen.stage else ""
        return ClicklineError(
            f"`clickline up` is running for {self.home}{since}{pid}{stage}. `clickline status` shows how far it is, "
            "`clickline down` ends it. A new version beside it: `clickline prepare`, `train` and `publish`; what runs "
            "takes it up."
        )

    def _holder(self) -> Process | None:
        """Who holds the lock."""
        deadline = time.monotonic() + _PID_SECONDS
        while True:
            words = holder_of(self._lock)
            if words is None:
                return None
            with suppress(ValueError, KeyError):
                found = Process.from_json(words)
                if found.alive:  # else it is the pid of the one before
                    return found
            if time.monotonic() > deadline:
                return Process(0, "")
            time.sleep(0.01)

    def _read(self) -> dict[str, Any]:
        """state.json; empty when there is none, or what a power cut left of it."""
        try:
            document = json.loads(self._state.read_text())
        except (OSError, ValueError):
            return {}
        return document if isinstance(document, dict) and "state" in document else {}
