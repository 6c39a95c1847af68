"""The supervisor process: starts workers, restarts dead ones, rolls out new versions, and collects metrics.

It answers no predictions itself. When it dies, however it dies, its workers see the channel close, drain and exit.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clickline.config.sections import ServeSection
from clickline.errors import ClicklineError
from clickline.processes import Backoff, ChildProcess
from clickline.serving.admin_port import admin_app
from clickline.serving.auth import BearerAuth
from clickline.serving.http_server import HttpServer
from clickline.serving.ports import bound_socket
from clickline.serving.registry_follower import RegistryFollower, VersionSource
from clickline.serving.rollout import FetchedVersion, Rollout
from clickline.serving.server_log import ServerLog
from clickline.serving.server_metrics import RequestMetrics, exposition
from clickline.serving.version_loading import Load
from clickline.serving.worker_channel import Channel

_MIN_LIFETIME = 10.0  # seconds: the pause before a restart grows for a worker that lived for less
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 10.0
_LOAD_SECONDS = 600.0  # for a worker to load a version; the first start may compile all kernels
_METRICS_SECONDS = 2.0  # for a worker to send its metrics
_CLOSED_SECONDS = 2.0  # for a worker to exit after it has closed its channel
_EXIT_SECONDS = 4.0  # for a worker to exit after the drain timeout
_HANG_SECONDS = 60  # without an answer to a ping before a worker is killed
_FIRST_POLL_SECONDS = 10.0  # for the first poll of the registry, before the server starts without a version
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True)
class ServerInfo:
    """The state of a server whose workers all listen and serve the same version."""

    version: int | None
    processes: int
    example: Mapping[str, Any] | None = None  # a row to try it with; None without a version


class _Worker:
    """A running worker process."""

    def __init__(self, slot: int, child: ChildProcess, channel: Channel) -> None:
        self.slot = slot
        self.child = child
        self.channel = channel
        self.listening = False
        self.version: int | None = None  # the one it serves
        self.metrics = RequestMetrics()
        self.waiting = 0
        self.metrics_received: asyncio.Future[None] | None = None
        self.up = False
        self.ping_pending = False  # a ping is not answered yet
        self.silent_seconds = 0  # since that ping


class Supervisor:
    """Runs the server until a signal ends it."""

    def __init__(
        self,
        serve: ServeSection,
        names: tuple[str, ...],
        token: str | None,
        source: VersionSource,
        load: Load,
        processes: int,
        work: Path,
        log: ServerLog,
        on_serving: Callable[[ServerInfo], None],
    ) -> None:
        """`work`: a private folder. `on_serving` is called when all workers listen, and again when they have switched
        to another version."""
        self._serve = serve
        self._auth = BearerAuth(token)
        self._source = source
        self._processes = processes
        self._work = work
        self._log = log
        self._on_serving = on_serving
        self._announced: ServerInfo | None = None
        self._worker_config = {
            "serve": serve.model_dump(mode="json"),
            "names": names,
            "token": token,
            "load": f"{load.__module__}:{load.__qualname__}",
            "path": sys.path,
            "work": str(work),
        }
        self._workers: dict[int, _Worker] = {}
        self._past_metrics = RequestMetrics()  # of processes that have exited
        self._pauses = [Backoff(_FIRST_PAUSE, _LONGEST_PAUSE) for _ in range(processes)]
        self._restarts = 0
        self._versions_refused = 0
        self._example: Mapping[str, Any] | None = None
        self._polled = False  # the registry, at least once
        self._stopping = False
        self._failure: str | None = None
        self._ended = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._rollout = Rollout(self._send, self._committed, self._refused)
        self._follower = RegistryFollower(
            source,
            serve.poll_interval,
            log,
            lambda version: self._call_from_thread(self._rollout.propose, version),
            lambda number, reason: self._call_from_thread(self._count_refused, number, reason),
            lambda: self._call_from_thread(self._first_poll_done),
        )

    async def run(self) -> None:
        """Run until a signal, then drain. A second signal raises KeyboardInterrupt."""
        logging.getLogger().addHandler(self._log)
        signals: asyncio.Queue[int] = asyncio.Queue()
        for number in _SIGNALS:
            if (
                signal.getsignal(number) is not signal.SIG_IGN
            ):  # ignored on purpose, by nohup or `&` in a script
                self._loop.add_signal_handler(number, signals.put_nowait, number)
        reserved_sockets = _reserve_ports(self._serve)
        admin = await self._admin()
        try:
            self._follower.start()
            self._loop.call_later(_FIRST_POLL_SECONDS, self._registry_is_slow)
            for slot in range(self._processes):
                await self._launch(slot)
            self._start(self._watch())
            await self._wait_for_end(signals)
            self._log.event("stopping", drain=self._serve.drain_timeout)
            self._stop()
            interrupted = await self._wait_for_drain(signals)
        finally:
            self._stopping = True
            for worker in self._workers.values():
                worker.child.process.kill()
                worker.child.process.wait()
            for reserved in reserved_sockets:
                reserved.close()
            await admin.stop()
        if self._failure:
            raise ClicklineError(self._failure)
        if interrupted:
            raise KeyboardInterrupt

    # ── workers ────────────────────────────────────────────────────────────────────────────────

    async def _launch(self, slot: int) -> None:
        child = ChildProcess(
            "clickline.serving.worker_process",
            request={"slot": slot, **self._worker_config},
            output=sys.stderr.fileno(),  # the server's own standard output is for ServerInfo
            environment={"GRPC_VERBOSITY": "NONE", **os.environ},  # stderr is for JSON lines
        )
        worker = self._workers[slot] = _Worker(slot, child, await Channel.connect(child.socket))
        if self._stopping:  # `stop` was sent to the others before this worker existed
            worker.channel.send(do="stop")
        self._start(self._read_messages(worker))

    async def _launch_again(self, slot: int) -> None:
        """Start a worker, retrying: the system may lack processes, memory or file descriptors for a while."""
        while not self._stopping:
            try:
                await self._launch(slot)
                return
            except OSError as error:
                pause = self._pauses[slot].next()
                self._log.event(
                    "a worker process cannot be started",
                    "error",
                    worker=slot,
                    message=str(error),
                    pause=pause,
                )
            await asyncio.sleep(pause)

    async def _read_messages(self, worker: _Worker) -> None:
        """Handle the messages of a worker until it exits; then start another in its place."""
        async for message in worker.channel:
            worker.ping_pending, worker.silent_seconds = False, 0
            try:
                self._handle(worker, message)
            except Exception as error:  # noqa: BLE001 - a bug here must not leave a worker unsupervised
                self._log.unexpected(error, "handling a message", f"worker {worker.slot}")
        worker.channel.close()
        code = await asyncio.to_thread(worker.child.wait_or_kill, _CLOSED_SECONDS)
        del self._workers[worker.slot]
        self._past_metrics.add(worker.metrics)
        if worker.metrics_received is not None and not worker.metrics_received.done():
            worker.metrics_received.set_result(None)
        if self._stopping:
            if not self._workers:
                self._ended.set()
            return
        self._rollout.worker_gone(worker.slot)
        self._restarts += 1
        if worker.child.lifetime >= _MIN_LIFETIME:
            self._pauses[worker.slot].reset()
        pause = self._pauses[worker.slot].next()
        self._log.event(
            "a worker process ended; another is started",
            "error",
            worker=worker.slot,
            pid=worker.child.pid,
            exit_code=code,
            pause=pause,
        )
        await asyncio.sleep(pause)
        await self._launch_again(worker.slot)

    def _handle(self, worker: _Worker, message: dict[str, Any]) -> None:
        match message:
            case {"up": _}:
                worker.up = True
                self._rollout.worker_up(worker.slot)
            case {"prepared": number}:
                self._rollout.prepared(worker.slot, number)
            case {"refused": number, "reason": reason, "again": again}:
                current = self._rollout.current
                if current is not None and current.number == number:
                    self._log.event(
                        "a worker cannot load the current version",
                        "error",
                        worker=worker.slot,
                        version=number,
                        reason=reason,
                    )
                self._rollout.refused(worker.slot, number, reason, again)
                self._announce_if_serving()
            case {"serving": number, "example": example}:
                worker.version, self._example = number, example
                self._announce_if_serving()
            case {"listening": _}:
                worker.listening = True
                self._announce_if_serving()
            case {"metrics": text, "waiting": waiting}:
                worker.metrics, worker.waiting = RequestMetrics.from_json(text), waiting
                if worker.metrics_received is not None and not worker.metrics_received.done():
                    worker.metrics_received.set_result(None)
            case {"failed": message}:
                self._log.event("a worker failed", "error", worker=worker.slot, message=message)
                if self._announced is None:  # it never listened: a restart would not help
                    self._failure = message
                    self._ended.set()

    def _announce_if_serving(self) -> None:
        if not self._polled or self._rollout.pending is not None:
            return  # a version is being loaded: announce the server with it
        version = self._version()
        if self._announced is not None and self._announced.version == version:
            return
        workers = self._workers.values()
        needed = self._processes if self._announced is None else 1  # a crashed worker hides no later version
        if len(workers) >= needed and all(
            worker.listening and version in (None, worker.version) for worker in workers
        ):
            self._announced = ServerInfo(version, self._processes, self._example)
            try:
                self._on_serving(self._announced)
            except Exception as error:  # noqa: BLE001 - perhaps stdout is closed: keep serving
                self._log.event("could not announce that the server is ready", "warning", message=repr(error))

    def _registry_is_slow(self) -> None:
        if not self._polled:
            self._log.event("the registry has not answered yet", "warning", registry=str(self._source))
            self._first_poll_done()

    def _first_poll_done(self) -> None:
        self._polled = True
        self._announce_if_serving()

    # ── versions ───────────────────────────────────────────────────────────────────────────────

    def _send(self, slot: int, message: dict[str, Any]) -> None:
        worker = self._workers.get(slot)
        if worker is not None:
            worker.channel.send(**message)

    def _committed(self, version: FetchedVersion) -> None:
        self._log.event("the version is current", version=version.number)
        for folder in self._work.iterdir():  # mapped files stay readable until they are unmapped
            if folder.name.isdigit() and folder.name != str(version.number):
                shutil.rmtree(folder, ignore_errors=True)

    def _refused(self, version: FetchedVersion, reason: str, again: bool) -> None:
        self._count_refused(version.number, reason)
        if again:
            self._follower.retry_later(version.number)

    def _count_refused(self, number: int, reason: str) -> None:
        self._versions_refused += 1
        current = self._rollout.current
        self._log.event(
            "a version was refused",
            "error",
            version=number,
            reason=reason,
            current=None if current is None else current.number,
        )

    # ── hanging workers ────────────────────────────────────────────────────────────────────────

    async def _watch(self) -> None:
        """Kill workers that hang or do not load a version in time; others are started in their place."""
        pending: FetchedVersion | None = None
        since = 0.0
        while not self._stopping:
            await asyncio.sleep(1)
            for worker in list(self._workers.values()):
                if worker.up:
                    self._ping(worker)
            if self._rollout.pending is not pending:
                pending, since = self._rollout.pending, time.monotonic()
            if pending is not None and time.monotonic() - since > _LOAD_SECONDS:
                for slot in self._rollout.still_loading():
                    if slot in self._workers:
                        self._kill(
                            self._workers[slot],
                            f"it did not load version {pending.number} in time",
                            _LOAD_SECONDS,
                        )
                pending = None

    def _ping(self, worker: _Worker) -> None:
        """Ping a worker once a second. Silence is counted in our own pings, so that a suspended supervisor does not
        take its workers for dead."""
        if not worker.ping_pending:
            worker.ping_pending = True
            worker.channel.send(do="live")
            return
        worker.silent_seconds += 1
        if worker.silent_seconds == _HANG_SECONDS:
            self._kill(worker, "it does not answer pings", _HANG_SECONDS)

    def _kill(self, worker: _Worker, reason: str, seconds: float) -> None:
        self._log.event(
            "a worker process is ended", "error", worker=worker.slot, reason=reason, seconds=seconds
        )
        worker.child.process.kill()

    # ── shutdown ────────────────────────────────────────────────────────────────────────────────

    async def _wait_for_end(self, signals: asyncio.Queue[int]) -> bool:
        """Wait for a signal, the exit of all workers, or a fatal failure. True: a signal came."""
        signalled, ended = asyncio.create_task(signals.get()), asyncio.create_task(self._ended.wait())
        try:
            await asyncio.wait((signalled, ended), return_when=asyncio.FIRST_COMPLETED)
            return signalled.done()
        finally:
            signalled.cancel()
            ended.cancel()

    def _stop(self) -> None:
        self._stopping = True
        self._ended.clear()
        for worker in self._workers.values():
            worker.channel.send(do="stop")
        if not self._workers:
            self._ended.set()

    async def _wait_for_drain(self, signals: asyncio.Queue[int]) -> bool:
        """Wait for the workers to exit, for a bounded time. True: a second signal came first."""
        try:
            async with asyncio.timeout(self._serve.drain_timeout + _EXIT_SECONDS):
                return await self._wait_for_end(signals)
        except TimeoutError:
            return False

    # ── admin port ─────────────────────────────────────────────────────────────────────────────

    async def _admin(self) -> HttpServer:
        app = admin_app(self._auth, self._metrics, self._not_ready_reason, self._version)
        bound = bound_socket(self._serve.host, self._serve.metrics_port, "metrics_port", listen=True)
        server = HttpServer(app, [bound], self._serve.tls, 0.0)
        await server.start()
        return server

    def _not_ready_reason(self) -> str | None:
        """Return why the server is not ready; None if it is."""
        if self._stopping:
            return "stopping"
        if self._rollout.current is None:
            return "no version is loaded yet"
        if not any(worker.listening and worker.version is not None for worker in self._workers.values()):
            return "no worker process is listening"
        return None

    def _version(self) -> int | None:
        return None if self._rollout.current is None else self._rollout.current.number

    async def _metrics(self) -> bytes:
        workers = [worker for worker in self._workers.values() if worker.listening]
        for worker in workers:
            if (
                worker.metrics_received is None or worker.metrics_received.done()
            ):  # else another request for them is pending
                worker.metrics_received = self._loop.create_future()
                worker.channel.send(do="metrics")
        if workers:
            await asyncio.wait(
                [worker.metrics_received for worker in workers if worker.metrics_received],
                timeout=_METRICS_SECONDS,
            )
        total = RequestMetrics()
        total.add(self._past_metrics)
        for worker in self._workers.values():
            total.add(worker.metrics)
        current = self._rollout.current
        gauges: dict[str, tuple[str, float]] = {
            "queue_length": (
                "Requests in the queue.",
                sum(worker.waiting for worker in self._workers.values()),
            ),
            "workers": ("Worker processes that are listening.", len(workers)),
            "registry_unreachable": (
                "1 while the registry cannot be reached.",
                int(self._follower.unreachable),
            ),
        }
        if current is not None:
            gauges["version"] = ("The current version.", current.number)
            gauges["version_age_seconds"] = (
                "Time since the current version was published.",
                time.time() - current.created,
            )
            if current.data_until is not None:
                gauges["data_age_seconds"] = (
                    "Time since the end of the newest data that the current version was trained on.",
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

    # ── event loop ───────────────────────────────────────────────────────────────────────────────

    def _call_from_thread(self, call: Callable[..., None], *arguments: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(call, *arguments)

    def _start(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.unexpected(error, task.get_name(), "supervisor")


def _reserve_ports(serve: ServeSection) -> list[socket.socket]:
    """Hold the workers' ports, after checking that no other process listens on them: with SO_REUSEPORT two servers
    could share a port unnoticed, and each would get half of the requests."""
    reserved_sockets = []
    for key in ("grpc_port", "http_port", "brpc_port"):
        port = getattr(serve, key)
        if port is None:
            continue
        bound_socket(serve.host, port, key, listen=True).close()
        reserved_sockets.append(bound_socket(serve.host, port, key, shared=True))
    return reserved_sockets
