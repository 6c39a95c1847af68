"""What long work tells whoever watches it. The stages call it; here it becomes lines, in `cli/` bars."""

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
    """A watcher that shows nothing; subclasses draw bars or print lines."""

    def begin(self, title: str, *, total_bytes: int | None = None, total_rows: int | None = None) -> None:
        """A piece of work starts; the totals say how much there is to do, where that is known."""

    def advance(self, *, rows: int = 0, size: int = 0) -> None:
        """`rows` more rows and `size` more bytes of input are done."""

    def note(self, figures: str) -> None:
        """How the piece of work begun last is doing, in a few figures; replaces the note before."""

    def end(self) -> None:
        """The piece of work begun last is done."""

    def stage(self, name: str, state: StageState, facts: Mapping[str, Any] | None = None) -> None:
        """A stage of the flow (prepare, train, evaluate, gate, publish, follow, serve) is in another state; the
        facts are what people want to know of it then: rows, AUC, where its result is."""

    def say(self, message: str) -> None:
        """One line worth reading at any verbosity: a skipped stage, a changed input, an hour waited for."""


class Slow:
    """A piece of work that is shown only when it takes a while. `tick` says how it is doing."""

    def __init__(self, progress: Progress, title: str) -> None:
        self._progress, self._title = progress, title
        self._shown_from = time.monotonic() + SLOW_SECONDS
        self._begun = False

    def __enter__(self) -> Slow:
        return self

    def tick(self, words: str) -> None:
        if not self._begun and time.monotonic() >= self._shown_from:
            self._begun = True
            self._progress.begin(self._title)
        if self._begun:
            self._progress.note(words)
            self._progress.advance()

    def __exit__(self, *_: object) -> None:
        if self._begun:
            self._progress.end()


def human_size(size: float) -> str:
    """A number of bytes as people read it: 1.5 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def counted(count: int, noun: str) -> str:
    """A number of things: 1 object, 2 objects."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


class Work:
    """A piece of work: how far it is, how fast, how long it will take."""

    def __init__(self, title: str, total_bytes: int | None = None, total_rows: int | None = None) -> None:
        self.title = title
        self.total_bytes = total_bytes
        self.total_rows = total_rows
        self.rows = 0
        self.size = 0
        self.note = ""
        self.begun = self.told = time.monotonic()

    @property
    def done(self) -> int:
        return self.rows if self.total_rows else self.size

    @property
    def total(self) -> int | None:
        return self.total_rows or self.total_bytes

    def to_json(self) -> dict[str, Any]:
        seconds = max(time.monotonic() - self.begun, 1e-9)
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

    def words(self) -> str:
        return figures(self.to_json())

    def time_left(self) -> str:
        work = self.to_json()
        if not work["share"] or work["seconds_left"] is None:
            return ""
        return f", {work['share']:.0%}, about {work['seconds_left']:.0f} s left"


def figures(work: Mapping[str, Any]) -> str:
    """A piece of work in words."""
    parts = []
    if work["rows"]:
        parts.append(f"{work['rows']:,} rows, {work['rows_per_second']:,.0f} rows/s")
    if work["bytes"]:
        parts.append(f"{human_size(work['bytes'])}, {human_size(work['bytes_per_second'])}/s")
    if work["note"]:
        parts.append(work["note"])
    return ", ".join(parts) or "nothing yet"


def printable(text: str, *, one_line: bool = False) -> str:
    """Text for a terminal, which may hold values of logs: signs that would move the cursor, change colours or begin a
    line where none is meant are spelt out, ESC as \\x1b."""
    if text.isprintable():
        return text
    kept = "" if one_line else "\n\t"
    return "".join(
        one if one.isprintable() or one in kept else one.encode("unicode_escape").decode() for one in text
    )


class Notes(Progress):
    """Only what is worth reading at any verbosity."""

    def say(self, message: str) -> None:
        sys.stderr.write(f"{printable(message)}\n")


class Watched(Notes):
    """Keeps the account of pieces of work, which may lie within each other; subclasses show it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._work: list[Work] = []

    def begin(self, title: str, *, total_bytes: int | None = None, total_rows: int | None = None) -> None:
        with self._lock:
            self._work.append(Work(title, total_bytes, total_rows))
            self.show_begin(self._work[-1])

    def advance(self, *, rows: int = 0, size: int = 0) -> None:
        with self._lock:
            if self._work:
                self._work[-1].rows += rows
                self._work[-1].size += size
                self.show(self._work[-1])

    def note(self, figures: str) -> None:
        with self._lock:
            if self._work:
                self._work[-1].note = figures

    def end(self) -> None:
        with self._lock:
            self.show_end(self._work.pop())

    def show_begin(self, work: Work) -> None:
        """Show that it begins."""

    def show(self, work: Work) -> None:
        """Show how far it is."""

    def show_end(self, work: Work) -> None:
        """Show that it is over."""


class Lines(Watched):
    """One line when work begins, one when it ends, and one now and then between."""

    def show_begin(self, work: Work) -> None:
        size = f", {human_size(work.total_bytes)} to read" if work.total_bytes else ""
        self.say(f"{work.title}: begun{size}")

    def show(self, work: Work) -> None:
        if time.monotonic() - work.told >= LINE_SECONDS:
            work.told = time.monotonic()
            self.say(f"{work.title}: {work.words()}{work.time_left()}")

    def show_end(self, work: Work) -> None:
        self.say(f"{work.title}: {work.words()}, ended after {time.monotonic() - work.begun:.1f} s")


def usual() -> Progress:
    """For whoever gave none: lines in a notebook or at a prompt, where a person waits; silence in a program."""
    return Lines() if hasattr(sys, "ps1") else Progress()
