"""The application: the page, and the JSON it is made from."""

from __future__ import annotations

import asyncio
import json
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Match, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from clickline.errors import ClicklineError, RequestRefused, StorageError
from clickline.studio.actions import ACTIONS, act
from clickline.studio.events import Watch
from clickline.studio.home_view import NotThere, Slow, View
from clickline.studio.homes import Home
from clickline.studio.json_response import as_answer
from clickline.studio.openapi import openapi
from clickline.studio.studio_auth import REPORT, Access, Guarded

if TYPE_CHECKING:
    from clickline.studio.playground import Trying

PAGE = Path(__file__).with_name("page")
_MOST_BODY = 2**20
_LINES = 200

Reading = Callable[["_Shown", Request], Awaitable[Any]]


class _Shown:
    """One home with all that is kept for it."""

    def __init__(self, home: Home, *secrets: str) -> None:
        self.home = home
        self.redact = home.redactor(*secrets)
        self.view = View(home)
        self.watch = Watch(self.view, self.encode)
        self._trying: Trying | None = None

    def encode(self, document: Any) -> bytes:
        return as_answer(document, self.redact)

    async def trying(self) -> Trying:
        """Imported when somebody tries: it takes what serving takes, a second and a hundred megabytes."""
        return await self.view.once("trying", self._open_trying)

    def _open_trying(self) -> Trying:
        from clickline.studio.playground import Trying

        if self._trying is None:
            self._trying = Trying(self.home.config, self.view)
        return self._trying

    async def close(self) -> None:
        await self.view.serving.close()
        if self._trying is not None:
            self._trying.close()


