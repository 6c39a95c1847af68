"""Authorization: who may read and who may act.

Actions always need the bearer token. Reading needs it too if other machines can reach the studio, or if a token is set
for it or for the server behind it: what the server denies to others must not be available here. Otherwise everyone on
this machine may read. The Host header of a request must be a name of this machine, which prevents DNS rebinding.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from clickline.config.value_types import is_loopback
from clickline.errors import ClicklineError
from clickline.serving.auth import read_token

TOKEN_FILE = "studio-token"
_TICKET_SECONDS = 60
_PAGE = "default-src 'self'; frame-ancestors 'self'; base-uri 'none'; form-action 'none'; object-src 'none'"
REPORT = (  # a sandboxed page with inline scripts: it can access neither the studio nor the network
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
    "font-src data:; frame-ancestors 'self'; sandbox allow-scripts allow-downloads"
)

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Any, Any], Awaitable[None]]


class StudioToken:
    """The bearer token and its file."""

    def __init__(self, value: str, file: Path) -> None:
        self.value = value
        self.file = file

    def matches(self, authorization: str | None) -> bool:
        scheme, _, given = (authorization or "").partition(" ")
        is_equal = hmac.compare_digest(given.strip().encode(), self.value.encode())
        return scheme.lower() == "bearer" and is_equal


def studio_token(token_file: str | None, home: Path) -> StudioToken:
    """The first line of the token file; by default of a file in the home, which is created if it does not exist."""
    file = home / TOKEN_FILE if token_file is None else Path(token_file)
    try:
        if token_file is None and not file.exists():
            _create(file)
    except OSError as error:
        raise ClicklineError(
            f"studio.token_file {file} cannot be created: {error.strerror or error}."
        ) from error
    return StudioToken(read_token(str(file), "studio") or "", file)


def _create(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    hidden = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    handle = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(handle, f"{secrets.token_urlsafe(32)}\n".encode())
        os.close(handle)
        os.link(hidden, file)  # if another process was faster, its token counts
    except FileExistsError:
        pass
    finally:
        hidden.unlink()


class Access:
    """Decides what a request may do."""

    def __init__(self, token: StudioToken | None, host: str, *, protected: bool = False) -> None:
        """Without a `token` no actions are possible. `protected`: reading needs the token on loopback too."""
        self.token = token
        self._loopback = is_loopback(host)
        self._open = self._loopback and not protected
        self._names = {"localhost", "127.0.0.1", "[::1]", f"[{host}]" if ":" in host else host}
        self._key = secrets.token_bytes(32)

    def is_own_host(self, host: str) -> bool:
        """Whether a Host header names this machine; on other addresses any name is accepted, as the token is needed."""
        name = re.sub(r":\d+$", "", host.lower())
        return not self._loopback or name in self._names

    def may_read(self, authorization: str | None, ticket: str = "") -> bool:
        return self._open or self.may_act(authorization) or self._is_ticket(ticket)

    def may_act(self, authorization: str | None) -> bool:
        return self.token is not None and self.token.matches(authorization)

    @property
    def refusal(self) -> str:
        """The error message for a request without the token."""
        file = "the file that studio.token_file names"  # paths are not disclosed to other machines
        if self.token is not None and self._loopback:
            file = str(self.token.file)
        return (
            "the bearer token is missing or wrong. Send `authorization: Bearer TOKEN`; "
            f"the token is the first line of {file}."
        )

    def ticket(self) -> dict[str, Any]:
        """A pass of one minute for what cannot send a header: a link, an EventSource."""
        until = str(int(time.time()) + _TICKET_SECONDS)
        return {"ticket": f"{until}.{self._signed(until)}", "seconds": _TICKET_SECONDS}

    def _is_ticket(self, ticket: str) -> bool:
        until, _, signature = ticket.partition(".")
        is_valid = hmac.compare_digest(signature.encode(), self._signed(until).encode())
        return is_valid and until.isdigit() and time.time() <= int(until)

    def _signed(self, text: str) -> str:
        return hmac.new(self._key, text.encode(), "sha256").hexdigest()


class AccessMiddleware:
    """ASGI middleware that checks access and adds security headers to responses."""

    def __init__(self, app: App, access: Access, refuse: Callable[[int, str], App]) -> None:
        self._app = app
        self._access = access
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        is_api = scope["path"].startswith("/api/")

        async def send_with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                present = {name.lower() for name, _ in message["headers"]}
                added = {
                    b"content-security-policy": _PAGE.encode(),
                    b"x-content-type-options": b"nosniff",
                    b"referrer-policy": b"no-referrer",
                    b"cross-origin-resource-policy": b"same-origin",
                    b"cache-control": b"no-store" if is_api else b"no-cache",
                }
                message["headers"] = [
                    *message["headers"],
                    *((name, value) for name, value in added.items() if name not in present),
                ]
            await send(message)

        app = self._app
        ticket = ""  # of a link: it only reads, and cannot get another ticket
        if scope["method"] in ("GET", "HEAD"):
            query = scope.get("query_string", b"").decode("latin-1")
            ticket = parse_qs(query).get("ticket", [""])[0]
        if not self._access.is_own_host(headers.get(b"host", "")):
            app = self._refuse(403, "this host name is not allowed. Use 127.0.0.1 or localhost.")
        elif is_api and not self._access.may_read(headers.get(b"authorization"), ticket):
            app = self._refuse(401, self._access.refusal)
        await app(scope, receive, send_with_headers)
