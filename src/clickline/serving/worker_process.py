"""A worker process: opens the ports, answers, and does what the supervisor says.

`python -m clickline.serving.worker_process FD`, with FD its end of the channel. The first message tells it everything.
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
from clickline.serving.auth import Guard
from clickline.serving.compile_notice import patience
from clickline.serving.dataplane import Dataplane
from clickline.serving.grpc_methods import GRPC_DOORS, GRPC_PAGES
from clickline.serving.grpc_server import GrpcServer
from clickline.serving.http_server import HttpDoors, HttpServer
from clickline.serving.open_versions import ScorerLike, Versions
from clickline.serving.ports import bound_socket, raise_file_limit
from clickline.serving.server_log import Log
from clickline.serving.server_metrics import Tally
from clickline.serving.version_loading import Load, remote_counts
from clickline.serving.warmup import example_row, warm
from clickline.serving.worker_channel import Channel

_WAITING_REQUESTS = 16  # that wait for lookup servers at the same time
_SWITCH_SECONDS = 0.0005
_LAST_SECONDS = 2.0  # after the time to drain: whoever is not done by then never will be


class Worker:
    """One process on the ports."""

    def __init__(self, channel: Channel, told: dict[str, Any]) -> None:
        self._channel = channel
        self._serve = ServeSection.model_validate(told["serve"])
        self._work = Path(told["work"])
        self._load: Load = _imported(told["load"])
        self._log = Log(f"worker {told['slot']}")
        logging.getLogger().addHandler(self._log)
        self._first = told["slot"] == 0
        self._tally = Tally()
        self._loading = ThreadPoolExecutor(1, "loading")
        self._versions = Versions(tuple(told["names"]), self._closed)
        batching = self._serve.batching
        remote = self._serve.lookup is not None
        self._plane = Dataplane(
            self._versions,
            self._log,
            queue=self._serve.queue,
            threads=ThreadPoolExecutor(_WAITING_REQUESTS, "scoring") if remote else None,
            at_once=_WAITING_REQUESTS if remote else 1,
            batch_rows=0 if batching is None else batching.rows,
            batch_wait=0.0 if batching is None else batching.wait / 1000,
        )
        guard = Guard(told["token"])
        self._grpc = GrpcServer(
            GRPC_DOORS, GRPC_PAGES, self._plane, guard, self._serve, self._tally, self._log
        )
        self._http_doors = HttpDoors(self._plane, guard, self._serve, self._tally, self._log)
        self._http: HttpServer | None = None
        self._listening = False
        self._stopping = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Until told to stop, or the supervisor is gone."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._stopping.set)
        self._grpc.serving(False)
        self._channel.send(up=os.getpid())
        obeying = asyncio.create_task(self._obey())
        await self._stopping.wait()
        obeying.cancel()
        threading.Thread(target=_leave_late, args=(self._serve.drain + _LAST_SECONDS,), daemon=True).start()
        await self._drain()

    async def _obey(self) -> None:
        try:
            async for message in self._channel:
                if message["do"] == "stop":
                    break
                await self._do(message)
        except Exception as error:  # noqa: BLE001 - who cannot follow any more leaves its place to another process
            self._log.unexpected(error, "obeying the supervisor", "worker")
        self._stopping.set()  # also when the supervisor is gone

    async def _do(self, message: dict[str, Any]) -> None:
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
            case "tell":
                self._tell(message["id"])
            case "live":
                self._channel.send(alive=True)

    async def _prepare(self, number: int, folders: list[str]) -> None:
        loop = asyncio.get_running_loop()
        work = self._work / str(number)
        try:
            scorer = await loop.run_in_executor(self._loading, self._opened, list(map(Path, folders)), work)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with a version, the current one goes on
            if not isinstance(error, (ClicklineError, OSError)):  # a full disk is no bug
                self._log.unexpected(error, f"version {number}", "loading")
            again = isinstance(error, (OSError, StorageError, MemoryError, RequestRefused))
            words = str(error) if isinstance(error, ClicklineError) else f"{type(error).__name__}: {error}"
            self._channel.send(refused=number, reason=words, again=again)
            return
        if scorer.number != number:
            scorer.close()
            self._channel.send(
                refused=number, reason=f"its manifest says it is version {scorer.number}", again=False
            )
            return
        if not self._versions.open():
            gc.collect()
            gc.freeze()  # modules and kernels stay: they are not looked through in the middle of a request
        self._versions.add(scorer)
        self._channel.send(prepared=number)

    def _opened(self, folders: list[Path], work: Path) -> ScorerLike:
        with patience(self._compiling):
            scorer = self._load(folders, self._serve, work)
            try:
                warm(scorer)
            except BaseException:
                scorer.close()
                raise
        return scorer

    def _compiling(self) -> None:
        if self._first:  # one line for all processes, which do the same
            words = "The first start on a machine compiles kernels, for a minute or two. Later ones find them ready."
            self._log.say("compiling, once", message=words)

    async def _listen(self) -> None:
        if self._listening:
            return
        self._listening = True
        try:
            bound = bound_socket(self._serve.host, self._serve.http_port, "http_port", shared=True)
            doors = self._http_doors
            self._http = HttpServer(doors, [bound], self._serve.tls, self._serve.drain, doors.refused)
            await self._http.start()
            await self._grpc.start()
        except (OSError, ClicklineError) as error:
            self._channel.send(failed=str(error))
            await self._channel.flush()
            self._stopping.set()
            return
        self._channel.send(listening=True)

    async def _drain(self) -> None:
        stops: list[Any] = [] if self._http is None else [self._http.stop()]
        if self._listening:
            stops.append(self._grpc.stop(self._serve.drain))
        await asyncio.gather(*stops, return_exceptions=True)
        self._tell(None)
        await self._channel.flush()

    def _tell(self, question: int | None) -> None:
        for lease in self._versions.open():
            self._tally.lookups(lease.scorer)
        self._tally.remote(remote_counts())
        self._channel.send(told=question, tally=self._tally.to_json(), waiting=self._plane.waiting)

    def _closed(self, scorer: ScorerLike) -> None:
        """Nobody uses it any more. Unmapping large files takes a moment that no request should wait for."""
        self._tally.lookups(scorer)
        self._loading.submit(scorer.close)

    def _start(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _imported(name: str) -> Any:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def _leave_late(seconds: float) -> None:
    time.sleep(seconds)
    os._exit(1)


async def _work(end: socket.socket) -> None:
    channel = await Channel.over(end)
    told = await channel.receive()
    if told is None:
        return
    sys.path += [entry for entry in told["path"] if entry not in sys.path]
    try:
        worker = Worker(channel, told)
    except ClicklineError as error:
        channel.send(failed=str(error))
        await channel.flush()
        return
    await worker.run()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the supervisor's
    # While a version is loaded in its thread, the loop gets the interpreter back soon.
    sys.setswitchinterval(_SWITCH_SECONDS)
    raise_file_limit()
    uvloop.run(_work(socket.socket(fileno=int(sys.argv[1]))))
    sys.stderr.flush()
    # Without the interpreter's own goodbye: threads of gRPC and of a version that is being loaded may still run.
    os._exit(0)


if __name__ == "__main__":
    main()
