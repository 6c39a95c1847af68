"""Stops the run of a home, and any processes left by a crashed run."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, replace

from clickline.config import Config
from clickline.errors import ClicklineError
from clickline.pipeline.up_folder import RunInfo, UpFolder
from clickline.processes import Process, descendants, still_alive, wait_then_kill
from clickline.progress import Progress, default_progress

_KILL_SECONDS = 8.0  # after the drain timeout: longer than the parent takes to kill its children
_LOG_SECONDS = 2.0


@dataclass(frozen=True)
class StopResult:
    """The outcome of `down`."""

    before: RunInfo
    stopped: tuple[Process, ...]  # all processes of the run
    killed: tuple[Process, ...]  # those of them that did not exit in time


def down(config: Config, progress: Progress | None = None) -> StopResult:
    """Drain running requests and stop all processes; returns when none is alive."""
    progress = progress or default_progress()
    folder = UpFolder(config)
    run = folder.read()
    # The program that called `clickline.up` keeps running.
    program = {run.holder} if run.holder is not None and run.holder.role == "program" else set()
    processes = _processes_of(run) - program
    if run.holder is not None:
        if not run.holder.pid:
            raise ClicklineError(
                f"a run of {folder.home} is just starting or stopping. Try again in a moment."
            )
        if run.holder.role == "program":
            folder.request_stop()
        else:
            run.holder.send_signal(signal.SIGTERM)
    elif not processes:
        return StopResult(run, (), ())
    logged_at = time.monotonic()
    deadline = logged_at + float(run.document.get("drain", config.serve.drain_timeout)) + _KILL_SECONDS
    while True:
        now = folder.read()
        if now.run_id == run.run_id:  # else another run has started, which must not be stopped
            processes |= set(now.processes) - program
        alive = still_alive(processes)
        if not alive and (run.holder is None or now.holder != run.holder):
            return StopResult(run, tuple(processes), ())
        if time.monotonic() > deadline:
            return StopResult(run, tuple(processes), tuple(wait_then_kill(alive, 0.0)))
        if time.monotonic() - logged_at >= _LOG_SECONDS:
            logged_at = time.monotonic()
            progress.log(f"still running: {_names(alive)}; at most {deadline - logged_at:.0f} s more")
        time.sleep(0.05)


def _processes_of(run: RunInfo) -> set[Process]:
    """The parent, its known children, and all processes they have started since; only the known ones of a run inside
    a program, which may have other children."""
    known = set(run.processes)
    if run.holder is None:
        return known | {child for process in known for child in descendants(process.pid, process.role)}
    if run.holder.role == "program":
        return known
    return known | {replace(run.holder, role="up"), *descendants(run.holder.pid, "up")}


def _names(processes: list[Process]) -> str:
    return ", ".join(f"{process.role} (pid {process.pid})" for process in processes) or "up"
