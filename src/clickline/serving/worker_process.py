"""A worker process: listens on the ports, answers requests, and follows the supervisor's messages.

`python -m clickline.serving.worker_process FD`, where FD is its end of the channel. The first message configures it.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import uvloop

from clickline.config.sections import ServeSection
from clickline.errors import ClicklineError, RequestRefused, StorageError
from clickline.serving.auth import BearerAuth
from clickline.serving.brpc_server import BrpcServer
from clickline.serving.compile_notice import notify_if_compiling
from clickline.serving.dataplane import Dataplane
from clickline.serving.grpc_methods import BRPC_ENDPOINTS, GRPC_ENDPOINTS, GRPC_INFO_ENDPOINTS
from clickline.serving.grpc_server import GrpcServer
from clickline.serving.http_server import HttpEndpoints, HttpServer
from clickline.serving.open_versions import OpenVersions, ScorerLike
from clickline.serving.ports import bound_socket, raise_file_limit
from clickline.serving.server_log import ServerLog
from clickline.serving.server_metrics import RequestMetrics
from clickline.serving.version_loading import Load, remote_counts
from clickline.serving.warmup import example_row, warm_up
from clickline.serving.worker_channel import Channel

_CONCURRENT_LOOKUPS = 16  # requests that wait for lookup servers at the same time
_SWITCH_SECONDS = 0.0005
_EXIT_SECONDS = 2.0  # after the drain timeout, before the process is ended


class ServingWorker:
    """Serves requests in one process."""

    def __init__(self, channel: Channel, settings: dict[str, Any]) -> None:
        self._channel = channel
        self._serve = ServeSection.model_validate(settings["serve"])
        self._work = Path(settings["work"])
        self._load: Load = _import_by_name(settings["load"])
        self._log = ServerLog(f"worker {settings['slot']}")
        logging.getLogger().addHandler(self._log)
        self._is_first = settings["slot"] == 0
        self._metrics = RequestMetrics()
        self._loader = ThreadPoolExecutor(1, "loading")
        self._versions = OpenVersions(tuple(settings["names"]), self._close_unused)
        batching = self._serve.batching
        remote = self._serve.lookup is not None
        self._plane = Dataplane(
            self._versions,
            self._log,
            queue=self._serve.queue_size,
            threads=ThreadPoolExecutor(_CONCURRENT_LOOKUPS, "scoring") if remote else None,
            max_concurrent=_CONCURRENT_LOOKUPS if remote else 1,
            batch_rows=0 if batching is None else batching.rows,
            batch_wait=0.0 if batching is None else batching.max_wait_ms / 1000,
        )
        auth = BearerAuth(settings["token"])
        self._grpc = GrpcServer(
            GRPC_ENDPOINTS, GRPC_INFO_ENDPOINTS, self._plane, auth, self._serve, self._metrics, self._log
        )
        self._http_endpoints = HttpEndpoints(self._plane, auth, self._serve, self._metrics, self._log)
        self._auth = auth
        self._http: HttpServer | None = None
        self._brpc: BrpcServer | None = None
        self._listening = False
        self._stopping = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Serve until a stop message, SIGTERM, or the exit of the supervisor."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._stopping.set)
        self._grpc.serving(False)
        self._channel.send(up=os.getpid())
        reading = asyncio.create_task(self._read_messages())
        await self._stopping.wait()
        reading.cancel()
        threading.Thread(
            target=_exit_after, args=(self._serve.drain_timeout + _EXIT_SECONDS,), daemon=True
        ).start()
        await self._drain()

    async def _read_messages(self) -> None:
        try:
            async for message in self._channel:
                if message["do"] == "stop":
                    break
                await self._handle(message)
        except Exception as error:  # noqa: BLE001 - a worker that cannot follow the supervisor makes room for a new one
            self._log.unexpected(error, "handling a message of the supervisor", "worker")
        self._stopping.set()  # also when the supervisor has exited

    async def _handle(self, message: dict[str, Any]) -> None:
        match message["do"]:
            case "prepare":
                self._start(self._prepare(message["number"], message["folders"]))
            case "switch":
                scorer = self._versions.switch(message["number"]).scorer
                await self._listen()
                self._grpc.serving(True)
                self._channel.send(serving=scorer.number, example=example_row(scorer))
            case "drop":
                self._versions.drop(message["number"])
            case "listen":
                await self._listen()
            case "metrics":
                self._send_metrics()
            case "live":
                self._channel.send(alive=True)

    async def _prepare(self, number: int, folders: list[str]) -> None:
        loop = asyncio.get_running_loop()
        work = self._work / str(number)
        try:
            scorer = await loop.run_in_executor(
                self._loader, self._open_and_warm_up, list(map(Path, folders)), work
            )
        except Exception as error:  # noqa: BLE001 - whatever is wrong with a version, the current one keeps serving
            if not isinstance(error, (ClicklineError, OSError)):  # a full disk is not a bug
                self._log.unexpected(error, f"version {number}", "loading")
            again = isinstance(error, (OSError, StorageError, MemoryError, RequestRefused))
            message = str(error) if isinstance(error, ClicklineError) else f"{type(error).__name__}: {error}"
            self._channel.send(refused=number, reason=message, again=again)
            return
        if scorer.number != number:
            scorer.close()
            self._channel.send(
                refused=number, reason=f"its manifest is that of version {scorer.number}", again=False
            )
            return
        if not self._versions.open():
            gc.collect()
            gc.freeze()  # modules and kernels are permanent: do not scan them during requests
        self._versions.add(scorer)
        self._channel.send(prepared=number)

    def _open_and_warm_up(self, folders: list[Path], work: Path) -> ScorerLike:
        with notify_if_compiling(self._log_compiling):
            scorer = self._load(folders, self._serve, work)
            try:
                warm_up(scorer)
            except BaseException:
                scorer.close()
                raise
        return scorer

    def _log_compiling(self) -> None:
        if self._is_first:  # one line is enough for all workers
            message = (
                "The first start on a machine compiles kernels, which takes a minute or two. Later starts read them "
                "from a cache."
            )
            self._log.event("compiling, once", message=message)

    async def _listen(self) -> None:
        if self._listening:
            return
        self._listening = True
        try:
            bound = bound_socket(self._serve.host, self._serve.http_port, "http_port", shared=True)
            endpoints = self._http_endpoints
            self._http = HttpServer(
                endpoints, [bound], self._serve.tls, self._serve.drain_timeout, endpoints.refused
            )
            await self._http.start()
            await self._grpc.start()
            if self._serve.brpc_port is not None:
                self._brpc = BrpcServer(
                    BRPC_ENDPOINTS, self._plane, self._auth, self._serve, self._metrics, self._log,
                    self._http.connection, self._grpc.connection,
                )  # fmt: skip
                await self._brpc.start()
        except (OSError, ClicklineError) as error:
            self._channel.send(failed=str(error))
            await self._channel.flush()
            self._stopping.set()
            return
        self._channel.send(listening=True)

    async def _drain(self) -> None:
        stops: list[Any] = [] if self._http is None else [self._http.stop()]
        if self._listening:
            stops.append(self._grpc.stop(self._serve.drain_timeout))
        if self._brpc is not None:
            stops.append(self._brpc.stop(self._serve.drain_timeout))
        await asyncio.gather(*stops, return_exceptions=True)
        self._send_metrics()
        await self._channel.flush()

    def _send_metrics(self) -> None:
        for lease in self._versions.open():
            self._metrics.lookups(lease.scorer)
        self._metrics.remote(remote_counts())
        self._channel.send(metrics=self._metrics.to_json(), waiting=self._plane.queue_length)

    def _close_unused(self, scorer: ScorerLike) -> None:
        """Close a version in the background: unmapping large files takes a moment that no request should wait for."""
        self._metrics.lookups(scorer)
        self._loader.submit(scorer.close)

    def _start(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _import_by_name(name: str) -> Any:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def _exit_after(seconds: float) -> None:
    time.sleep(seconds)
    os._exit(1)


async def _run_worker(end: socket.socket) -> None:
    channel = await Channel.connect(end)
    settings = await channel.receive()
    if settings is None:
        return
    sys.path += [entry for entry in settings["path"] if entry not in sys.path]
    try:
        worker = ServingWorker(channel, settings)
    except ClicklineError as error:
        channel.send(failed=str(error))
        await channel.flush()
        return
    await worker.run()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the supervisor
    # While a thread loads a version, the event loop gets the GIL back soon.
    sys.setswitchinterval(_SWITCH_SECONDS)
    raise_file_limit()
    uvloop.run(_run_worker(socket.socket(fileno=int(sys.argv[1]))))
    sys.stderr.flush()
    # Skip the interpreter's shutdown: a thread that loads a version may still be running.
    os._exit(0)


if __name__ == "__main__":
    main()
