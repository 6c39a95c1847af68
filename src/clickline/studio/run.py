"""Runs the studio until it is stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from clickline.config.sections import unguarded
from clickline.errors import ClicklineError
from clickline.machine import connect_host
from clickline.serving.auth import server_tls
from clickline.serving.ports import address, bound_socket
from clickline.studio.app import Studio
from clickline.studio.homes import Home
from clickline.studio.studio_auth import Access, StudioToken, studio_token


@dataclass(frozen=True)
class StudioAddress:
    """Where the studio listens."""

    url: str
    token_file: Path | None  # None if none could be created, so that no actions are possible
    note: str = ""  # why not


def run(
    homes: Sequence[Home],
    host: str,
    port: int,
    on_ready: Callable[[StudioAddress], None] = lambda address: None,
) -> None:
    """Run until SIGINT or SIGTERM. `on_ready` is called when the port is open. Token and certificate are those of the
    first home."""
    section, folder, note = homes[0].config.studio, homes[0].folder, ""
    file = section.token_file
    missing = [f"studio.{key}" for key in unguarded(host, section.tls, file)]
    if missing:
        raise ClicklineError(
            f"studio.host is {host}, which other machines can reach, but {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set. Set them in a config (-c), or keep 127.0.0.1 and "
            "use an SSH tunnel."
        )
    tls = server_tls(section.tls, "studio")
    protected = any(home.requires_token for home in homes)
    token: StudioToken | None = None
    try:
        token = studio_token(file, folder)
    except ClicklineError as error:
        if file is not None or protected:
            raise
        note = f"actions are disabled: {error}"  # a home that cannot be written can still be viewed
    studio = Studio(homes, Access(token, host, protected=protected))
    with bound_socket(host, port, "port", section="studio", listen=True) as listening:
        place = address(connect_host(host), listening.getsockname()[1])
        url = f"{'http' if tls is None else 'https'}://{place}"
        on_ready(StudioAddress(url, None if token is None else token.file, note))
        asyncio.run(_serve(studio, listening, tls))


async def _serve(studio: Studio, listening: socket.socket, tls: ssl.SSLContext | None) -> None:
    server = _Server(
        uvicorn.Config(
            studio.app(),
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=2,
            lifespan="on",
            ssl_context_factory=None if tls is None else lambda *_: tls,
        )
    )

    def end() -> None:
        server.should_exit = True
        studio.close()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end)
    await server.serve(sockets=[listening])
    if studio.is_busy:  # the thread of a store that does not answer would keep the process alive
        sys.stdout.flush()
        os._exit(0)


class _Server(uvicorn.Server):
    """A server without its own signal handling: event streams would never end by themselves."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
