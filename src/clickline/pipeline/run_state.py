"""The state of all stages of a run, for the terminal and for state.json."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from clickline.progress import Progress, ProgressTask, StageState

STAGES = ("prepare", "train", "evaluate", "gate", "publish", "follow", "serve")
"""In the order of the flow."""


_MIN_SECONDS = 0.2  # of work whose speed is worth reporting


def utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


class RunState(Progress):
    """The latest state of each stage. Not thread-safe."""

    def __init__(self, expected: Sequence[str] = ()) -> None:
        self._stages: dict[str, dict[str, Any]] = {
            name: {"state": "waiting", "facts": {}} for name in expected
        }
        self._work: list[ProgressTask] = []
        self.work: dict[str, Any] | None = None  # figures of the work that started last
        self.running: str | None = None  # the stage in progress; never `serve`
        self._longest = 0.0  # seconds of its longest piece of work
        self._speed: float | None = None  # rows/s of that piece

    def stage(self, name: str, state: StageState, facts: Mapping[str, Any] | None = None) -> None:
        before = self._stages.get(name, {})
        now = time.time()
        entry: dict[str, Any] = {"state": state, "facts": dict(facts or {})}
        # A running stage may be reported again with new facts.
        entry["since"] = before["since"] if before.get("state") == "running" else utc(now)
        if state != "running":
            entry["ended"] = utc(now)
        if state == "done" and name == self.running and self._speed is not None:
            entry["rows_per_second"] = self._speed
        self._stages[name] = entry
        if name == "serve":
            return
        if state == "running":
            self.running = name
        elif self.running == name:
            self.running = None
            self.clear_work()
            self._longest, self._speed = 0.0, None

    def begin(self, title: str, *, total_bytes: int | None = None, total_rows: int | None = None) -> None:
        self._work.append(ProgressTask(title, total_bytes, total_rows))
        self._update_work()

    def advance(self, *, rows: int = 0, size: int = 0) -> None:
        if self._work:
            self._work[-1].rows += rows
            self._work[-1].size += size
            self._update_work()

    def note(self, figures: str) -> None:
        if self._work:
            self._work[-1].note = figures
            self._update_work()

    def end(self) -> None:
        if self._work:
            work = self._work.pop()
            seconds = time.monotonic() - work.started
            if work.rows and seconds >= max(_MIN_SECONDS, self._longest):
                self._longest, self._speed = seconds, work.rows / seconds
            self._update_work()

    def clear_work(self) -> None:
        """Drop the work in progress: its process has ended."""
        self._work.clear()
        self.work = None

    def close(self, state: str) -> None:
        """Set the final state of all stages that are still running."""
        for entry in self._stages.values():
            if entry["state"] == "running":
                entry |= {"state": state, "ended": utc(time.time())}
        self.running = None
        self.clear_work()

    def to_json(self) -> dict[str, Any]:
        order = {name: n for n, name in enumerate(STAGES)}
        names = sorted(self._stages, key=lambda name: order.get(name, len(order)))
        return {
            "stage": self.running,
            "stages": {name: dict(self._stages[name]) for name in names},
            "work": self.work,
        }

    def _update_work(self) -> None:
        self.work = self._work[-1].to_json() if self._work else None
