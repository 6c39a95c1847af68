"""The admin port of a lookup server: /metrics for Prometheus, /healthz and /readyz for whoever keeps it running."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from clickline.errors import RequestRefused
from clickline.serving.auth import Guard
from clickline.serving.lookup.lookup_server import LookupServer
from clickline.serving.lookup.lookup_versions import Follower, OpenVersions

_REQUEST_SECONDS = 10.0
_MOST_AT_ONCE = 256  # requests


def exposition(server: LookupServer, versions: OpenVersions, follower: Follower) -> bytes:
    """What /metrics says."""
    registry = CollectorRegistry()
    counts = server.counts()
    for name, meaning, count in (
        ("requests", "Lookups that were answered with rows.", counts.requests),
        ("keys", "Keys that were asked for.", counts.keys),
        ("keys_found", "Keys that have a row.", counts.found),
        ("version_not_here", "Lookups in a version that is not open here.", counts.not_here),
        ("garbled_connections", "Connections that were ended for what they sent.", server.garbled),
        ("connections_turned_away", "Connections above the allowed number.", server.turned_away),
    ):
        Counter(f"clickline_lookup_{name}", meaning, registry=registry).inc(count)
    opened = list(versions.open.values())
    current = versions.current
    for name, meaning, value in (
        ("connections", "Connections that are open.", server.connections),
        ("shard", "The shard that is served.", versions.shard),
        ("version", "The newest version that is open.", newest(versions)),
        ("version_behind", "1 while the current version is not open.", int(current not in versions.open)),
        ("rows", "Rows of the open versions.", sum(one.rows for one in opened)),
        ("mapped_bytes", "Bytes of the open versions' files.", sum(one.bytes for one in opened)),
        ("registry_unreachable", "1 while the registry cannot be reached.", int(follower.unreachable)),
    ):
        Gauge(f"clickline_lookup_{name}", meaning, registry=registry).set(value)
    return generate_latest(registry)


def newest(versions: OpenVersions) -> int:
    """The newest version that is open; 0: none is."""
    return max((one.number for one in versions.open.values()), default=0)


class Admin:
    """A small HTTP server in threads of its own."""

    def __init__(
        self,
        listening: socket.socket,
        guard: Guard,
        tls: ssl.SSLContext | None,
        metrics: Callable[[], bytes],
        missing: Callable[[], str | None],
        version: Callable[[], int],
    ) -> None:
        """`listening`: a socket that is bound; it is closed with this. `missing` says why lookups would not be
        answered, None when they would; `version` is the newest that they are answered from."""

        places = threading.BoundedSemaphore(_MOST_AT_ONCE)

        class Handler(BaseHTTPRequestHandler):
            timeout = _REQUEST_SECONDS

            def do_GET(self) -> None:
                if self.path == "/healthz":  # without a token: it tells nothing, and probes have none
                    self._respond(200, b"live\n")
                elif self.path == "/readyz":
                    why = missing()
                    words = f"ready\nversion {version()}" if why is None else why
                    self._respond(200 if why is None else 503, f"{words}\n".encode())
                elif self.path != "/metrics":
                    self._respond(404, b"There is /metrics, /healthz and /readyz.\n")
                else:
                    try:
                        guard.check(self.headers.get("Authorization", "").encode("latin-1"))
                    except RequestRefused as refused:
                        self._respond(401, f"{refused}\n".encode())
                    else:
                        self._respond(200, metrics())

            def _respond(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *values: Any) -> None:
                """Probes come every few seconds: nothing to tell."""

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            address_family = listening.family

            def process_request(self, request: Any, client_address: Any) -> None:
                """In a thread of its own: a bounded number of them, whoever connects."""
                if places.acquire(blocking=False):
                    super().process_request(request, client_address)
                else:
                    self.shutdown_request(request)

            def process_request_thread(self, request: Any, client_address: Any) -> None:
                try:
                    super().process_request_thread(request, client_address)
                finally:
                    places.release()

            def finish_request(self, request: Any, client_address: Any) -> None:
                """In the request's own thread, so that a slow handshake holds up nobody else."""
                request.settimeout(_REQUEST_SECONDS)
                with suppress(OSError):
                    wrapped = request if tls is None else tls.wrap_socket(request, server_side=True)
                    with wrapped:
                        super().finish_request(wrapped, client_address)

            def handle_error(self, request: Any, client_address: Any) -> None:
                """A client that went away."""

        self._server = Server(listening.getsockname(), Handler, bind_and_activate=False)
        self._server.socket.close()
        self._server.socket = listening
        self._server.server_activate()
        self._thread = threading.Thread(target=self._server.serve_forever, name="admin", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        if self._thread.is_alive():
            self._server.shutdown()
        self._server.server_close()
