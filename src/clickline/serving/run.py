"""The serve stage: serves the registry's current version until a signal ends it."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from clickline.artifacts.from_config import registry_of
from clickline.artifacts.manifest import fingerprint
from clickline.config import Config
from clickline.machine import cores
from clickline.serving.auth import exposure_warning, read_token, server_tls
from clickline.serving.registry_follower import RegistrySource, VersionSource
from clickline.serving.server_log import ServerLog
from clickline.serving.supervisor import ServerInfo, Supervisor
from clickline.serving.version_loading import Load, open_version
from clickline.storage.file_lock import locked


def serve(
    config: Config,
    on_serving: Callable[[ServerInfo], None] = lambda info: None,
    *,
    source: VersionSource | None = None,
    load: Load = open_version,
) -> None:
    """Serve until SIGTERM or SIGINT, then drain. `on_serving` is called once the ports are open, and after each switch
    to another version.

    `source` provides the versions, by default from the config's registry. `load` opens one in a worker process, where
    it is imported by name.
    """
    section = config.serve
    log = ServerLog("supervisor")
    warning = exposure_warning(section)
    if warning:
        log.event("exposed", "warning", message=warning)
    token = read_token(section.token_file)
    server_tls(section.tls)  # report problems with its files before any port is opened
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
            await Supervisor(section, names, token, source, load, processes, work, log, on_serving).run()

        asyncio.run(run())
    log.event("stopped")


@contextmanager
def _work_folder(parent: Path) -> Iterator[Path]:
    """Create a folder for the lifetime of this server, and remove those of killed servers."""
    parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        with locked(parent):  # so that no other server removes the folder before it is locked
            for old in parent.iterdir():
                with locked(old, wait=False) as unused:
                    if unused:
                        shutil.rmtree(old, ignore_errors=True)
            folder = Path(tempfile.mkdtemp(prefix="serve-", dir=parent))
            stack.enter_context(locked(folder))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        yield folder
