"""The lookup stage: one shard of the registry's versions, for predictors on other machines."""

from __future__ import annotations

import gc
import ipaddress
import signal
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from clickline.artifacts.manifest import fingerprint
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
    _warn_if_exposed(section, log)
    token, tls = _token(section), _tls(section)
    registry = registry_of(config)
    copies = Path(config.cache.dir, "lookup", fingerprint({"registry": registry.uri}), str(shard))
    versions = OpenVersions(shard)
    files = ShardFiles(registry, shard, copies, {})
    follower = Follower(files, versions, section.poll, log)
    _check_shard(registry.current() and files, shard)
    listening = _listening(section.host, section.lookup_port if port is None else port)
    server = LookupServer(versions, listening, log, token=token, tls=tls)
    admin = _admin(section, token, tls, server, versions, follower)
    stop = _StopSignal()
    try:
        follower.look()
        gc.collect()
        gc.freeze()  # modules and kernels stay: they are not looked through in the middle of a request
        server.start()
        admin.start()
        follower.start()
        up(_up(listening, versions))
        stop.wait()
        log.say("stopping", drain=section.drain)
        follower.stop()
        server.stop(section.drain)
        admin.stop()
    finally:
        stop.restore()
        listening.close()
    log.say("stopped")
