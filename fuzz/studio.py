"""The studio's API: any request gets a documented answer, never an internal error."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from clickline.studio.app import Studio
from clickline.studio.homes import open_homes
from clickline.studio.studio_auth import Access, AccessMiddleware, StudioToken
from fuzz.manifests import make_version
from fuzz.target import HOSTILE, Choices, Target, mutated, scratch

_BELOW = "/api/homes/home"
_PATHS = (
    "/api/homes",
    "/api/openapi.json",
    "/api/ticket",
    *(f"{_BELOW}/{what}" for what in ("status", "runs", "versions", "serving", "data", "cluster", "form")),
    f"{_BELOW}/runs/a",
    f"{_BELOW}/runs/a/report.html",
    f"{_BELOW}/runs/a/curve",
    f"{_BELOW}/versions/diff",
    f"{_BELOW}/logs/train",
    f"{_BELOW}/events",
    "/",
    "/index.html",
)
_POSTS = tuple(
    f"{_BELOW}/{what}"
    for what in ("try", "actions/rollback", "actions/promote", "actions/pin", "actions/unpin")
)
_QUERIES = (
    b"",
    b"a=1&b=2",
    b"a=1&b=1",
    b"tail=5",
    b"tail=-1",
    b"ticket=1.2",
    b"a=%F0&b=\xff",
    b"tail=" + b"9" * 40,
)
_DOCUMENTS: tuple[dict[str, Any], ...] = (
    {"reason": "x", "version": 1},
    {"reason": "because"},
    {"rows": [{"I1": 1, "C1": "a", "C2": ["x", "y"]}], "explain": True},
)
_REPORT = {
    "checkpoint": "step-000000001",
    "evaluation": {"auc": 0.7},
    "epochs": [1],
    "gate": {"passed": True},
}
_CURVE = {"step": [1, 2], "auc": [0.5, 0.6], "loss": [0.1]}
_STATE = {"state": "running", "stages": {"train": {"state": "done", "facts": {}}}, "processes": []}


@cache
def _studio() -> tuple[asyncio.AbstractEventLoop, AccessMiddleware, Path]:
    home = scratch() / "studio" / "home"
    (home / "runs" / "a").mkdir(parents=True)
    make_version(home / "registry" / "versions" / "000000001")
    moves = home / "registry" / "moves"
    moves.mkdir()
    move = {
        "version": 1,
        "reason": "x",
        "at": "2026",
        "pinned": False,
        "by": "me",
        "before": [],
        "highest": 1,
    }
    (moves / "000000001.json").write_text(json.dumps(move))
    (home / "runs" / "a" / "report.html").write_text("<p>report")
    access = Access(StudioToken("secret", home / "studio-token"), "127.0.0.1")
    return asyncio.new_event_loop(), Studio(open_homes([], [home]), access).app(), home


async def _ask(app: AccessMiddleware, scope: dict[str, Any], body: bytes) -> tuple[int, bytes]:
    asked = [{"type": "http.request", "body": body, "more_body": False}]
    found: list[Any] = [0, b""]

    async def receive() -> dict[str, Any]:
        if not asked and not scope["path"].endswith("events"):
            await asyncio.sleep(20)  # a client that waits for its answer
        return asked.pop() if asked else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            found[0] = message["status"]
        else:
            found[1] += message.get("body", b"")

    await app(scope, receive, send)
    return found[0], found[1]


def _run(data: bytes) -> None:
    choices = Choices(data)
    loop, app, home = _studio()
    for name, document in (("report.json", _REPORT), ("curve.json", _CURVE)):
        spoil = choices.number(3)
        text = json.dumps(mutated(document, choices) if spoil else document).encode("utf-8", "surrogatepass")
        (home / "runs" / "a" / name).write_bytes(text)
    post = choices.number(3) == 1
    path = choices.one_of(_POSTS if post else _PATHS)
    query = choices.one_of(_QUERIES)
    document = mutated(choices.one_of(_DOCUMENTS), choices)
    body = json.dumps(document).encode("utf-8", "surrogatepass") if post else b""
    kind = choices.number(8)
    rest = choices.rest()
    if kind == 1:
        body = rest
    elif kind == 2:
        path += "/" + unquote(rest.decode("latin-1"))
    elif kind == 3:
        path = f"{_BELOW}/runs/{unquote(rest.decode('latin-1'))}/curve"
    elif kind == 4:
        query = rest
    headers = [
        (b"host", b"127.0.0.1"),
        (b"authorization", b"Bearer secret"),
        (b"content-type", b"application/json"),
    ]
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST" if post or path == "/api/ticket" else "GET",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode("latin-1", "replace"),
        "root_path": "",
        "query_string": query,
        "headers": headers,
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }
    status, said = loop.run_until_complete(asyncio.wait_for(_ask(app, scope, body), 30))
    assert status and status != 500, said
    assert b"root:" not in said


def _seeds() -> Sequence[bytes]:
    plain = [bytes([0, 0, 0, 0, 0, 0, n, 0]) + bytes(8) for n in range(len(_PATHS))]
    posts = [bytes([0, 0, 0, 0, 1, 0, n, 0, 0, 0, d, 0]) + bytes(4) for n in range(4) for d in range(3)]
    names = (b"../../x", b"%2e%2e%2f..", b"..", b"\xff\0")
    lost = [
        bytes([0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, kind, 0]) + name
        for kind in (2, 3, 4)
        for name in names
    ]
    reports = [
        bytes([1, 0, 1, 0, n, 0, 3, 0, h, 0]) + bytes(20) for n in range(4) for h in range(len(HOSTILE))
    ]
    return [*plain, *posts, *lost, *reports]


TARGETS = {"studio": Target(_run, _seeds)}
