"""Ends the run of a home, and what a run that crashed has left."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, replace

from clickline.config import Config
from clickline.errors import ClicklineError
from clickline.pipeline.processes import Process, descendants, end_all, living
from clickline.pipeline.up_folder import Seen, UpFolder
from clickline.progress import Progress, usual

_MARGIN_SECONDS = 8.0  # beyond the time to drain: more than the parent itself takes to kill its children
_LINE_SECONDS = 2.0


@dataclass(frozen=True)
class Ended:
    """What was done."""

    before: Seen
    ended: tuple[Process, ...]  # all that ran
    killed: tuple[Process, ...]  # those that did not end in time


def down(config: Config, progress: Progress | None = None) -> Ended:
    """Let running requests end, then everything; returns when no process is left."""
    progress = progress or usual()
    folder = UpFolder(config)
    seen = folder.look()
    ours = _all_of(seen)
    if seen.holder is not None:
        if not seen.holder.pid:
            raise ClicklineError(
                f"a run of {folder.home} is about to begin or to end. Try again in a moment."
            )
        if seen.holder.role == "program":
            folder.ask_to_stop()
        else:
            seen.holder.send(signal.SIGTERM)
    elif not ours:
        return Ended(seen, (), ())
    told = time.monotonic()
    deadline = told + float(seen.document.get("drain", config.serve.drain)) + _MARGIN_SECONDS
    while True:
        now = folder.look()
        if now.run == seen.run:  # else another one has begun, which is not meant
            ours |= _all_of(now)
        left = living(ours)
        if not left and (seen.holder is None or now.holder != seen.holder):
            return Ended(seen, tuple(ours), ())
        if time.monotonic() > deadline:
            return Ended(seen, tuple(ours), tuple(end_all(left, 0.0)))
        if time.monotonic() - told >= _LINE_SECONDS:
            told = time.monotonic()
            progress.say(f"still running: {_named(left)}; at most {deadline - told:.0f} s more")
        time.sleep(0.05)


def _all_of(seen: Seen) -> set[Process]:
    """The parent, the children it has told of, and whoever they have started since."""
    known = set(seen.processes)
    if seen.holder is None:
        return known | {child for process in known for child in descendants(process.pid, process.role)}
    if seen.holder.role == "program":  # a program that called `clickline.up` goes on without it
        return known - {seen.holder}
    return known | {replace(seen.holder, role="up")} | set(descendants(seen.holder.pid, "up"))


def _named(processes: list[Process]) -> str:
    return ", ".join(f"{process.role} (pid {process.pid})" for process in processes) or "up"
