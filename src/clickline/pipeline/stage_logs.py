"""<home>/up/logs: a file a stage, each line with the time in UTC, and the one before it where it grew too long.

The processes of a cluster run write files of their own, in the run's folder: one a role, in the same form.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from clickline.pipeline.run_state import STAGES, Board
from clickline.progress import Progress, StageState, figures
from clickline.training.cluster.job_status import logs_of, newest_run

LOGS = ("up", *STAGES, "studio")
"""The stages, the page, and the run itself: what it starts, what ends, what happens outside of stages."""

MOST_BYTES = 20 * 1024**2  # of one file; there are two a stage at most
_LINE_SECONDS = 10.0
_LONGEST = 8192  # characters of one line
_POLL_SECONDS = 0.2
_STAMP = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z")


class Journal(Progress):
    """The one writer. As a watcher it writes what is told into the log of the stage that runs.

    A disk that is full costs lines, never the run."""

    def __init__(self, folder: Path, board: Board) -> None:
        self._folder = folder
        self._board = board  # which is told first
        self._files: dict[str, int] = {}
        self._told = time.monotonic()

    def line(self, stage: str, text: str) -> None:
        stamp = datetime.now(UTC).isoformat(timespec="microseconds").removesuffix("+00:00")
        lines = "".join(f"{stamp}Z {one[:_LONGEST]}\n" for one in text.splitlines() or [""])
        with suppress(OSError):
            file = self._files.get(stage)
            if file is not None and os.fstat(file).st_size >= MOST_BYTES:
                os.close(self._files.pop(stage))
                self._path(stage).replace(self._folder / f"{stage}.log.1")
                file = None
            if file is None:
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
                file = self._files[stage] = os.open(self._path(stage), flags, 0o644)
            os.write(file, lines.encode(errors="replace"))

    def begin(self, title: str, *, total_bytes: int | None = None, total_rows: int | None = None) -> None:
        self._told = time.monotonic()
        total = f", {total_rows:,} rows" if total_rows else ""
        self.line(self._stage, f"{title}: begun{total}")

    def advance(self, *, rows: int = 0, size: int = 0) -> None:
        work = self._board.work
        if work is not None and time.monotonic() - self._told >= _LINE_SECONDS:
            self._told = time.monotonic()
            share = "" if work["share"] is None else f", {work['share']:.0%}"
            self.line(self._stage, f"{work['title']}: {figures(work)}{share}")

    def stage(self, name: str, state: StageState, facts: Mapping[str, Any] | None = None) -> None:
        told = ", ".join(f"{key}={value}" for key, value in (facts or {}).items())
        self.line(name, f"{name}: {state}{f' ({told})' if told else ''}")

    def say(self, message: str) -> None:
        self.line(self._stage, message)

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    @property
    def _stage(self) -> str:
        return self._board.running or "up"

    def _path(self, stage: str) -> Path:
        return self._folder / f"{stage}.log"


class Line(NamedTuple):
    """One line of a log; in the order of time."""

    at: str
    stage: str
    text: str


def role_logs(home: Path, role: str | None = None) -> dict[str, Path]:
    """The logs that the newest cluster run has now: of all roles, of one (worker) or of one process (worker-3)."""
    run = newest_run(home)
    found = {path.stem: path for path in sorted(logs_of(run).glob("*.log"))} if run else {}
    return {name: path for name, path in found.items() if role in (None, name, name.partition("-")[0])}


def is_role(name: str) -> bool:
    """Whether a cluster run may have a log of this name."""
    return re.fullmatch(r"driver|network|(worker|shard)(-\d+)?", name) is not None


class LogReader:
    """Reads logs while they are written: first the last lines, then what is added. `more` is asked again and again for
    logs beside those of the stages, by name: they may begin at any time."""

    def __init__(
        self,
        folder: Path,
        stages: Sequence[str] = LOGS,
        more: Callable[[], Mapping[str, Path]] = lambda: {},
    ) -> None:
        self._files = {path: _File(path, stage) for stage in stages for path in (folder / f"{stage}.log",)}
        self._more = more
        self._look()

    def last(self, lines: int) -> list[Line]:
        """The last lines of all stages together."""
        found = [line for file in self._files.values() for line in file.last(lines)]
        found.sort(key=lambda line: line.at)
        return found[-lines:] if lines else []

    def follow(self, ended: Callable[[], bool]) -> Iterator[Line]:
        """What is added, until `ended` says that nothing will be."""
        over = False
        while True:
            self._look()
            added = [line for file in self._files.values() for line in file.added()]
            yield from sorted(added, key=lambda line: line.at)
            if over:
                return
            over = ended()  # then once more for what was written before
            if not over:
                time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _look(self) -> None:
        for name, path in self._more().items():
            if path not in self._files:
                self._files[path] = _File(path, name)


class _File:
    def __init__(self, path: Path, stage: str) -> None:
        self._path = path
        self._stage = stage
        self._rest = b""
        self._at = ""
        self._file: int | None = None
        with suppress(FileNotFoundError):  # the stage may begin later
            self._file = os.open(path, os.O_RDONLY)

    def last(self, lines: int) -> list[Line]:
        if self._file is None:
            return []
        self._at = ""
        size = os.fstat(self._file).st_size
        found = _last_lines(self._file, size, lines)
        # What is added is read from here on; half a line, if it is being written, belongs to that.
        os.lseek(self._file, size, os.SEEK_SET)
        if found and not found[-1].endswith(b"\n"):
            self._rest = found.pop()
        before = self._path.with_name(f"{self._path.name}.1")
        if len(found) < lines and before.exists():
            earlier = os.open(before, os.O_RDONLY)
            try:
                # It may have been ours a moment ago.
                if os.fstat(earlier).st_ino != os.fstat(self._file).st_ino:
                    more = _last_lines(earlier, os.fstat(earlier).st_size, lines - len(found))
                    found = [*more, *found]
            finally:
                os.close(earlier)
        return [self._line(one) for one in found]

    def added(self) -> Iterator[Line]:
        while True:
            newer = self._newer()  # looked for first: when there is one, nobody writes into ours any more
            if self._file is not None:
                while piece := os.read(self._file, 1 << 16):
                    *whole, self._rest = (self._rest + piece).split(b"\n")
                    yield from (self._line(one) for one in whole)
            if newer is None:
                return
            self.close()
            self._file, self._rest = newer, b""

    def _newer(self) -> int | None:
        """Another file that has the name now."""
        try:
            file = os.open(self._path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        if self._file is not None and os.fstat(file).st_ino == os.fstat(self._file).st_ino:
            os.close(file)
            return None
        return file

    def _line(self, line: bytes) -> Line:
        whole = line.decode(errors="replace").rstrip("\n")
        at, _, text = whole.partition(" ")
        if not _STAMP.fullmatch(
            at
        ):  # what a library printed, or the rest of a traceback: as old as the line before
            return Line(self._at, self._stage, whole)
        self._at = at
        return Line(at, self._stage, text)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)


def _last_lines(file: int, size: int, lines: int) -> list[bytes]:
    """The last lines, with their ends, of the first `size` bytes."""
    content = b""
    start = size
    while start > 0 and content.count(b"\n") <= lines:
        step = min(start, 1 << 16)
        start -= step
        content = os.pread(file, step, start) + content
    found = content.splitlines(keepends=True)
    return found[-lines:] if lines else []
