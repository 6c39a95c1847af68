"""The admin port: /metrics for Prometheus, /healthz and /readyz for the orchestrator's probes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from clickline.errors import RequestRefused
from clickline.serving.auth import BearerAuth
from clickline.serving.http_server import respond

_TEXT = b"text/plain; version=0.0.4; charset=utf-8"
_PLAIN = b"text/plain; charset=utf-8"


def admin_app(
    auth: BearerAuth,
    metrics: Callable[[], Awaitable[bytes]],
    readiness: Callable[[], str | None],
    version: Callable[[], int | None],
) -> Callable[..., Awaitable[None]]:
    """Build the ASGI application. `readiness` returns why the server is not ready, or None; `version` is the one
    served."""

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        path = scope["path"]
        if path not in ("/healthz", "/readyz", "/metrics"):
            await respond(send, 404, _PLAIN, b"Not found. Available: /metrics, /healthz and /readyz.\n")
        elif scope["method"] not in ("GET", "HEAD"):
            await respond(send, 405, _PLAIN, b"GET or HEAD is allowed.\n", ((b"allow", b"GET, HEAD"),))
        elif path == "/healthz":  # needs no token: it reveals nothing, and probes have none
            await respond(send, 200, _PLAIN, b"live\n")
        elif path == "/readyz":
            reason = readiness()
            # Needs no token either: `deploy status` asks through the Kubernetes API server, which forwards none.
            status, text = (200, f"ready\nversion {version()}") if reason is None else (503, reason)
            await respond(send, status, _PLAIN, f"{text}\n".encode())
        else:
            try:
                auth.check(dict(scope["headers"]).get(b"authorization"))
            except RequestRefused as refused:
                await respond(send, 401, _PLAIN, f"{refused}\n".encode(), ((b"www-authenticate", b"Bearer"),))
            else:
                await respond(send, 200, _TEXT, await metrics())

    return app
