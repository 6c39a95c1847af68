"""What commands show: progress on stderr, results on stdout."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any

import typer

from clickline.errors import ClicklineError
from clickline.progress import Progress, human_size

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

__all__ = ["emit", "facts", "needing", "note", "table", "watching"]

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


@contextmanager
def needing(extra: str, work: str) -> Iterator[None]:
    """Around the import of a stage: a package that is not installed is named with the extra that brings it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("clickline"):
            raise
        raise ClicklineError(
            f"{work} needs the package {error.name}: pip install 'clickline[{extra}]'"
        ) from error


@contextmanager
def watching(*, as_json: bool, quiet: bool) -> Iterator[Progress]:
    """A watcher of long work: bars for a person, plain lines for a log, silence when asked for.

    What a user's own code prints meanwhile goes to stderr: stdout is for the result alone.
    """
    if as_json or quiet:
        with redirect_stdout(sys.stderr):
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


class _Work:
    """A piece of work that is watched: how far it is, how fast, how long it will take."""

    def __init__(self, title: str, total_bytes: int | None, total_rows: int | None) -> None:
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

    def figures(self) -> str:
        seconds = max(time.monotonic() - self.begun, 1e-9)
        parts = []
        if self.rows:
            parts.append(f"{self.rows:,} rows, {self.rows / seconds:,.0f} rows/s")
        if self.size:
            parts.append(f"{human_size(self.size)}, {human_size(self.size / seconds)}/s")
        if self.note:
            parts.append(self.note)
        return ", ".join(parts) or "nothing yet"

    def time_left(self) -> str:
        if not self.total or not 0 < self.done < self.total:
            return ""
        seconds = time.monotonic() - self.begun
        left = seconds / self.done * (self.total - self.done)
        return f", {self.done / self.total:.0%}, about {left:.0f} s left"


class _Watched(_Notes):
    """Keeps the account of pieces of work, which may lie within each other; subclasses show it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._work: list[_Work] = []

    def begin(self, title: str, *, total_bytes: int | None = None, total_rows: int | None = None) -> None:
        with self._lock:
            self._work.append(_Work(title, total_bytes, total_rows))
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

    def show_begin(self, work: _Work) -> None:
        """Show that it begins."""

    def show(self, work: _Work) -> None:
        """Show how far it is."""

    def show_end(self, work: _Work) -> None:
        """Show that it is over."""


class _Lines(_Watched):
    """One line when work begins, one when it ends, and one now and then between."""

    def show_begin(self, work: _Work) -> None:
        note(
            f"{work.title}: begun" + (f", {human_size(work.total_bytes)} to read" if work.total_bytes else "")
        )

    def show(self, work: _Work) -> None:
        if time.monotonic() - work.told >= LINE_SECONDS:
            work.told = time.monotonic()
            note(f"{work.title}: {work.figures()}{work.time_left()}")

    def show_end(self, work: _Work) -> None:
        note(f"{work.title}: {work.figures()}, ended after {time.monotonic() - work.begun:.1f} s")


class _Bars(_Watched):
    """A bar for each piece of work, with rows, rows/s, bytes and the time left."""

    def __init__(self) -> None:
        super().__init__()
        # Rich takes its time to import, and only a terminal needs it.
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress
        from rich.table import Column

        self._rich: RichProgress = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}", table_column=Column(no_wrap=True)),
            console=Console(stderr=True),
        )
        self._tasks: dict[_Work, TaskID] = {}

    def __enter__(self) -> _Bars:
        self._rich.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._rich.stop()

    def show_begin(self, work: _Work) -> None:
        self._tasks[work] = self._rich.add_task(work.title, total=work.total, figures="")

    def show(self, work: _Work) -> None:
        self._rich.update(self._tasks[work], completed=work.done, figures=work.figures())

    def show_end(self, work: _Work) -> None:
        # A bar whose total was not known, or not reached, stands full now instead of running on.
        done = work.done or 1
        self._rich.update(self._tasks[work], total=done, completed=done, figures=work.figures())
        self._rich.stop_task(self._tasks.pop(work))

    def say(self, message: str) -> None:
        self._rich.console.print(message, markup=False, highlight=False)
