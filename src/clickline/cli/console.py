"""Console output of the commands: progress on stderr, results on stdout."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any

import typer

from clickline.errors import ClicklineError, ConfigError, Mistake
from clickline.pipeline.run_state import RunState
from clickline.pipeline.status_text import duration, stage_seconds, stage_summary
from clickline.progress import (
    LineProgress,
    MessageProgress,
    Progress,
    ProgressTask,
    StageState,
    TrackedProgress,
    format_figures,
    printable,
)

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.progress import TaskID


def emit(document: Any) -> None:
    """Print the one JSON document of a `--json` command."""
    typer.echo(json.dumps(document, indent=2, default=str))


def note(message: str) -> None:
    """Print a line that is not a result, on stderr."""
    typer.echo(printable(message), err=True)


def say(text: str) -> None:
    """Print lines of a result."""
    typer.echo(printable(text))


def facts(named: Mapping[str, object]) -> None:
    """Print named values, one per line."""
    typer.echo("\n".join(fact_lines(named)))


def fact_lines(named: Mapping[str, object]) -> list[str]:
    width = max(len(name) for name in named)
    return [f"{name:<{width}}  {printable(str(value))}" for name, value in named.items()]


def result(text: str, progress: Progress) -> None:
    """Print a result while work continues; above the live display, if there is one."""
    if isinstance(progress, _StageDisplay):
        progress.log(text)
    else:
        say(text)


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print columns as wide as their widest cell; cells are never truncated, so that scripts can read them."""
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
"""The symbol and colour of each stage state."""


