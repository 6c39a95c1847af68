"""The serve stage: versions of the registry answer on the wire until a signal ends it."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from clickline.artifacts.from_config import registry_of
from clickline.artifacts.manifest import fingerprint
from clickline.config import Config
from clickline.machine import cores
from clickline.serving.auth import exposure, read_token, server_tls
from clickline.serving.registry_follower import RegistrySource, Source
from clickline.serving.server_log import Log
from clickline.serving.supervisor import Supervisor, Up
from clickline.serving.version_loading import Load, open_version


def serve(
    config: Config,
    up: Callable[[Up], None] = lambda up: None,
    *,
    source: Source | None = None,
    load: Load = open_version,
) -> None:
    """Serve until SIGTERM or SIGINT, which lets running requests end. `up` is called once the ports are open.

    `source` says where versions come from, by default the config's registry. `load` opens one in a worker process,
    where it is imported by its name.
    """
    section = config.serve
    log = Log("supervisor")
    warning = exposure(section)
    if warning:
        log.say("exposed", "warning", message=warning)
    token = read_token(section.token_file)
    server_tls(section.tls)  # what is wrong with its files is said before any port is opened
    cache = Path(config.cache.dir)
    if source is None:
        registry = registry_of(config)
        registry.check_trust()
        copies = cache / "serve" / fingerprint({"registry": registry.uri})
        source = RegistrySource(registry, copies, tables=section.lookup is None)
    processes = section.processes or cores()
    names = tuple(dict.fromkeys((config.name, *section.aliases)))
    with _work_folder(cache / "serving") as work:

        async def run() -> None:
            await Supervisor(section, names, token, source, load, processes, work, log, up).run()

        asyncio.run(run())
    log.say("stopped")


@contextmanager
def _work_folder(parent: Path) -> Iterator[Path]:
    """A folder for as long as this service runs. What a killed one left behind is removed."""
    parent.mkdir(parents=True, exist_ok=True)
    with _locked(parent):  # nobody takes a folder away between its making and its lock
        for left in parent.iterdir():
            with suppress(BlockingIOError), _locked(left, fcntl.LOCK_NB):  # else it is in use
                shutil.rmtree(left, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix="serve-", dir=parent))
        held = os.open(folder, os.O_RDONLY)
        fcntl.flock(held, fcntl.LOCK_EX)  # ends with the process
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


@contextmanager
def _locked(folder: Path, option: int = 0) -> Iterator[None]:
    held = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | option)
        yield
    finally:
        os.close(held)