class _Files(Mount):
    """The page: everything that is not the API, whose own routes say which methods they allow."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        return (Match.NONE, {}) if scope["path"].startswith("/api/") else super().matches(scope)


class Studio:
    """All homes behind one address."""

    def __init__(self, homes: Sequence[Home], access: Access) -> None:
        secrets = [] if access.token is None else [access.token.value]
        self._shown = {home.id: _Shown(home, *secrets) for home in homes}
        self._access = access

    def app(self) -> Guarded:
        """For an ASGI server."""
        page = _Files("/", StaticFiles(directory=PAGE, html=True))
        handlers: Mapping[Any, Any] = {HTTPException: _refused, Exception: _bug}
        inner = Starlette(routes=[*self.routes(), page], exception_handlers=handlers, lifespan=self._lifespan)
        return Guarded(GZipMiddleware(inner, compresslevel=5), self._access, _error)

    def routes(self) -> list[Route]:
        """The API."""
        below = "/api/homes/{home}"
        get: dict[str, Reading] = {
            f"{below}/status": _status,
            f"{below}/runs": _runs,
            f"{below}/runs/{{run}}": _run,
            f"{below}/runs/{{run}}/report.html": _report,
            f"{below}/runs/{{run}}/curve": _curve,
            f"{below}/versions": _versions,
            f"{below}/versions/diff": _diff,
            f"{below}/serving": _serving,
            f"{below}/data": _data,
            f"{below}/cluster": _cluster,
            f"{below}/form": _form,
            f"{below}/logs/{{stage}}": _logs,
            f"{below}/events": _events,
        }
        post: dict[str, Reading] = {f"{below}/try": _try}
        post |= {f"{below}/actions/{action}": self._action(action) for action in ACTIONS}
        return [
            Route("/api/openapi.json", self._openapi),
            Route("/api/homes", self._homes),
            Route("/api/ticket", self._ticket, methods=["POST"]),
            *(Route(path, self._of_home(reading)) for path, reading in get.items()),
            *(Route(path, self._of_home(reading), methods=["POST"]) for path, reading in post.items()),
        ]

    @property
    def waits(self) -> bool:
        """Whether something slow is not done yet."""
        return any(shown.view.waits for shown in self._shown.values())

    def close(self) -> None:
        """End what never ends by itself."""
        for shown in self._shown.values():
            shown.watch.close()

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        yield
        self.close()
        for shown in self._shown.values():
            await shown.close()

    # ── of the whole ───────────────────────────────────────────────────────────────────────────

    async def _homes(self, request: Request) -> Response:
        async def line(shown: _Shown) -> bytes:
            home = shown.home
            try:
                state = await shown.view.state()
            except Slow:
                state = "unknown"
            about = {"name": home.name, "home": home.config.home, "config": home.file, "state": state}
            return shown.encode({"id": home.id, **about})

        lines = await asyncio.gather(*map(line, self._shown.values()))
        return Response(b"[" + b",".join(lines) + b"]", media_type="application/json")

    async def _openapi(self, request: Request) -> Response:
        return _json(json.dumps(openapi()).encode())

    async def _ticket(self, request: Request) -> Response:
        return _json(json.dumps(self._access.ticket()).encode())

    # ── of one home ────────────────────────────────────────────────────────────────────────────

    def _of_home(self, reading: Reading) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            shown = self._shown.get(request.path_params["home"])
            if shown is None:
                return _told(404, f"there is no such home. There are: {', '.join(self._shown)}.")
            try:
                found = await reading(shown, request)
                if isinstance(found, Response):
                    return found
                return _json(await asyncio.to_thread(shown.encode, found))
            except ClicklineError as error:
                return _told(_status_of(error), shown.redact(str(error)))
            except OSError as error:  # the machine's trouble: a home without permission, a full disk
                return _told(
                    503, shown.redact(f"{error.filename or 'this machine'}: {error.strerror or error}")
                )

        return answer

    def _action(self, action: str) -> Reading:
        async def run(shown: _Shown, request: Request) -> Any:
            if not self._access.may_act(request.headers.get("authorization")):
                raise RequestRefused("unauthenticated", self._access.refusal)
            asked = await _body(request)
            view = shown.view

            def work() -> dict[str, Any]:
                return act(view.versions.registry, action, asked)

            return await asyncio.to_thread(work)

        return run


async def _status(shown: _Shown, request: Request) -> Any:
    return await shown.view.status()


async def _runs(shown: _Shown, request: Request) -> Any:
    return await shown.view.list_runs()


async def _run(shown: _Shown, request: Request) -> Any:
    name = request.path_params["run"]
    return _there(await shown.view.once(f"run {name}", lambda: shown.view.runs.report(name)))


async def _curve(shown: _Shown, request: Request) -> Any:
    name = request.path_params["run"]
    return _there(await shown.view.once(f"curve {name}", lambda: shown.view.runs.curve(name)))


async def _report(shown: _Shown, request: Request) -> Any:
    name = request.path_params["run"]
    page = await shown.view.once(f"page {name}", lambda: shown.view.runs.page(name))
    return FileResponse(_there(page), media_type="text/html", headers={"content-security-policy": REPORT})


async def _versions(shown: _Shown, request: Request) -> Any:
    return await shown.view.all_versions()


async def _diff(shown: _Shown, request: Request) -> Any:
    first, second = (_number(request, name) for name in ("a", "b"))
    view = shown.view
    return await view.once(f"diff {first} {second}", lambda: view.versions.difference(first, second))


async def _serving(shown: _Shown, request: Request) -> Any:
    return await shown.watch.sampled()


async def _data(shown: _Shown, request: Request) -> Any:
    return await shown.view.all_data()


async def _cluster(shown: _Shown, request: Request) -> Any:
    return await shown.view.cluster()


async def _form(shown: _Shown, request: Request) -> Any:
    return await (await shown.trying()).form()


async def _try(shown: _Shown, request: Request) -> Any:
    asked = await _body(request)
    return await (await shown.trying()).ask(asked)


async def _logs(shown: _Shown, request: Request) -> Any:
    lines = _number(request, "tail", _LINES)
    text = await shown.view.log(request.path_params["stage"], lines)
    return PlainTextResponse("".join(map(shown.redact, text.splitlines(keepends=True))))


async def _events(shown: _Shown, request: Request) -> Any:
    return StreamingResponse(
        shown.watch.stream(), media_type="text/event-stream", headers={"x-accel-buffering": "no"}
    )


# ── requests and answers ───────────────────────────────────────────────────────────────────────


def _there(found: Any) -> Any:
    if found is None:
        raise NotThere("there is no such run, or it has no such file yet.")
    return found


def _number(request: Request, name: str, default: int | None = None) -> int:
    text = request.query_params.get(name, "" if default is None else str(default))
    if not (text.isascii() and text.isdigit() and len(text) <= 15):
        raise RequestRefused("invalid", f"{name} is {text[:40]!r}; a whole number is allowed.")
    return int(text)


async def _body(request: Request) -> dict[str, Any]:
    """A document, never anything that a form of another page could send."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise RequestRefused("invalid", "the content type is not application/json; only that is allowed.")
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > _MOST_BODY:
            raise RequestRefused("invalid", f"the request is larger than {_MOST_BODY:,} bytes.")
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestRefused("invalid", f"the request is no JSON: {error}.") from error
    if not isinstance(document, dict):
        raise RequestRefused("invalid", "the request is no JSON object; one with fields is allowed.")
    return document


def _status_of(error: ClicklineError) -> int:
    if isinstance(error, RequestRefused):
        return {"invalid": 400, "unauthenticated": 401}.get(error.kind, 503)
    if isinstance(error, NotThere):
        return 404
    if isinstance(error, Slow):
        return 504
    return 503 if isinstance(error, StorageError) or type(error) is ClicklineError else 409


def _json(body: bytes, status: int = 200) -> Response:
    return Response(body, status, media_type="application/json")


def _told(status: int, words: str) -> Response:
    answer = _json(json.dumps({"error": words}).encode(), status)
    if status == 401:
        answer.headers["www-authenticate"] = "Bearer"
    return answer


def _error(status: int, words: str) -> Any:
    return _told(status, words)


async def _refused(request: Request, error: HTTPException) -> Response:
    """What the router says: no such path, or not by this method."""
    status = error.status_code
    allowed = (error.headers or {}).get("Allow", "GET, HEAD")  # files of the page name none
    words = {404: "there is nothing here.", 405: f"this method is not allowed here: {allowed} is."}
    answer = _told(status, words.get(status, str(error.detail)))
    if status == 405:
        answer.headers["allow"] = allowed
    return answer


async def _bug(request: Request, error: Exception) -> Response:
    traceback.print_exception(error)
    return _told(500, f"this is a bug in Clickline: {type(error).__name__}. The log has the rest.")