def stage_rows(document: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """Name, state, figures and time of each stage of a run."""
    rows = []
    for name, stage in document.get("stages", {}).items():
        seconds = stage_seconds(stage)
        elapsed = "" if seconds is None or seconds < 0.05 else duration(seconds)
        rows.append((name, stage["state"], printable(stage_summary(name, stage)), elapsed))
    return rows


def work_summary(work: Mapping[str, Any]) -> str:
    """One line about the running task: rows, speed, percentage, time left."""
    share = "" if work["share"] is None else f", {min(work['share'], 1):.0%}"
    left = "" if work["seconds_left"] is None else f", about {duration(work['seconds_left'])} left"
    figures = (
        f": {format_figures(work)}{share}{left}" if work["rows"] or work["bytes"] or work["note"] else ""
    )
    return printable(f"{work['title']}{figures}")


def number(value: float | None, digits: int = 4) -> str:
    """A metric, or a dash if it was not measured."""
    return "-" if value is None else f"{value:.{digits}f}"


def interval(bounds: Sequence[float] | None) -> str:
    """The confidence interval of a metric, after its value."""
    return "" if bounds is None else f" (95 %: {bounds[0]:.4f} to {bounds[1]:.4f})"


def wrong_argument(name: str, problem: str, remedy: str) -> ConfigError:
    """The error for a mistake in the command line."""
    return ConfigError([Mistake("", 0, name, problem, remedy)])


@contextmanager
def requires_extra(extra: str, work: str) -> Iterator[None]:
    """Around the import of a stage: the error for a missing package names the extra that installs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("clickline"):
            raise
        raise ClicklineError(
            f"{work} needs the package {error.name}: pip install 'clickline[{extra}]'"
        ) from error


@contextmanager
def show_progress(*, as_json: bool, quiet: bool, stages: Sequence[str] = ()) -> Iterator[Progress]:
    """Progress of a long task: bars on a terminal, plain lines otherwise, nothing if quiet. Of a whole pipeline with
    these `stages`: on a terminal, one live display of all of them.

    With --json, whatever the user's own code prints goes to stderr: stdout is only for the result. The stages of a
    pipeline run in other processes, and the result is printed meanwhile.
    """
    if as_json or quiet:
        with redirect_stdout(sys.stdout if stages else sys.stderr):
            yield MessageProgress()
    elif sys.stdout.isatty() and sys.stderr.isatty():
        display: _StageDisplay | _Bars = _StageDisplay(stages) if stages else _Bars()
        with display.live:
            yield display
    else:
        yield _StageLines() if stages else LineProgress()


class _StageLines(LineProgress):
    """Plain progress lines, plus one whenever a stage changes."""

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[str, str] = {}
        self._stages = RunState()

    def stage(self, name: str, state: StageState, facts: Mapping[str, Any] | None = None) -> None:
        with self._lock:
            self._stages.stage(name, state, facts)
            rows = {row[0]: row for row in stage_rows(self._stages.to_json())}
            _, _, summary, seconds = rows[name]
            if state == "running":  # its elapsed time changes all the time
                seconds = ""
            line = ", ".join(part for part in (state, summary, seconds) if part)
            if line != self._last.get(name) and (summary or state != "running"):
                note(f"{name}: {line}")
            self._last[name] = line


class _StageDisplay(MessageProgress):
    """A live display with one line per stage (symbol, name, figures, time) and a bar under the running one."""

    def __init__(self, stages: Sequence[str]) -> None:
        from rich.console import Console
        from rich.live import Live

        self._state = RunState(stages)
        self._lock = threading.Lock()
        self.live = Live(
            get_renderable=self._draw,
            console=Console(stderr=True),
            refresh_per_second=4,
            vertical_overflow="visible",
        )

    def stage(self, name: str, state: StageState, facts: Mapping[str, Any] | None = None) -> None:
        with self._lock:
            self._state.stage(name, state, facts)

    def begin(self, title: str, *, total_bytes: int | None = None, total_rows: int | None = None) -> None:
        with self._lock:
            self._state.begin(title, total_bytes=total_bytes, total_rows=total_rows)

    def advance(self, *, rows: int = 0, size: int = 0) -> None:
        with self._lock:
            self._state.advance(rows=rows, size=size)

    def note(self, figures: str) -> None:
        with self._lock:
            self._state.note(figures)

    def end(self) -> None:
        with self._lock:
            self._state.end()

    def log(self, message: str) -> None:
        self.live.console.print(printable(message), markup=False, highlight=False, soft_wrap=True)

    def _draw(self) -> RenderableType:
        with self._lock:
            return render_stages(self._state.to_json())


def render_stages(document: Mapping[str, Any]) -> RenderableType:
    """The stages of a run as a Rich renderable."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    lines: list[RenderableType] = []
    for name, state, summary, seconds in stage_rows(document):
        mark, colour = _MARKS.get(state, ("?", ""))
        line = Table.grid(padding=(0, 1), expand=True)
        line.add_column(width=1)
        line.add_column(width=8)
        line.add_column(ratio=1, overflow="fold")
        line.add_column(justify="right", no_wrap=True)
        style = "dim" if state == "waiting" else ""
        line.add_row(Text(mark, colour), Text(name, style), Text(summary), Text(seconds, "dim"))
        lines.append(line)
        work = document.get("work")
        if name == document.get("stage") and work is not None:
            below = Table.grid(padding=(0, 1))
            below.add_column(width=20)
            below.add_column(overflow="ellipsis", no_wrap=True)
            bar = ProgressBar(
                total=1.0, completed=work["share"] or 0.0, width=20, pulse=work["share"] is None
            )
            below.add_row(bar, Text(work_summary(work)))
            lines.append(Padding(below, (0, 0, 0, 2)))
    return Padding(Group(*lines), (0, 3, 0, 0))  # room for the ^C that a terminal writes


class _Bars(TrackedProgress):
    """A progress bar for each task, with rows, rows/s, bytes and the time left."""

    def __init__(self) -> None:
        super().__init__()
        # Rich is slow to import, and only a terminal needs it.
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress
        from rich.table import Column

        self.live = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}", table_column=Column(no_wrap=True)),
            console=Console(stderr=True),
        )
        self._tasks: dict[ProgressTask, TaskID] = {}

    def show_begin(self, work: ProgressTask) -> None:
        self._tasks[work] = self.live.add_task(work.title, total=work.total, figures="")

    def show(self, work: ProgressTask) -> None:
        self.live.update(self._tasks[work], completed=work.done, figures=work.summary())

    def show_end(self, work: ProgressTask) -> None:
        # A bar whose total was unknown or not reached is shown as full instead of pulsing on.
        done = work.done or 1
        self.live.update(self._tasks[work], total=done, completed=done, figures=work.summary())
        self.live.stop_task(self._tasks.pop(work))

    def log(self, message: str) -> None:
        self.live.console.print(printable(message), markup=False, highlight=False)
