"""The lookup stage: one shard of the registry's versions, for predictors on other machines."""

from __future__ import annotations

import gc
import ipaddress
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

from clickline.artifacts.manifest import fingerprint
from clickline.artifacts.version import Verifier
from clickline.config import Config
from clickline.config.sections import ServeSection
from clickline.errors import ClicklineError
from clickline.intake.stores import registry_of
from clickline.stages.lookup.admin import Admin, exposition
from clickline.stages.lookup.log import Log
from clickline.stages.lookup.server import LookupServer
from clickline.stages.lookup.versions import Follower, OpenVersions, ShardFiles

__all__ = ["Up", "lookup"]

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
    log = Log(shard)
    warning = _exposure(section)
    if warning:
        log.say("exposed", "warning", message=warning)
    token, tls = _token(section), _tls(section)
    registry = registry_of(config)
    copies = Path(config.cache.dir, "lookup", fingerprint({"registry": registry.uri}), str(shard))
    files = ShardFiles(registry, shard, copies, Verifier())
    files.check_shard()
    versions = OpenVersions(shard)
    follower = Follower(files, versions, section.poll, log)
    with ExitStack() as held, _Signals() as signals:
        listening = held.enter_context(_listening(section, section.lookup_port if port is None else port))
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
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if opened is None:
        return Up(address, versions.shard, versions.shards, None, 0, 0)
    return Up(address, versions.shard, versions.shards, opened.number, opened.rows, opened.bytes)


def _listening(section: ServeSection, port: int) -> socket.socket:
    host = section.host
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, socket.SOCK_STREAM)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except BaseException:
            bound.close()
            raise
    except OSError as error:
        raise _taken("lookup_port", host, port, error) from error
    return bound


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

    try:
        return Admin(section.host, section.metrics_port, token, tls, metrics, missing)
    except OSError as error:
        raise _taken("metrics_port", section.host, section.metrics_port, error) from error


def _taken(key: str, host: str, port: int, error: OSError) -> ClicklineError:
    return ClicklineError(
        f"serve.{key}: {host}:{port} cannot be listened on: {error.strerror or error}. Stop what uses it, or choose "
        f"another port by --set serve.{key}=…"
    )


def _token(section: ServeSection) -> str | None:
    if section.token_file is None:
        return None
    try:
        token = Path(section.token_file).read_text().partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ClicklineError(f"serve.token_file {section.token_file} cannot be read: {error}.") from error
    if not token:
        raise ClicklineError(
            f"the first line of serve.token_file {section.token_file} is empty. Put the token there."
        )
    return token


def _tls(section: ServeSection) -> ssl.SSLContext | None:
    if section.tls is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(section.tls.certificate, section.tls.key)
    except OSError as error:  # SSLError is one
        raise ClicklineError(
            f"serve.tls: {section.tls.certificate} with the key {section.tls.key} cannot be used: {error}. Both are "
            "PEM files; the key belongs to the first certificate."
        ) from error
    return context


def _exposure(section: ServeSection) -> str | None:
    """A warning when others than this machine can reach the port without TLS or a token."""
    try:
        loopback = ipaddress.ip_address(section.host).is_loopback
    except ValueError:
        loopback = section.host == "localhost"
    given = {"serve.tls": section.tls, "serve.token_file": section.token_file}
    missing = [key for key, value in given.items() if value is None]
    if loopback or not missing:
        return None
    return (
        f"serve.host is {section.host}: other machines can reach the ports, and {' and '.join(missing)} "
        f"{'is' if len(missing) == 1 else 'are'} not set. Set them, or keep the ports behind a firewall."
    )
