"""The parent of `clickline up`: decides what its children do next, and leaves none behind.

    Runner      the thread of a run: its start, what follows from the end of a child, its end
    Children    the child processes (children.py)
    RunRecord   logs, progress and state.json (run_record.py)

One thread handles all events. Other threads only request it to stop, or wait for it.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal

from clickline.config import Config
from clickline.errors import ClicklineError, ConfigError, Mistake
from clickline.pipeline.backfill import parse_backfill
from clickline.pipeline.children import EXIT_SECONDS, GRACE_SECONDS, Child, Children, Role
from clickline.pipeline.ipc import error_from_json
from clickline.pipeline.run_record import RunRecord
from clickline.pipeline.up_folder import RunInfo, UpFolder
from clickline.processes import wait_then_kill
from clickline.progress import Progress

_POLL_SECONDS = 0.5  # between two checks of what sends no event: processes, restarts, a request to stop
_STOP_POLL_SECONDS = 0.05
_STUDIO_SECONDS = 0.5  # for the studio to exit
_KILL_SECONDS = 2.0  # for the endpoint to stop its workers without draining


class Runner:
    """One run of `up`, from its lock to its last child."""

    def __init__(
        self,
        config: Config,
        *,
        follow: bool,
        backfill: str | None,
        serve: bool,
        studio: bool,
        progress: Progress,
        program: bool,
    ) -> None:
        """`program`: this process is a user's program, which `down` must not end by a signal."""
        if backfill is not None:
            parse_backfill(backfill)
            if not follow:
                problem = f"is {backfill!r}, without --follow."
                raise ConfigError([Mistake("", 0, "--backfill", problem, "Give --follow as well.")])
        self.name = config.name
        self._work_role: Role = "follow" if follow else "flow"
        self._serve = serve
        self._with_studio = studio
        self._program = program
        self._progress = progress
        self._drain = config.serve.drain_timeout
        self.folder = UpFolder(config)
        self._record = RunRecord(config, self.folder, follow=follow, serve=serve, progress=progress)
        self._request = {"config": config.model_dump(mode="json", by_alias=True), "backfill": backfill}
        self._work_done = False
        self._was_up = False  # whether the endpoint has ever been up
        self._requested: Literal["", "stop", "kill"] = ""
        self._error: BaseException | None = None
        self._up, self._ended = threading.Event(), threading.Event()  # both are set at the end
        self._children: Children
        self._lock: int

    # ── for other threads ──────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Raises ClicklineError if another run holds the lock."""
        before = self.folder.read()
        self._lock = self.folder.acquire("program" if self._program else "up")
        try:
            self._wait_for_lost_run(before)
            self._children = Children(self._request, self._drain, self._on_message, self._on_output)
        except BaseException:
            os.close(self._lock)
            raise
        atexit.register(self.stop)
        threading.Thread(target=self._run, name="clickline up", daemon=True).start()

    def wait(self, *, until_up: bool = False, seconds: float | None = None) -> bool:
        """Wait for the end, or until the run is up; returns whether that happened. Raises the error of a failed run."""
        happened = (self._up if until_up else self._ended).wait(seconds)
        if self._ended.is_set() and self._error is not None:
            raise self._error
        return happened

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    @property
    def was_stopped(self) -> bool:
        return bool(self._requested)

    def stop(self) -> None:
        """Stop all processes and return when they have exited. On a KeyboardInterrupt, do not drain."""
        self._request_stop("stop")
        try:
            self._ended.wait()
        except KeyboardInterrupt:
            self._request_stop("kill")
            self._ended.wait()
            raise

    @property
    def studio(self) -> str | None:
        """The address of the studio."""
        address = self._record.studio
        return None if address is None else str(address["url"])

    def status(self) -> dict[str, Any]:
        """Stages and work in progress, as in state.json."""
        return self._record.status()

    def _request_stop(self, what: Literal["stop", "kill"]) -> None:
        self._requested = what
        self._children.wake()

    # ── the thread ─────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        try:
            self._record.log("up", f"started: pid {os.getpid()}, {self._work_role}")
            self._launch(self._work_role)
            if self._work_role == "follow" and self._serve:
                self._launch("serve")
            if self._with_studio:
                self._launch("studio")
            while not self._requested and not (self._work_done and not self._serve):
                self._record.save(self._children.processes)
                self._children.wait(_POLL_SECONDS)
                for child in self._children.exited():
                    self._on_exit(child)
                for role in self._children.due():
                    self._launch(role)
                if self.folder.stop_requested():
                    self._requested = "stop"
        except BaseException as error:  # noqa: BLE001 - `wait` raises it
            self._fail(error)
        for _ in range(2):  # a progress object that raises is not called again
            try:
                self._stop_children()
                break
            except BaseException as error:  # noqa: BLE001
                self._fail(error)
        self._finish()

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        with suppress(Exception):
            if self._record.running is not None:
                self._record.stage(self._record.running, "failed", {"reason": str(error)})
            self._record.log("up", f"failed: {type(error).__name__}: {error}")

    def _launch(self, role: Role) -> None:
        try:
            child = self._children.start(role)
        except OSError as error:
            if role != "studio":
                raise
            self._continue_without_studio(str(error.strerror or error))
            return
        self._record.log("up", f"{role}: started, pid {child.pid}")
        if role == "serve":
            self._record.stage("serve", "running", {"state": "starting"})

    def _on_output(self, role: Role, line: str) -> None:
        self._record.log(self._record.log_name(role), line)

    def _on_message(self, child: Child, message: Mapping[str, Any]) -> None:
        match message:
            case {"up": facts}:
                self._was_up = True
                self._children.processes(scan=True)
                self._record.stage("serve", "running", facts)
                self._up.set()
            case {"studio": address}:
                self._record.studio = address
                token = f" (token: {address['token_file']})" if address["token_file"] else ""
                self._record.say(f"studio: {address['url']}{token}")
            case {"done": _}:
                child.done = True
            case {"error": error}:
                child.error = error
            case {"crash": crash}:
                child.crash = crash
            case _:
                self._record.report(message)
                following = (message.get("stage"), message.get("state")) == ("follow", "running")
                if following and not self._serve:
                    self._up.set()

    def _on_exit(self, child: Child) -> None:
        self._log_exit(child)
        if child.role == "serve":
            if child.error is not None and not self._was_up:  # it never worked: a restart would not help
                raise error_from_json(child.error)
            why = child.error["message"] if child.error else f"the endpoint ended {child.exit_reason()}"
            self._restart(child, why)
        elif child.role == "studio":
            self._record.studio = None
            if child.error is not None:  # its port is in use, a package is missing: no use to restart it
                self._continue_without_studio(child.error["message"])
            else:
                delay = self._children.restart_later(child)
                self._record.say(f"the studio ended {child.exit_reason()}; restarting in {delay:g} s")
        else:
            self._on_work_exit(child)

    def _on_work_exit(self, child: Child) -> None:
        self._record.clear_work()
        if child.done:
            self._work_done = True
            if self._serve and child.role == "flow":
                self._launch("serve")
            return
        if child.error is not None:
            raise error_from_json(child.error)
        if child.role == "follow":
            self._restart(child, f"training ended {child.exit_reason()}")
            return
        stage = self._record.log_name(child.role)
        log = self.folder.logs / f"{stage}.log"
        if child.crash is None:
            raise ClicklineError(
                f"{stage} ended {child.exit_reason()}. Run the same command again to resume. Log: {log}."
            )
        if child.crash.get("errno") is not None:
            raise OSError(child.crash["errno"], child.crash["strerror"], child.crash["filename"])
        raise RuntimeError(f"{child.crash['type']}: {child.crash['message']} The traceback is in {log}.")

    def _restart(self, child: Child, why: str) -> None:
        delay = self._children.restart_later(child)
        stage = self._record.log_name(child.role)
        if stage != "up":
            self._record.stage(stage, "failed", {"reason": why})
        self._record.say(f"{why}; restarting in {delay:g} s. Log: {self.folder.logs / f'{stage}.log'}")

    def _continue_without_studio(self, why: str) -> None:
        self._record.say(f"{why} The run continues without the studio.")

    def _log_exit(self, child: Child) -> None:
        self._record.log("up", f"{child.role}: pid {child.pid} ended {child.exit_reason()}")

    # ── the end ────────────────────────────────────────────────────────────────────────────────

    def _stop_children(self) -> None:
        """Stop the children; kill those that do not exit in time."""
        drain = self._drain + EXIT_SECONDS
        self._children.terminate(work=GRACE_SECONDS, serve=drain, studio=_STUDIO_SECONDS)
        self._children.processes(scan=True)  # workers that outlive a killed endpoint could not be found later
        killing = False
        while list(self._children):
            self._children.wait(_STOP_POLL_SECONDS)
            self._record.save(self._children.processes)
            if self._requested == "kill" and not killing:
                killing = True
                # On a second signal the endpoint stops its workers without draining.
                self._children.terminate(work=0.0, serve=_KILL_SECONDS, studio=0.0)
            for child in self._children.exited():
                self._log_exit(child)
        # Workers exit with their supervisor; if it was killed they still drain.
        wait_then_kill(self._children.processes(), 0.0 if killing else drain)

    def _finish(self) -> None:
        with suppress(Exception):
            self._children.close()
        with suppress(Exception):
            state = "failed" if self._error else "stopped" if self._requested else "done"
            self._record.close(state, self._error)
        os.close(self._lock)
        atexit.unregister(self.stop)
        self._ended.set()
        self._up.set()

    def _wait_for_lost_run(self, before: RunInfo) -> None:
        """Wait until the children of a killed run have exited, the endpoint after draining, and its ports are free."""
        left = before.processes if before.state == "lost" else []
        if left:
            pids = ", ".join(str(process.pid) for process in left)
            self._progress.log(f"an earlier run was killed; waiting for its processes to exit: {pids}")
            wait_then_kill(left, float(before.document["drain"]) + EXIT_SECONDS)
