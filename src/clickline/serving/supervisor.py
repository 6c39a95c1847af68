"""The process that keeps the others going: starts workers, restarts dead ones, brings them new versions, counts.

It answers no predictions itself. When it dies, however it dies, its workers see the channel end, drain and go.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clickline.config.sections import ServeSection
from clickline.errors import ClicklineError
from clickline.serving.admin_port import admin_app
from clickline.serving.auth import Guard
from clickline.serving.http_server import HttpServer
from clickline.serving.ports import bound_socket
from clickline.serving.registry_follower import Follower, Source
from clickline.serving.rollout import Offer, Rollout
from clickline.serving.server_log import Log
from clickline.serving.server_metrics import Tally, exposition
from clickline.serving.version_loading import Load
from clickline.serving.worker_channel import Channel

_QUICK_DEATH = 10.0  # seconds: a worker that lived for less is started again after a pause
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 10.0
_LOAD_SECONDS = 600.0  # for a worker to load a version; the very first one may compile all kernels
_TELL_SECONDS = 2.0  # for a worker to tell its counts
_LAST_SECONDS = 4.0  # for a worker to end after the time to drain
_DEAF_SECONDS = 60  # without a sign of life, after which a worker is ended
_LOOK_SECONDS = 10.0  # for the first look at the registry, before it is said that no version is there
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True)
class Up:
    """What is up, when all workers listen for the first time."""

    version: int | None
    processes: int
    example: Mapping[str, Any] | None = None  # a row that it answers; None without a version


class _Worker:
    """One process, as long as it lives."""

    def __init__(self, slot: int, process: subprocess.Popen[bytes], channel: Channel) -> None:
        self.slot = slot
        self.process = process
        self.channel = channel
        self.born = time.monotonic()
        self.listening = False
        self.version: int | None = None  # it answers with
        self.tally = Tally()
        self.waiting = 0
        self.told: asyncio.Future[None] | None = None
        self.up = False
        self.asked = False  # for a sign of life that has not come yet
        self.silent = 0  # seconds since then


class Supervisor:
    """Runs the service until a signal ends it."""

    def __init__(
        self,
        serve: ServeSection,
        names: tuple[str, ...],
        token: str | None,
        source: Source,
        load: Load,
        processes: int,
        work: Path,
        log: Log,
        up: Callable[[Up], None],
    ) -> None:
        """`work`: a folder of our own. `up` is called once, when all workers listen."""
        self._serve = serve
        self._guard = Guard(token)
        self._source = source
        self._processes = processes
        self._work = work
        self._log = log
        self._tell_up: Callable[[Up], None] | None = up
        self._hello = {
            "serve": serve.model_dump(mode="json"),
            "names": names,
            "token": token,
            "load": f"{load.__module__}:{load.__qualname__}",
            "path": sys.path,
            "work": str(work),
        }
        self._workers: dict[int, _Worker] = {}
        self._gone = Tally()  # counts of processes that are no more
        self._pauses = dict.fromkeys(range(processes), _FIRST_PAUSE)
        self._restarts = 0
        self._versions_refused = 0
        self._example: Mapping[str, Any] | None = None
        self._looked = False  # at the registry
        self._stopping = False
        self._failure: str | None = None
        self._ended = asyncio.Event()
        self._questions = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._rollout = Rollout(self._send, self._committed, self._refused)
        self._follower = Follower(
            source,
            serve.poll,
            log,
            lambda offer: self._from_thread(self._rollout.offered, offer),
            lambda number, reason: self._from_thread(self._refused_files, number, reason),
            lambda: self._from_thread(self._first_look),
        )

    async def run(self) -> None:
        """Returns when the service was told to stop and has drained; KeyboardInterrupt at a second signal."""
        logging.getLogger().addHandler(self._log)
        signals: asyncio.Queue[int] = asyncio.Queue()
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup and `&` in a script mean it
                self._loop.add_signal_handler(number, signals.put_nowait, number)
        held = _reserved(self._serve)
        admin = await self._admin()
        try:
            self._follower.start()
            self._loop.call_later(_LOOK_SECONDS, self._no_look)
            for slot in range(self._processes):
                await self._launch(slot)
            self._start(self._watch())
            await self._until(signals)
            self._log.say("stopping", drain=self._serve.drain)
            self._stop()
            interrupted = await self._drained(signals)
        finally:
            self._stopping = True
            for worker in self._workers.values():
                worker.process.kill()
                worker.process.wait()
            for reserved in held:
                reserved.close()
            await admin.stop()
        if self._failure:
            raise ClicklineError(self._failure)
        if interrupted:
            raise KeyboardInterrupt

    # ── workers ────────────────────────────────────────────────────────────────────────────────

    async def _launch(self, slot: int) -> None:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "clickline.serving.worker_process", str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=sys.stderr.fileno(),  # our own standard output is for what is up
                    pass_fds=[theirs.fileno()],
                    env={"GRPC_VERBOSITY": "NONE", **os.environ},  # stderr is for lines of JSON
                    start_new_session=True,  # Ctrl-C is for the supervisor, which lets workers drain
                )
        except BaseException:
            ours.close()
            raise
        worker = _Worker(slot, process, await Channel.over(ours))
        self._workers[slot] = worker
        worker.channel.send(slot=slot, **self._hello)
        if self._stopping:  # it was told to all others before this one was there
            worker.channel.send(do="stop")
        self._start(self._attend(worker))

    async def _launch_again(self, slot: int) -> None:
        """The system may lack processes, memory or file descriptors for a while."""
        pause = _FIRST_PAUSE
        while not self._stopping:
            try:
                await self._launch(slot)
                return
            except OSError as error:
                self._log.say(
                    "a worker process cannot be started",
                    "error",
                    worker=slot,
                    message=str(error),
                    pause=pause,
                )
            await asyncio.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE)

    async def _attend(self, worker: _Worker) -> None:
        """Hear what a worker says, until it is gone; then start another in its place."""
        async for message in worker.channel:
            worker.asked, worker.silent = False, 0
            try:
                self._hear(worker, message)
            except Exception as error:  # noqa: BLE001 - a bug here must not leave a process without a supervisor
                self._log.unexpected(error, "hearing a worker", f"worker {worker.slot}")
        worker.channel.close()
        code = await self._reaped(worker)
        del self._workers[worker.slot]
        self._gone.add(worker.tally)
        if worker.told is not None and not worker.told.done():
            worker.told.set_result(None)
        if self._stopping:
            if not self._workers:
                self._ended.set()
            return
        self._rollout.worker_gone(worker.slot)
        self._restarts += 1
        pause = self._pause(worker)
        self._log.say(
            "a worker process ended; another is started",
            "error",
            worker=worker.slot,
            pid=worker.process.pid,
            exit_code=code,
            pause=pause,
        )
        await asyncio.sleep(pause)
        await self._launch_again(worker.slot)

    async def _reaped(self, worker: _Worker) -> int:
        """The exit code of a process that has closed its channel."""
        for _ in range(200):
            code = worker.process.poll()
            if code is not None:
                return code
            await asyncio.sleep(0.01)
        worker.process.kill()
        return await asyncio.to_thread(worker.process.wait)

    def _pause(self, worker: _Worker) -> float:
        if time.monotonic() - worker.born >= _QUICK_DEATH:
            self._pauses[worker.slot] = _FIRST_PAUSE
            return 0.0
        pause = self._pauses[worker.slot]
        self._pauses[worker.slot] = min(pause * 2, _LONGEST_PAUSE)
        return pause

    def _hear(self, worker: _Worker, message: dict[str, Any]) -> None:
        match message:
            case {"up": _}:
                worker.up = True
                self._rollout.worker_up(worker.slot)
            case {"prepared": number}:
                self._rollout.prepared(worker.slot, number)
            case {"refused": number, "reason": reason, "again": again}:
                current = self._rollout.current
                if current is not None and current.number == number:
                    self._log.say(
                        "a worker cannot load the current version",
                        "error",
                        worker=worker.slot,
                        version=number,
                        reason=reason,
                    )
                self._rollout.refused(worker.slot, number, reason, again)
                self._perhaps_up()
            case {"serving": number, "example": example}:
                worker.version, self._example = number, example
                self._perhaps_up()
            case {"listening": _}:
                worker.listening = True
                self._perhaps_up()
            case {"told": _, "tally": text, "waiting": waiting}:
                worker.tally, worker.waiting = Tally.from_json(text), waiting
                if worker.told is not None and not worker.told.done():
                    worker.told.set_result(None)
            case {"failed": why}:
                self._log.say("a worker cannot work", "error", worker=worker.slot, message=why)
                if self._tell_up is not None:  # it never worked: a restart would not help
                    self._failure = why
                    self._ended.set()

    def _perhaps_up(self) -> None:
        if self._tell_up is None or len(self._workers) < self._processes:
            return
        if not self._looked or self._rollout.pending is not None:
            return  # a version is on its way: it is told with it
        if all(worker.listening for worker in self._workers.values()):
            version = None if self._rollout.current is None else self._rollout.current.number
            if version is None or all(worker.version == version for worker in self._workers.values()):
                tell, self._tell_up = self._tell_up, None
                try:
                    tell(Up(version, self._processes, self._example))
                except Exception as error:  # noqa: BLE001 - perhaps nobody reads it any more: go on answering
                    self._log.say("that the service is up could not be told", "warning", message=repr(error))

    def _no_look(self) -> None:
        if not self._looked:
            self._log.say("the registry has not answered yet", "warning", registry=str(self._source))
            self._first_look()

    def _first_look(self) -> None:
        self._looked = True
        self._perhaps_up()

    # ── versions ───────────────────────────────────────────────────────────────────────────────

    def _send(self, slot: int, message: dict[str, Any]) -> None:
        worker = self._workers.get(slot)
        if worker is not None:
            worker.channel.send(**message)

    def _committed(self, offer: Offer) -> None:
        self._log.say("the version is current", version=offer.number)
        for folder in self._work.iterdir():  # what is mapped lives on until it is unmapped
            if folder.name.isdigit() and folder.name != str(offer.number):
                shutil.rmtree(folder, ignore_errors=True)

    def _refused(self, offer: Offer, reason: str, again: bool) -> None:
        self._refused_files(offer.number, reason)
        if again:
            self._follower.try_again(offer.number)

    def _refused_files(self, number: int, reason: str) -> None:
        self._versions_refused += 1
        current = self._rollout.current
        self._log.say(
            "a version was refused",
            "error",
            version=number,
            reason=reason,
            current=None if current is None else current.number,
        )

    # ── what goes wrong ────────────────────────────────────────────────────────────────────────

    async def _watch(self) -> None:
        """A worker that hangs, or does not get ready, is ended; another takes its place."""
        seen: Offer | None = None
        since = 0.0
        while not self._stopping:
            await asyncio.sleep(1)
            for worker in list(self._workers.values()):
                if worker.up:
                    self._ask_for_life(worker)
            if self._rollout.pending is not seen:
                seen, since = self._rollout.pending, time.monotonic()
            if seen is not None and time.monotonic() - since > _LOAD_SECONDS:
                for slot in self._rollout.late():
                    if slot in self._workers:
                        self._end(self._workers[slot], f"version {seen.number} is not loaded", _LOAD_SECONDS)
                seen = None

    def _ask_for_life(self, worker: _Worker) -> None:
        """Counted in looks of our own: whoever stops us for a while does not make the workers look dead."""
        if not worker.asked:
            worker.asked = True
            worker.channel.send(do="live")
            return
        worker.silent += 1
        if worker.silent == _DEAF_SECONDS:
            self._end(worker, "it gives no sign of life", _DEAF_SECONDS)

    def _end(self, worker: _Worker, reason: str, seconds: float) -> None:
        self._log.say(
            "a worker process is ended", "error", worker=worker.slot, reason=reason, seconds=seconds
        )
        worker.process.kill()

    # ── the end ────────────────────────────────────────────────────────────────────────────────

    async def _until(self, signals: asyncio.Queue[int]) -> bool:
        """Wait for a signal, or the end of all workers, or a failure that makes going on useless; True: a signal."""
        told, ended = asyncio.create_task(signals.get()), asyncio.create_task(self._ended.wait())
        try:
            await asyncio.wait((told, ended), return_when=asyncio.FIRST_COMPLETED)
            return told.done()
        finally:
            told.cancel()
            ended.cancel()

    def _stop(self) -> None:
        self._stopping = True
        self._ended.clear()
        for worker in self._workers.values():
            worker.channel.send(do="stop")
        if not self._workers:
            self._ended.set()

    async def _drained(self, signals: asyncio.Queue[int]) -> bool:
        """Wait for the workers to end, not for ever; True: a second signal came first."""
        try:
            async with asyncio.timeout(self._serve.drain + _LAST_SECONDS):
                return await self._until(signals)
        except TimeoutError:
            return False

    # ── what is told ───────────────────────────────────────────────────────────────────────────

    async def _admin(self) -> HttpServer:
        app = admin_app(self._guard, self._metrics, self._missing, self._version)
        bound = bound_socket(self._serve.host, self._serve.metrics_port, "metrics_port", listen=True)
        server = HttpServer(app, [bound], self._serve.tls, 0.0)
        await server.start()
        return server

    def _missing(self) -> str | None:
        """Why requests would not be answered; None when they would."""
        if self._stopping:
            return "stopping"
        if self._rollout.current is None:
            return "no version is loaded yet"
        if not any(worker.listening and worker.version is not None for worker in self._workers.values()):
            return "no worker process listens"
        return None

    def _version(self) -> int | None:
        return None if self._rollout.current is None else self._rollout.current.number

    async def _metrics(self) -> bytes:
        workers = [worker for worker in self._workers.values() if worker.listening]
        for worker in workers:
            if worker.told is None or worker.told.done():  # else somebody else has asked just now
                worker.told = self._loop.create_future()
                worker.channel.send(do="tell", id=next(self._questions))
        if workers:
            await asyncio.wait([worker.told for worker in workers if worker.told], timeout=_TELL_SECONDS)
        total = Tally()
        total.add(self._gone)
        for worker in self._workers.values():
            total.add(worker.tally)
        current = self._rollout.current
        gauges: dict[str, tuple[str, float]] = {
            "queue_length": ("Requests that wait.", sum(worker.waiting for worker in self._workers.values())),
            "workers": ("Worker processes that listen.", len(workers)),
            "registry_unreachable": (
                "1 while the registry cannot be reached.",
                int(self._follower.unreachable),
            ),
        }
        if current is not None:
            gauges["version"] = ("The current version.", current.number)
            gauges["version_age_seconds"] = (
                "Time since the current version was made.",
                time.time() - current.created,
            )
            if current.data_until is not None:
                gauges["data_age_seconds"] = (
                    "Time since the end of the newest data that the current version has learned.",
                    time.time() - current.data_until,
                )
        totals = {
            "version_refused": (
                "Versions that did not load, verify or reproduce their sample.",
                self._versions_refused,
            ),
            "worker_restarts": ("Worker processes that died and were replaced.", self._restarts),
        }
        return exposition(total, gauges, totals)

    # ── the loop ───────────────────────────────────────────────────────────────────────────────

    def _from_thread(self, call: Callable[..., None], *arguments: Any) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(call, *arguments)

    def _start(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended_task)

    def _ended_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.unexpected(error, task.get_name(), "supervisor")


def _reserved(serve: ServeSection) -> list[socket.socket]:
    """Hold the workers' ports, after a look whether anybody has them: SO_REUSEPORT would let us in beside another
    service without a word, and half of the requests would go there."""
    held = []
    for key in ("grpc_port", "http_port"):
        port = getattr(serve, key)
        bound_socket(serve.host, port, key, listen=True).close()
        held.append(bound_socket(serve.host, port, key, shared=True))
    return held
