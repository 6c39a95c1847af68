"""<home>/up/logs: one log file per stage, each line with its time in UTC, plus one rotated file.

The processes of a cluster run write their own log files, one per role, in the run's folder and in the same format.
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

from clickline.pipeline.run_state import STAGES, RunState
from clickline.progress import Progress, StageState, format_figures
from clickline.training.cluster.job_status import logs_folder, newest_run

LOG_NAMES = ("up", *STAGES, "studio")
"""The stages, the studio, and `up` itself: the processes it starts and everything outside of stages."""

MAX_BYTES = 20 * 1024**2  # of one file; there are at most two per stage
_PROGRESS_SECONDS = 10.0
_MAX_LINE = 8192  # characters of one line
_POLL_SECONDS = 0.2
_STAMP = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z")


class LogWriter(Progress):
    """Writes the logs. As a `Progress` it writes into the log of the running stage.

    If the disk is full, lines are dropped; the run continues."""

    def __init__(self, folder: Path, state: RunState) -> None:
        self._folder = folder
        self._state = state  # updated before this one
        self._files: dict[str, int] = {}
        self._logged_at = time.monotonic()

    def write(self, stage: str, text: str) -> None:
        stamp = datetime.now(UTC).isoformat(timespec="microseconds").removesuffix("+00:00")
        lines = "".join(f"{stamp}Z {one[:_MAX_LINE]}\n" for one in text.splitlines() or [""])
        with suppress(OSError):
            file = self._files.get(stage)
            if file is not None and os.fstat(file).st_size >= MAX_BYTES:
                os.close(self._files.pop(stage))
                self._path(stage).replace(self._folder / f"{stage}.log.1")
                file = None
            if file is None:
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
                file = self._files[stage] = os.open(self._path(stage), flags, 0o644)
            os.write(file, lines.encode(errors="replace"))

    def begin(self, title: str, *, total_bytes: int | None = None, total_rows: int | None = None) -> None:
        self._logged_at = time.monotonic()
        total = f", {total_rows:,} rows" if total_rows else ""
        self.write(self._stage, f"{title}: started{total}")

    def advance(self, *, rows: int = 0, size: int = 0) -> None:
        work = self._state.work
        if work is not None and time.monotonic() - self._logged_at >= _PROGRESS_SECONDS:
            self._logged_at = time.monotonic()
            share = "" if work["share"] is None else f", {work['share']:.0%}"
            self.write(self._stage, f"{work['title']}: {format_figures(work)}{share}")

    def stage(self, name: str, state: StageState, facts: Mapping[str, Any] | None = None) -> None:
        details = ", ".join(f"{key}={value}" for key, value in (facts or {}).items())
        self.write(name, f"{name}: {state}{f' ({details})' if details else ''}")

    def log(self, message: str) -> None:
        self.write(self._stage, message)

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    @property
    def _stage(self) -> str:
        return self._state.running or "up"

    def _path(self, stage: str) -> Path:
        return self._folder / f"{stage}.log"


class LogLine(NamedTuple):
    """One line of a log; sorts by time."""

    at: str
    stage: str
    text: str


def cluster_logs(home: Path, role: str | None = None) -> dict[str, Path]:
    """Log files of the newest cluster run: of all roles, of one (worker) or of one process (worker-3)."""
    run = newest_run(home)
    found = {path.stem: path for path in sorted(logs_folder(run).glob("*.log"))} if run else {}
    return {name: path for name, path in found.items() if role in (None, name, name.partition("-")[0])}


def is_cluster_role(name: str) -> bool:
    """Whether a cluster run may have a log of this name."""
    return re.fullmatch(r"driver|network|(worker|shard)(-\d+)?", name) is not None


class LogReader:
    """Reads logs while they are written: first the last lines, then new ones. `more` is polled for further log files,
    by name, that may appear at any time."""

    def __init__(
        self,
        folder: Path,
        stages: Sequence[str] = LOG_NAMES,
        more: Callable[[], Mapping[str, Path]] = lambda: {},
    ) -> None:
        self._files = {path: _LogFile(path, stage) for stage in stages for path in (folder / f"{stage}.log",)}
        self._more = more
        self._find_new_files()

    def last(self, lines: int) -> list[LogLine]:
        """The last lines over all stages."""
        found = [line for file in self._files.values() for line in file.last(lines)]
        found.sort(key=lambda line: line.at)
        return found[-lines:] if lines else []

    def follow(self, ended: Callable[[], bool]) -> Iterator[LogLine]:
        """New lines, until `ended` returns true."""
        over = False
        while True:
            self._find_new_files()
            new_lines = [line for file in self._files.values() for line in file.new_lines()]
            yield from sorted(new_lines, key=lambda line: line.at)
            if over:
                return
            over = ended()  # then read once more for lines written before the end
            if not over:
                time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _find_new_files(self) -> None:
        for name, path in self._more().items():
            if path not in self._files:
                self._files[path] = _LogFile(path, name)


class _LogFile:
    """One log file, read across its rotation."""

    def __init__(self, path: Path, stage: str) -> None:
        self._path = path
        self._stage = stage
        self._rest = b""
        self._at = ""
        self._file: int | None = None
        with suppress(FileNotFoundError):  # the stage may start later
            self._file = os.open(path, os.O_RDONLY)

    def last(self, lines: int) -> list[LogLine]:
        if self._file is None:
            return []
        self._at = ""
        size = os.fstat(self._file).st_size
        found = _last_lines(self._file, size, lines)
        # New lines are read from here on; a line that is only half written belongs to them.
        os.lseek(self._file, size, os.SEEK_SET)
        if found and not found[-1].endswith(b"\n"):
            self._rest = found.pop()
        before = self._path.with_name(f"{self._path.name}.1")
        if len(found) < lines and before.exists():
            earlier = os.open(before, os.O_RDONLY)
            try:
                # It may be the open file, rotated a moment ago.
                if os.fstat(earlier).st_ino != os.fstat(self._file).st_ino:
                    more = _last_lines(earlier, os.fstat(earlier).st_size, lines - len(found))
                    found = [*more, *found]
            finally:
                os.close(earlier)
        return [self._parse(one) for one in found]

    def new_lines(self) -> Iterator[LogLine]:
        while True:
            newer = self._open_newer()  # first: once it exists, nothing more is written to the open file
            if self._file is not None:
                while piece := os.read(self._file, 1 << 16):
                    *whole, self._rest = (self._rest + piece).split(b"\n")
                    yield from (self._parse(one) for one in whole)
            if newer is None:
                return
            self.close()
            self._file, self._rest = newer, b""

    def _open_newer(self) -> int | None:
        """Open the file that has the name now, if it is another one."""
        try:
            file = os.open(self._path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        if self._file is not None and os.fstat(file).st_ino == os.fstat(self._file).st_ino:
            os.close(file)
            return None
        return file

    def _parse(self, line: bytes) -> LogLine:
        whole = line.decode(errors="replace").rstrip("\n")
        at, _, text = whole.partition(" ")
        if not _STAMP.fullmatch(at):  # a library's output, a traceback: as old as the line before
            return LogLine(self._at, self._stage, whole)
        self._at = at
        return LogLine(at, self._stage, text)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)


def _last_lines(file: int, size: int, lines: int) -> list[bytes]:
    """The last lines of the first `size` bytes, with their line ends."""
    content = b""
    start = size
    while start > 0 and content.count(b"\n") <= lines:
        step = min(start, 1 << 16)
        start -= step
        content = os.pread(file, step, start) + content
    found = content.splitlines(keepends=True)
    return found[-lines:] if lines else []
