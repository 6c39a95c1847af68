"""Progress of long-running work. Stages report it; this module prints lines, `cli/` draws bars."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, Literal

LINE_SECONDS = 10.0
SLOW_SECONDS = 2.0

StageState = Literal["running", "skipped", "done", "refused", "failed"]


class Progress:
    """Receives progress and shows nothing; subclasses draw bars or print lines."""

    def begin(self, title: str, *, total_bytes: int | None = None, total_rows: int | None = None) -> None:
        """A task starts; the totals, if known, say how much there is to do."""

    def advance(self, *, rows: int = 0, size: int = 0) -> None:
        """`rows` more rows and `size` more bytes of input are done."""

    def note(self, figures: str) -> None:
        """Set the status of the current task, in a few figures; replaces the previous one."""

    def end(self) -> None:
        """The current task is done."""

    def stage(self, name: str, state: StageState, facts: Mapping[str, Any] | None = None) -> None:
        """A stage of the flow (prepare, train, evaluate, gate, publish, follow, serve) changed its state; `facts`
        are its results: rows, AUC, where the output is."""

    def log(self, message: str) -> None:
        """Log a message that is worth reading at any verbosity: a skipped stage, a changed input, an awaited hour."""


class SlowTask:
    """A task that is shown only if it takes a while. `tick` sets its status."""

    def __init__(self, progress: Progress, title: str) -> None:
        self._progress, self._title = progress, title
        self._show_after = time.monotonic() + SLOW_SECONDS
        self._started = False

    def __enter__(self) -> SlowTask:
        return self

    def tick(self, status: str) -> None:
        if not self._started and time.monotonic() >= self._show_after:
            self._started = True
            self._progress.begin(self._title)
        if self._started:
            self._progress.note(status)
            self._progress.advance()

    def __exit__(self, *_: object) -> None:
        if self._started:
            self._progress.end()


def human_size(size: float) -> str:
    """A number of bytes in a readable form: 1.5 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def pluralize(count: int, noun: str) -> str:
    """A count with its noun: 1 object, 2 objects."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


class ProgressTask:
    """The state of a task: how much is done, how fast, how long it will take."""

    def __init__(self, title: str, total_bytes: int | None = None, total_rows: int | None = None) -> None:
        self.title = title
        self.total_bytes = total_bytes
        self.total_rows = total_rows
        self.rows = 0
        self.size = 0
        self.note = ""
        self.started = self.last_logged = time.monotonic()

    @property
    def done(self) -> int:
        return self.rows if self.total_rows else self.size

    @property
    def total(self) -> int | None:
        return self.total_rows or self.total_bytes

    def to_json(self) -> dict[str, Any]:
        seconds = max(time.monotonic() - self.started, 1e-9)
        share = self.done / self.total if self.total else None
        return {
            "title": self.title,
            "rows": self.rows,
            "bytes": self.size,
            "rows_per_second": self.rows / seconds,
            "bytes_per_second": self.size / seconds,
            "share": share,
            "seconds_left": seconds / share - seconds if share and share < 1 else None,
            "note": self.note,
        }

    def summary(self) -> str:
        return format_figures(self.to_json())

    def time_left(self) -> str:
        task = self.to_json()
        if not task["share"] or task["seconds_left"] is None:
            return ""
        return f", {task['share']:.0%}, about {task['seconds_left']:.0f} s left"


def format_figures(task: Mapping[str, Any]) -> str:
    """A task's figures as a message."""
    parts = []
    if task["rows"]:
        parts.append(f"{task['rows']:,} rows, {task['rows_per_second']:,.0f} rows/s")
    if task["bytes"]:
        parts.append(f"{human_size(task['bytes'])}, {human_size(task['bytes_per_second'])}/s")
    if task["note"]:
        parts.append(task["note"])
    return ", ".join(parts) or "nothing yet"


def printable(text: str, *, one_line: bool = False) -> str:
    """Text that is safe for a terminal: it may hold values of logs, so control characters that would move the cursor,
    change colours or begin a line are escaped, ESC as \\x1b."""
    if text.isprintable():
        return text
    allowed = "" if one_line else "\n\t"
    return "".join(
        one if one.isprintable() or one in allowed else one.encode("unicode_escape").decode() for one in text
    )


class MessageProgress(Progress):
    """Prints only logged messages."""

    def log(self, message: str) -> None:
        sys.stderr.write(f"{printable(message)}\n")


class TrackedProgress(MessageProgress):
    """Tracks tasks, which may be nested; subclasses show them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open_tasks: list[ProgressTask] = []

    def begin(self, title: str, *, total_bytes: int | None = None, total_rows: int | None = None) -> None:
        with self._lock:
            self._open_tasks.append(ProgressTask(title, total_bytes, total_rows))
            self.show_begin(self._open_tasks[-1])

    def advance(self, *, rows: int = 0, size: int = 0) -> None:
        with self._lock:
            if self._open_tasks:
                self._open_tasks[-1].rows += rows
                self._open_tasks[-1].size += size
                self.show(self._open_tasks[-1])

    def note(self, figures: str) -> None:
        with self._lock:
            if self._open_tasks:
                self._open_tasks[-1].note = figures

    def end(self) -> None:
        with self._lock:
            self.show_end(self._open_tasks.pop())

    def show_begin(self, task: ProgressTask) -> None:
        """Show that a task begins."""

    def show(self, task: ProgressTask) -> None:
        """Show how far a task is."""

    def show_end(self, task: ProgressTask) -> None:
        """Show that a task is done."""


class LineProgress(TrackedProgress):
    """Prints a line when a task begins, one when it ends, and one every LINE_SECONDS in between."""

    def show_begin(self, task: ProgressTask) -> None:
        size = f", {human_size(task.total_bytes)} to read" if task.total_bytes else ""
        self.log(f"{task.title}: started{size}")

    def show(self, task: ProgressTask) -> None:
        if time.monotonic() - task.last_logged >= LINE_SECONDS:
            task.last_logged = time.monotonic()
            self.log(f"{task.title}: {task.summary()}{task.time_left()}")

    def show_end(self, task: ProgressTask) -> None:
        self.log(f"{task.title}: {task.summary()}; took {time.monotonic() - task.started:.1f} s")


def default_progress() -> Progress:
    """For callers that give none: lines in a notebook or at a prompt, where a person waits; nothing in a program."""
    return LineProgress() if hasattr(sys, "ps1") else Progress()
