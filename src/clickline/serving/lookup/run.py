"""The lookup stage: one shard of the registry's versions, for predictors on other machines."""

from __future__ import annotations

import gc
import signal
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from clickline.artifacts.from_config import registry_of
from clickline.artifacts.manifest import fingerprint
from clickline.artifacts.version import Verifier
from clickline.config import Config
from clickline.config.sections import ServeSection
from clickline.serving.auth import Guard, exposure, read_token, server_tls
from clickline.serving.json_log import Log
from clickline.serving.lookup.lookup_admin import Admin, exposition, newest
from clickline.serving.lookup.lookup_server import LookupServer
from clickline.serving.lookup.lookup_versions import Follower, OpenVersions, ShardFiles
from clickline.serving.ports import address, bound_socket, raise_file_limit

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True)
class Up:
    """A lookup server that listens."""

    address: str
    shard: int
    shards: int | None
    version: int | None  # None: nothing is published yet, or it could not be loaded
    rows: int
    bytes: int  # of the files that are mapped


def lookup(
    config: Config, shard: int, port: int | None = None, up: Callable[[Up], None] = lambda up: None
) -> None:
    """Serve until SIGTERM or SIGINT, which lets running requests end. `up` is called once the port is open; by
    default that is `serve.lookup_port`, 0 means any."""
    section = config.serve
    raise_file_limit()
    log = Log(f"lookup, shard {shard}")
    warning = exposure(section)
    if warning:
        log.say("exposed", "warning", message=warning)
    token, tls = read_token(section.token_file), server_tls(section.tls)
    registry = registry_of(config)
    registry.check_trust()
    copies = Path(config.cache.dir, "lookup", fingerprint({"registry": registry.uri}), str(shard))
    files = ShardFiles(registry, shard, copies, Verifier())
    files.check_shard()
    versions = OpenVersions(shard)
    follower = Follower(files, versions, section.poll, log)
    with ExitStack() as held, _Signals() as signals:
        listening = held.enter_context(
            bound_socket(section.host, section.lookup_port if port is None else port, "lookup_port")
        )
        server = LookupServer(versions, listening, log, token=token, tls=tls)
        admin = _admin(section, token, tls, server, versions, follower)
        held.callback(admin.close)
        admin.start()
        follower.look()
        gc.collect()
        gc.freeze()  # modules and kernels stay: they are not looked through in the middle of a request
        server.start()
        follower.start()
        up(_up(listening, versions))
        signals.wait()
        log.say("stopping", drain=section.drain)
        follower.stop()
        server.stop(section.drain)
    log.say("stopped")


class _Signals:
    """The first SIGTERM or SIGINT ends `wait`; a second interrupts whatever is done then."""

    def __init__(self) -> None:
        self._came = threading.Event()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup and `&` in a script mean it
                self._before[number] = signal.signal(number, self._hear)
        self._wake = signal.set_wakeup_fd(-1)  # the command line's own watcher would not let us drain
        return self

    def __exit__(self, *error: object) -> None:
        signal.set_wakeup_fd(self._wake)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def wait(self) -> None:
        self._came.wait()

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self._came.is_set():
            raise KeyboardInterrupt
        self._came.set()


def _up(listening: socket.socket, versions: OpenVersions) -> Up:
    host, port = listening.getsockname()[:2]
    opened = versions.open.get(versions.current or 0)
    where = address(host, port)
    if opened is None:
        return Up(where, versions.shard, versions.shards, None, 0, 0)
    return Up(where, versions.shard, versions.shards, opened.number, opened.rows, opened.bytes)


def _admin(
    section: ServeSection,
    token: str | None,
    tls: ssl.SSLContext | None,
    server: LookupServer,
    versions: OpenVersions,
    follower: Follower,
) -> Admin:
    def missing() -> str | None:
        if server.draining:
            return "stopping"
        return None if versions.open else "no version is open yet"

    def metrics() -> bytes:
        return exposition(server, versions, follower)

    listening = bound_socket(section.host, section.metrics_port, "metrics_port")
    return Admin(listening, Guard(token), tls, metrics, missing, lambda: newest(versions))
