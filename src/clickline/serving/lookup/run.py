"""The lookup stage: serves one shard of the registry's versions to predictors on other machines."""

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
from clickline.serving.auth import BearerAuth, exposure_warning, read_token, server_tls
from clickline.serving.json_log import JsonLog
from clickline.serving.lookup.lookup_admin import AdminServer, exposition, newest_version
from clickline.serving.lookup.lookup_server import LookupServer
from clickline.serving.lookup.lookup_versions import ShardFiles, ShardFollower, ShardVersions
from clickline.serving.ports import address, bound_socket, raise_file_limit

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True)
class LookupServerInfo:
    """The state of a lookup server when it starts listening."""

    address: str
    shard: int
    shards: int | None
    version: int | None  # None: nothing is published, or it could not be opened
    rows: int
    bytes: int  # of the mapped files


def lookup(
    config: Config,
    shard: int,
    port: int | None = None,
    on_ready: Callable[[LookupServerInfo], None] = lambda info: None,
) -> None:
    """Serve until SIGTERM or SIGINT, then drain. `on_ready` is called once the port is open. `port` defaults to
    `serve.lookup_port`; 0 means any free port."""
    section = config.serve
    raise_file_limit()
    log = JsonLog(f"lookup, shard {shard}")
    warning = exposure_warning(section)
    if warning:
        log.event("exposed", "warning", message=warning)
    token, tls = read_token(section.token_file), server_tls(section.tls)
    registry = registry_of(config)
    registry.check_trust()
    copies = Path(config.cache.dir, "lookup", fingerprint({"registry": registry.uri}), str(shard))
    files = ShardFiles(registry, shard, copies, Verifier())
    files.check_shard()
    versions = ShardVersions(shard)
    follower = ShardFollower(files, versions, section.poll_interval, log)
    with ExitStack() as stack, _ShutdownSignals() as signals:
        listening = stack.enter_context(
            bound_socket(section.host, section.lookup_port if port is None else port, "lookup_port")
        )
        server = LookupServer(versions, listening, log, token=token, tls=tls)
        admin = _admin(section, token, tls, server, versions, follower)
        stack.callback(admin.close)
        admin.start()
        follower.poll_once()
        gc.collect()
        gc.freeze()  # modules and kernels are permanent: do not scan them during requests
        server.start()
        follower.start()
        on_ready(_server_info(listening, versions))
        signals.wait()
        log.event("stopping", drain=section.drain_timeout)
        follower.stop()
        server.stop(section.drain_timeout)
    log.event("stopped")


class _ShutdownSignals:
    """The first SIGTERM or SIGINT ends `wait`; a second one raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self._received = threading.Event()
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> _ShutdownSignals:
        for number in _SIGNALS:
            if (
                signal.getsignal(number) is not signal.SIG_IGN
            ):  # ignored on purpose, by nohup or `&` in a script
                self._previous[number] = signal.signal(number, self._handle)
        self._wakeup_fd = signal.set_wakeup_fd(
            -1
        )  # the CLI's own signal watcher would end the process without draining
        return self

    def __exit__(self, *error: object) -> None:
        signal.set_wakeup_fd(self._wakeup_fd)
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def wait(self) -> None:
        self._received.wait()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._received.is_set():
            raise KeyboardInterrupt
        self._received.set()


def _server_info(listening: socket.socket, versions: ShardVersions) -> LookupServerInfo:
    host, port = listening.getsockname()[:2]
    version = versions.open.get(versions.current or 0)
    where = address(host, port)
    if version is None:
        return LookupServerInfo(where, versions.shard, versions.shards, None, 0, 0)
    return LookupServerInfo(
        where, versions.shard, versions.shards, version.number, version.rows, version.bytes
    )


def _admin(
    section: ServeSection,
    token: str | None,
    tls: ssl.SSLContext | None,
    server: LookupServer,
    versions: ShardVersions,
    follower: ShardFollower,
) -> AdminServer:
    def not_ready_reason() -> str | None:
        if server.draining:
            return "stopping"
        return None if versions.open else "no version is open yet"

    def metrics() -> bytes:
        return exposition(server, versions, follower)

    listening = bound_socket(section.host, section.metrics_port, "metrics_port")
    return AdminServer(
        listening, BearerAuth(token), tls, metrics, not_ready_reason, lambda: newest_version(versions)
    )
