"""What commands show: progress on stderr, results on stdout."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from clickline.progress import Progress

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import Task, TaskID

__all__ = ["emit", "facts", "human_size", "note", "table", "watching"]

LINE_SECONDS = 10.0


def emit(document: Any) -> None:
    """The one JSON document of a `--json` command."""
    typer.echo(json.dumps(document, indent=2, default=str))


def note(message: str) -> None:
    """A line that is not a result."""
    typer.echo(message, err=True)


def facts(named: Mapping[str, object]) -> None:
    """A few results, one a line."""
    width = max(len(name) for name in named)
    for name, value in named.items():
        typer.echo(f"{name:<{width}}  {value}")


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Columns as wide as their widest cell; cells are never cut, so a script can read them."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[n]) for row in cells) for n in range(len(header))]
    for row in cells:
        typer.echo("   ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def human_size(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


@contextmanager
def watching(*, as_json: bool, quiet: bool) -> Iterator[Progress]:
    """A watcher of long work: bars for a person, plain lines for a log, silence when asked for."""
    if as_json or quiet:
        yield _Notes()
    elif sys.stdout.isatty() and sys.stderr.isatty():
        with _Bars() as bars:
            yield bars
    else:
        yield _Lines()


class _Notes(Progress):
    """Only what is worth reading at any verbosity."""

    def say(self, message: str) -> None:
        note(message)


class _Lines(_Notes):
    """One line when work begins, one when it ends, and one now and then between."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._work: list[_Work] = []

    def begin(self, title: str, *, total_bytes: int | None = None) -> None:
        with self._lock:
            self._work.append(_Work(title, total_bytes))
        note(f"{title}: begun" + (f", {human_size(total_bytes)} to read" if total_bytes else ""))

    def advance(self, *, rows: int = 0, size: int = 0) -> None:
        with self._lock:
            if not self._work:
                return
            work = self._work[-1]
            work.rows += rows
            work.size += size
            now = time.monotonic()
            due = now - work.told >= LINE_SECONDS
            if due:
                work.told = now
        if due:
            note(work.line())

    def end(self) -> None:
        with self._lock:
            work = self._work.pop()
        work.total_bytes = None
        note(f"{work.line()}, ended after {time.monotonic() - work.begun:.1f} s")


class _Work:
    """A piece of work that `_Lines` watches."""

    def __init__(self, title: str, total_bytes: int | None) -> None:
        self.title = title
        self.total_bytes = total_bytes
        self.rows = 0
        self.size = 0
        self.begun = self.told = time.monotonic()

    def line(self) -> str:
        seconds = max(time.monotonic() - self.begun, 1e-9)
        parts = []
        if self.rows:
            parts.append(f"{self.rows:,} rows, {self.rows / seconds:,.0f} rows/s")
        if self.size and self.total_bytes:
            parts.append(f"{human_size(self.size)} of {human_size(self.total_bytes)}")
        elif self.size:
            parts.append(human_size(self.size))
        if self.total_bytes and 0 < self.size < self.total_bytes:
            left = seconds / self.size * (self.total_bytes - self.size)
            parts.append(f"about {left:.0f} s left")
        return f"{self.title}: {', '.join(parts) or 'nothing yet'}"


class _Bars(_Notes):
    """A bar for each piece of work, with rows, rows/s, bytes and the time left."""

    def __init__(self) -> None:
        # Rich takes its time to import, and only a terminal needs it.
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, ProgressColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress
        from rich.table import Column
        from rich.text import Text

        class Rows(ProgressColumn):
            def render(self, task: Task) -> Text:
                rows: int = task.fields["rows"]
                if not rows:
                    return Text("")
                return Text(f"{rows:,} rows  {rows / max(task.elapsed or 0, 1e-9):,.0f} rows/s")

        self._rich: RichProgress = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            Rows(table_column=Column(no_wrap=True)),
            DownloadColumn(binary_units=True),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._tasks: list[TaskID] = []
        self._rows: dict[TaskID, int] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> _Bars:
        self._rich.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._rich.stop()

    def begin(self, title: str, *, total_bytes: int | None = None) -> None:
        with self._lock:
            task = self._rich.add_task(title, total=total_bytes, rows=0)
            self._tasks.append(task)
            self._rows[task] = 0

    def advance(self, *, rows: int = 0, size: int = 0) -> None:
        with self._lock:
            if self._tasks:
                task = self._tasks[-1]
                self._rows[task] += rows
                self._rich.update(task, advance=size, rows=self._rows[task])

    def end(self) -> None:
        with self._lock:
            task = self._tasks.pop()
            done = self._rich.tasks[self._rich.task_ids.index(task)].completed
            # A bar whose total was not known stands full now instead of running on.
            self._rich.update(task, total=done or 1, completed=done or 1)
            self._rich.stop_task(task)

    def say(self, message: str) -> None:
        self._rich.console.print(message, markup=False, highlight=False)
