"""The admin port: /metrics for Prometheus, /healthz and /readyz for whoever keeps the service running."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from clickline.errors import RequestRefused
from clickline.serving.auth import Guard
from clickline.serving.http_server import respond

_TEXT = b"text/plain; version=0.0.4; charset=utf-8"
_PLAIN = b"text/plain; charset=utf-8"


def admin_app(
    guard: Guard,
    metrics: Callable[[], Awaitable[bytes]],
    readiness: Callable[[], str | None],
    version: Callable[[], int | None],
) -> Callable[..., Awaitable[None]]:
    """An ASGI application. `readiness` says what is missing, None when nothing is; `version` what answers then."""

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        path = scope["path"]
        if path not in ("/healthz", "/readyz", "/metrics"):
            await respond(send, 404, _PLAIN, b"There is /metrics, /healthz and /readyz.\n")
        elif scope["method"] not in ("GET", "HEAD"):
            await respond(send, 405, _PLAIN, b"GET or HEAD is allowed.\n", ((b"allow", b"GET, HEAD"),))
        elif path == "/healthz":  # without a token: it tells nothing, and probes have none
            await respond(send, 200, _PLAIN, b"live\n")
        elif path == "/readyz":
            missing = readiness()
            # Without a token, as /healthz: the API server of Kubernetes asks for `deploy status`, and passes none on.
            status, words = (200, f"ready\nversion {version()}") if missing is None else (503, missing)
            await respond(send, status, _PLAIN, f"{words}\n".encode())
        else:
            try:
                guard.check(dict(scope["headers"]).get(b"authorization"))
            except RequestRefused as refused:
                await respond(send, 401, _PLAIN, f"{refused}\n".encode(), ((b"www-authenticate", b"Bearer"),))
            else:
                await respond(send, 200, _TEXT, await metrics())

    return app
