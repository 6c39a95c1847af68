"""What commands show: progress on stderr, results on stdout."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any

import typer

from clickline.errors import ClicklineError
from clickline.pipeline.run_state import Board
from clickline.pipeline.status_text import duration, stage_seconds, stage_words
from clickline.progress import Lines, Notes, Progress, StageState, Watched, Work, figures, printable

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID


def emit(document: Any) -> None:
    """The one JSON document of a `--json` command."""
    typer.echo(json.dumps(document, indent=2, default=str))


def note(message: str) -> None:
    """A line that is not a result."""
    typer.echo(printable(message), err=True)


def say(text: str) -> None:
    """Lines of a result."""
    typer.echo(printable(text))


def facts(named: Mapping[str, object]) -> None:
    """A few results, one a line."""
    typer.echo("\n".join(fact_lines(named)))


def fact_lines(named: Mapping[str, object]) -> list[str]:
    width = max(len(name) for name in named)
    return [f"{name:<{width}}  {printable(str(value))}" for name, value in named.items()]


def result(text: str, progress: Progress) -> None:
    """Print a result while work goes on; above the picture, where there is one."""
    if isinstance(progress, _Picture):
        progress.say(text)
    else:
        say(text)


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Columns as wide as their widest cell; cells are never cut, so a script can read them."""
    cells = [[printable(str(cell), one_line=True) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[n]) for row in cells) for n in range(len(header))]
    for row in cells:
        typer.echo("   ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


_MARKS = {
    "waiting": ("·", "dim"),
    "running": ("●", "cyan"),
    "done": ("✓", "green"),
    "skipped": ("=", "green"),
    "refused": ("✗", "yellow"),
    "failed": ("✗", "red"),
    "stopped": ("■", "yellow"),
}
"""How the states of a stage are drawn."""


def stage_rows(document: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """For each stage of a run its name, state, figures and time."""
    rows = []
    for name, stage in document.get("stages", {}).items():
        seconds = stage_seconds(stage)
        shown = "" if seconds is None or seconds < 0.05 else duration(seconds)
        rows.append((name, stage["state"], printable(stage_words(name, stage)), shown))
    return rows


def work_words(work: Mapping[str, Any]) -> str:
    """The piece of work that runs: rows, speed, share, time left."""
    share = "" if work["share"] is None else f", {min(work['share'], 1):.0%}"
    left = "" if work["seconds_left"] is None else f", about {duration(work['seconds_left'])} left"
    told = f": {figures(work)}{share}{left}" if work["rows"] or work["bytes"] or work["note"] else ""
    return printable(f"{work['title']}{told}")


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
            yield Notes()
    elif sys.stdout.isatty() and sys.stderr.isatty():
        with _Bars() as bars:
            yield bars
    else:
        yield Lines()


@contextmanager
def watching_stages(stages: Sequence[str], *, as_json: bool, quiet: bool) -> Iterator[Progress]:
    """As `watching`, for a whole flow: on a terminal one picture of all its stages."""
    if as_json or quiet:
        yield Notes()
    elif sys.stdout.isatty() and sys.stderr.isatty():
        with _Picture(stages) as picture:
            yield picture
    else:
        yield _StageLines()


class _StageLines(Lines):
    """And one when a stage has something new to tell."""

    def __init__(self) -> None:
        super().__init__()
        self._words: dict[str, str] = {}
        self._stages = Board()

    def stage(self, name: str, state: StageState, facts: Mapping[str, Any] | None = None) -> None:
        with self._lock:
            self._stages.stage(name, state, facts)
            rows = {row[0]: row for row in stage_rows(self._stages.document())}
            _, _, words, seconds = rows[name]
            if state == "running":  # its time is no news
                seconds = ""
            told = ", ".join(part for part in (state, words, seconds) if part)
            if told != self._words.get(name) and (words or state != "running"):
                note(f"{name}: {told}")
            self._words[name] = told


class _Picture(Notes):
    """One line a stage: mark, name, figures, time; under the one that runs a bar."""

    def __init__(self, stages: Sequence[str]) -> None:
        from rich.console import Console
        from rich.live import Live

        self._board = Board(stages)
        self._lock = threading.Lock()
        self._live = Live(
            get_renderable=self._draw,
            console=Console(stderr=True),
            refresh_per_second=4,
            vertical_overflow="visible",
        )

    def __enter__(self) -> _Picture:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def stage(self, name: str, state: StageState, facts: Mapping[str, Any] | None = None) -> None:
        with self._lock:
            self._board.stage(name, state, facts)

    def begin(self, title: str, *, total_bytes: int | None = None, total_rows: int | None = None) -> None:
        with self._lock:
            self._board.begin(title, total_bytes=total_bytes, total_rows=total_rows)

    def advance(self, *, rows: int = 0, size: int = 0) -> None:
        with self._lock:
            self._board.advance(rows=rows, size=size)

    def note(self, figures: str) -> None:
        with self._lock:
            self._board.note(figures)

    def end(self) -> None:
        with self._lock:
            self._board.end()

    def say(self, message: str) -> None:
        self._live.console.print(printable(message), markup=False, highlight=False, soft_wrap=True)

    def _draw(self) -> RenderableType:
        with self._lock:
            return drawn(self._board.document())


def drawn(document: Mapping[str, Any]) -> RenderableType:
    """The picture of a run."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    lines: list[RenderableType] = []
    for name, state, words, seconds in stage_rows(document):
        mark, colour = _MARKS.get(state, ("?", ""))
        line = Table.grid(padding=(0, 1), expand=True)
        line.add_column(width=1)
        line.add_column(width=8)
        line.add_column(ratio=1, overflow="fold")
        line.add_column(justify="right", no_wrap=True)
        style = "dim" if state == "waiting" else ""
        line.add_row(Text(mark, colour), Text(name, style), Text(words), Text(seconds, "dim"))
        lines.append(line)
        work = document.get("work")
        if name == document.get("stage") and work is not None:
            below = Table.grid(padding=(0, 1))
            below.add_column(width=20)
            below.add_column(overflow="ellipsis", no_wrap=True)
            bar = ProgressBar(
                total=1.0, completed=work["share"] or 0.0, width=20, pulse=work["share"] is None
            )
            below.add_row(bar, Text(work_words(work)))
            lines.append(Padding(below, (0, 0, 0, 2)))
    return Padding(Group(*lines), (0, 3, 0, 0))  # room for the ^C that a terminal writes


class _Bars(Watched):
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
        self._tasks: dict[Work, TaskID] = {}

    def __enter__(self) -> _Bars:
        self._rich.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._rich.stop()

    def show_begin(self, work: Work) -> None:
        self._tasks[work] = self._rich.add_task(work.title, total=work.total, figures="")

    def show(self, work: Work) -> None:
        self._rich.update(self._tasks[work], completed=work.done, figures=work.words())

    def show_end(self, work: Work) -> None:
        # A bar whose total was not known, or not reached, stands full now instead of running on.
        done = work.done or 1
        self._rich.update(self._tasks[work], total=done, completed=done, figures=work.words())
        self._rich.stop_task(self._tasks.pop(work))

    def say(self, message: str) -> None:
        self._rich.console.print(printable(message), markup=False, highlight=False)
