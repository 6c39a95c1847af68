"""The admin port of a lookup server: /metrics for Prometheus, /healthz and /readyz for probes."""

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
from clickline.serving.auth import BearerAuth
from clickline.serving.lookup.lookup_server import LookupServer
from clickline.serving.lookup.lookup_versions import ShardFollower, ShardVersions

_REQUEST_SECONDS = 10.0
_MAX_REQUESTS = 256  # at the same time


def exposition(server: LookupServer, versions: ShardVersions, follower: ShardFollower) -> bytes:
    """Render /metrics."""
    registry = CollectorRegistry()
    counts = server.counts()
    for name, meaning, count in (
        ("requests", "Lookups that were answered with rows.", counts["requests"]),
        ("keys", "Keys that were looked up.", counts["keys"]),
        ("keys_found", "Keys that have a row.", counts["found"]),
        ("version_not_here", "Lookups in a version that is not open.", counts["not_loaded"]),
        ("garbled_connections", "Connections closed because of a protocol error.", server.protocol_errors),
        ("connections_turned_away", "Connections rejected above the limit.", server.rejected),
    ):
        Counter(f"clickline_lookup_{name}", meaning, registry=registry).inc(count)
    opened = list(versions.open.values())
    current = versions.current
    for name, meaning, value in (
        ("connections", "Connections that are open.", server.connections),
        ("shard", "The shard that is served.", versions.shard),
        ("version", "The newest version that is open.", newest_version(versions)),
        ("version_behind", "1 while the current version is not open.", int(current not in versions.open)),
        ("rows", "Rows of the open versions.", sum(one.rows for one in opened)),
        ("mapped_bytes", "Bytes of the open versions' files.", sum(one.bytes for one in opened)),
        ("registry_unreachable", "1 while the registry cannot be reached.", int(follower.unreachable)),
    ):
        Gauge(f"clickline_lookup_{name}", meaning, registry=registry).set(value)
    return generate_latest(registry)


def newest_version(versions: ShardVersions) -> int:
    """The newest open version; 0: none is open."""
    return max((one.number for one in versions.open.values()), default=0)


class AdminServer:
    """A small HTTP server for the admin port, in threads."""

    def __init__(
        self,
        listening: socket.socket,
        auth: BearerAuth,
        tls: ssl.SSLContext | None,
        metrics: Callable[[], bytes],
        not_ready_reason: Callable[[], str | None],
        version: Callable[[], int],
    ) -> None:
        """`listening`: a bound socket, closed with the server. `not_ready_reason` returns why lookups would not be
        answered, or None; `version` is the newest one that is open."""

        slots = threading.BoundedSemaphore(_MAX_REQUESTS)

        class Handler(BaseHTTPRequestHandler):
            timeout = _REQUEST_SECONDS

            def do_GET(self) -> None:
                if self.path == "/healthz":  # needs no token: it reveals nothing, and probes have none
                    self._respond(200, b"live\n")
                elif self.path == "/readyz":
                    reason = not_ready_reason()
                    text = f"ready\nversion {version()}" if reason is None else reason
                    self._respond(200 if reason is None else 503, f"{text}\n".encode())
                elif self.path != "/metrics":
                    self._respond(404, b"Not found. Available: /metrics, /healthz and /readyz.\n")
                else:
                    try:
                        auth.check(self.headers.get("Authorization", "").encode("latin-1"))
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
                """Log nothing: probes come every few seconds."""

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            address_family = listening.family

            def process_request(self, request: Any, client_address: Any) -> None:
                """Handle each request in a thread, up to a bounded number."""
                if slots.acquire(blocking=False):
                    super().process_request(request, client_address)
                else:
                    self.shutdown_request(request)

            def process_request_thread(self, request: Any, client_address: Any) -> None:
                try:
                    super().process_request_thread(request, client_address)
                finally:
                    slots.release()

            def finish_request(self, request: Any, client_address: Any) -> None:
                """Do the TLS handshake in the request's own thread, so that a slow one delays no other."""
                request.settimeout(_REQUEST_SECONDS)
                with suppress(OSError):
                    wrapped = request if tls is None else tls.wrap_socket(request, server_side=True)
                    with wrapped:
                        super().finish_request(wrapped, client_address)

            def handle_error(self, request: Any, client_address: Any) -> None:
                """Ignore clients that disconnected."""

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
