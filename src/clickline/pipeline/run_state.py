"""How far the stages are: one account for the picture on the terminal and for state.json."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from clickline.progress import Progress, StageState, Work

STAGES = ("prepare", "train", "evaluate", "gate", "publish", "follow", "serve")
"""In the order of the flow."""


_MEASURABLE = 0.2  # seconds: the speed of a shorter piece of work says nothing


def utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


class Board(Progress):
    """The stages as they were told last. Not for two threads at once."""

    def __init__(self, expected: Sequence[str] = ()) -> None:
        self._stages: dict[str, dict[str, Any]] = {
            name: {"state": "waiting", "facts": {}} for name in expected
        }
        self._work: list[Work] = []
        self.work: dict[str, Any] | None = None  # figures of the work begun last
        self.running: str | None = None  # the stage that works; the endpoint is none that does
        self._longest = 0.0  # seconds of one piece of work in that stage
        self._speed: float | None = None  # of that piece, in rows/s

    def stage(self, name: str, state: StageState, facts: Mapping[str, Any] | None = None) -> None:
        known = self._stages.get(name, {})
        now = time.time()
        entry: dict[str, Any] = {"state": state, "facts": dict(facts or {})}
        # A stage may be told again with other facts while it goes on.
        entry["since"] = known["since"] if known.get("state") == "running" else utc(now)
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
            self.forget_work()
            self._longest, self._speed = 0.0, None

    def begin(self, title: str, *, total_bytes: int | None = None, total_rows: int | None = None) -> None:
        self._work.append(Work(title, total_bytes, total_rows))
        self._told()

    def advance(self, *, rows: int = 0, size: int = 0) -> None:
        if self._work:
            self._work[-1].rows += rows
            self._work[-1].size += size
            self._told()

    def note(self, figures: str) -> None:
        if self._work:
            self._work[-1].note = figures
            self._told()

    def end(self) -> None:
        if self._work:
            work = self._work.pop()
            seconds = time.monotonic() - work.begun
            if work.rows and seconds >= max(_MEASURABLE, self._longest):
                self._longest, self._speed = seconds, work.rows / seconds
            self._told()

    def forget_work(self) -> None:
        """Whoever did it is gone."""
        self._work.clear()
        self.work = None

    def close(self, state: str) -> None:
        """The run is over: no stage goes on."""
        for entry in self._stages.values():
            if entry["state"] == "running":
                entry |= {"state": state, "ended": utc(time.time())}
        self.running = None
        self.forget_work()

    def document(self) -> dict[str, Any]:
        order = {name: n for n, name in enumerate(STAGES)}
        names = sorted(self._stages, key=lambda name: order.get(name, len(order)))
        return {
            "stage": self.running,
            "stages": {name: dict(self._stages[name]) for name in names},
            "work": self.work,
        }

    def _told(self) -> None:
        self.work = self._work[-1].to_json() if self._work else None
