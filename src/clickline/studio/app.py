"""The studio's web application: the page and its JSON API."""

from __future__ import annotations

import asyncio
import json
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
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
from clickline.studio.events import EventBroadcaster
from clickline.studio.home_view import HomeView, NotFound, SlowAnswer
from clickline.studio.homes import Home
from clickline.studio.json_response import encode_json
from clickline.studio.openapi import ApiRoute, openapi
from clickline.studio.studio_auth import REPORT, Access, AccessMiddleware

if TYPE_CHECKING:
    from clickline.studio.playground import Playground

PAGE = Path(__file__).with_name("page")
_MAX_BODY = 2**20
_LINES = 200

Handler = Callable[["_HomeContext", Request], Awaitable[Any]]


class _HomeContext:
    """One home and the objects that answer requests about it."""

    def __init__(self, home: Home, *secrets: str) -> None:
        self.home = home
        self.redact = home.redactor(*secrets)
        self.view = HomeView(home)
        self.events = EventBroadcaster(self.view, self.encode)
        self._playground: Playground | None = None

    def encode(self, document: Any) -> bytes:
        return encode_json(document, self.redact)

    async def playground(self) -> Playground:
        """The playground, imported on first use: it needs what serving needs, a second and a hundred megabytes."""
        return await self.view.run_once("playground", self._open_playground)

    def _open_playground(self) -> Playground:
        from clickline.studio.playground import Playground

        if self._playground is None:
            self._playground = Playground(self.home.config, self.view)
        return self._playground

    async def close(self) -> None:
        await self.view.serving.close()
        if self._playground is not None:
            self._playground.close()


class _Files(Mount):
    """The files of the page: every path outside the API, whose routes define their own methods."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        return (Match.NONE, {}) if scope["path"].startswith("/api/") else super().matches(scope)


class Studio:
    """All homes behind one address."""

    def __init__(self, homes: Sequence[Home], access: Access) -> None:
        secrets = [] if access.token is None else [access.token.value]
        self._homes_by_id = {home.id: _HomeContext(home, *secrets) for home in homes}
        self._access = access

    def app(self) -> AccessMiddleware:
        """The ASGI application."""
        page = _Files("/", StaticFiles(directory=PAGE, html=True))
        handlers: Mapping[Any, Any] = {HTTPException: _refused, Exception: _bug}
        inner = Starlette(routes=[*self.routes(), page], exception_handlers=handlers, lifespan=self._lifespan)
        return AccessMiddleware(GZipMiddleware(inner, compresslevel=5), self._access, _error_response)

    def routes(self) -> list[Route]:
        """The routes of the API."""
        return [Route(one.path, one.handler, methods=[one.method]) for one in self._endpoints()]

    def _endpoints(self) -> list[ApiRoute]:
        home = "/api/homes/{home}"
        actions = [
            ApiRoute("POST", f"/actions/{action}", "Moved", summary, self._action(action), "MoveRequest", token=True)
            for action, summary in ACTIONS.items()
        ]  # fmt: skip
        return [
            ApiRoute("GET", "/api/openapi.json", "Document", "This document.", self._openapi),
            ApiRoute("POST", "/api/ticket", "Ticket", _TICKET, self._ticket),
            ApiRoute("GET", "/api/homes", "Homes", "All homes.", self._homes),
            *(
                replace(one, path=f"{home}{one.path}", handler=self._of_home(one.handler))
                for one in (*_HOME_ENDPOINTS, *actions)
            ),
        ]

    @property
    def is_busy(self) -> bool:
        """Whether a slow task is still running."""
        return any(context.view.is_busy for context in self._homes_by_id.values())

    def close(self) -> None:
        """End the event streams, which never end by themselves."""
        for context in self._homes_by_id.values():
            context.events.close()

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        yield
        self.close()
        for context in self._homes_by_id.values():
            await context.close()

    # ── all homes ──────────────────────────────────────────────────────────────────────────────

    async def _homes(self, request: Request) -> Response:
        async def line(context: _HomeContext) -> bytes:
            home = context.home
            try:
                state = await context.view.state()
            except SlowAnswer:
                state = "unknown"
            about = {"name": home.name, "home": home.config.home, "config": home.file, "state": state}
            return context.encode({"id": home.id, **about})

        lines = await asyncio.gather(*map(line, self._homes_by_id.values()))
        return Response(b"[" + b",".join(lines) + b"]", media_type="application/json")

    async def _openapi(self, request: Request) -> Response:
        return _json(json.dumps(openapi(self._endpoints())).encode())

    async def _ticket(self, request: Request) -> Response:
        return _json(json.dumps(self._access.ticket()).encode())

    # ── one home ───────────────────────────────────────────────────────────────────────────────

    def _of_home(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            context = self._homes_by_id.get(request.path_params["home"])
            if context is None:
                return _error_response(
                    404, f"there is no such home. Available: {', '.join(self._homes_by_id)}."
                )
            try:
                result = await handler(context, request)
                if isinstance(result, Response):
                    return result
                return _json(await asyncio.to_thread(context.encode, result))
            except ClicklineError as error:
                return _error_response(_status_of(error), context.redact(str(error)))
            except OSError as error:  # a problem of the machine: no permission, a full disk
                return _error_response(
                    503, context.redact(f"{error.filename or 'this machine'}: {error.strerror or error}")
                )

        return answer

    def _action(self, action: str) -> Handler:
        async def run(context: _HomeContext, request: Request) -> Any:
            if not self._access.may_act(request.headers.get("authorization")):
                raise RequestRefused("unauthenticated", self._access.refusal)
            body = await _body(request)
            view = context.view

            def work() -> dict[str, Any]:
                return act(view.versions.registry, action, body)

            return await asyncio.to_thread(work)

        return run


async def _run(context: _HomeContext, request: Request) -> Any:
    name = request.path_params["run"]
    return _found_or_404(await context.view.run_once(f"run {name}", lambda: context.view.runs.report(name)))


async def _curve(context: _HomeContext, request: Request) -> Any:
    name = request.path_params["run"]
    return _found_or_404(await context.view.run_once(f"curve {name}", lambda: context.view.runs.curve(name)))


async def _report(context: _HomeContext, request: Request) -> Any:
    name = request.path_params["run"]
    page = await context.view.run_once(f"page {name}", lambda: context.view.runs.page(name))
    return FileResponse(
        _found_or_404(page), media_type="text/html", headers={"content-security-policy": REPORT}
    )


async def _diff(context: _HomeContext, request: Request) -> Any:
    first, second = (_number(request, name) for name in ("a", "b"))
    view = context.view
    return await view.run_once(f"diff {first} {second}", lambda: view.versions.diff(first, second))


async def _form(context: _HomeContext, request: Request) -> Any:
    return await (await context.playground()).form()


async def _try(context: _HomeContext, request: Request) -> Any:
    body = await _body(request)
    return await (await context.playground()).predict(body)


async def _logs(context: _HomeContext, request: Request) -> Any:
    lines = _number(request, "tail", _LINES)
    text = await context.view.log(request.path_params["stage"], lines)
    return PlainTextResponse("".join(map(context.redact, text.splitlines(keepends=True))))


async def _events(context: _HomeContext, request: Request) -> Any:
    return StreamingResponse(
        context.events.stream(), media_type="text/event-stream", headers={"x-accel-buffering": "no"}
    )


# ── requests and responses ─────────────────────────────────────────────────────────────────────


_HOME_ENDPOINTS = (
    ApiRoute("GET", "/status", "Status", "The document of `clickline status --json`.", lambda c, _: c.view.status()),
    ApiRoute("GET", "/runs", "Runs", "Training runs, most recently active first.", lambda c, _: c.view.list_runs()),
    ApiRoute("GET", "/runs/{run}", "Run", "The report of a run with its learning curve.", _run),
    ApiRoute("GET", "/runs/{run}/report.html", "text/html", "The HTML report of a run.", _report),
    ApiRoute("GET", "/runs/{run}/curve", "Curve", "The learning curve of a run.", _curve),
    ApiRoute("GET", "/versions", "Versions", "Versions and history, newest first.", lambda c, _: c.view.all_versions()),
    ApiRoute("GET", "/versions/diff", "Difference", "The differences between two versions.", _diff,
             query={"a": True, "b": True}),
    ApiRoute("GET", "/serving", "Serving", "Metrics of the live server, scraped once a second while someone watches.",
             lambda c, _: c.events.serving()),
    ApiRoute("GET", "/data", "Data", "The dataset, the hours oldest first, and quarantined rows.",
             lambda c, _: c.view.all_data()),
    ApiRoute("GET", "/cluster", "Cluster", "Training on a cluster; null if there is none.",
             lambda c, _: c.view.cluster()),
    ApiRoute("GET", "/form", "Form", "The fields and example rows of the playground.", _form),
    ApiRoute("POST", "/try", "Tried", "Score rows with the live server.", _try, body="Try"),
    ApiRoute("GET", "/logs/{stage}", "text/plain", "The last lines of a log.", _logs, query={"tail": False}),
    ApiRoute("GET", "/events", "text/event-stream",
             "Events: status, serving, and runs, versions, data when they have changed.", _events),
)  # fmt: skip
_TICKET = "A pass of one minute, as ?ticket=…, for links and EventSource if reading needs the token."


def _found_or_404(result: Any) -> Any:
    if result is None:
        raise NotFound("there is no such run, or it has no such file yet.")
    return result


def _number(request: Request, name: str, default: int | None = None) -> int:
    text = request.query_params.get(name, "" if default is None else str(default))
    if not (text.isascii() and text.isdigit() and len(text) <= 15):
        raise RequestRefused("invalid", f"{name} is {text[:40]!r}; a whole number is allowed.")
    return int(text)


async def _body(request: Request) -> dict[str, Any]:
    """The JSON body; other content types, which a form of another page could send, are rejected."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise RequestRefused("invalid", "the content type is not application/json; only that is allowed.")
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > _MAX_BODY:
            raise RequestRefused("invalid", f"the request is larger than {_MAX_BODY:,} bytes.")
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestRefused("invalid", f"the request is not JSON: {error}.") from error
    if not isinstance(document, dict):
        raise RequestRefused(
            "invalid", "the request is not a JSON object; only an object with fields is allowed."
        )
    return document


def _status_of(error: ClicklineError) -> int:
    if isinstance(error, RequestRefused):
        return {"invalid": 400, "unauthenticated": 401}.get(error.kind, 503)
    if isinstance(error, NotFound):
        return 404
    if isinstance(error, SlowAnswer):
        return 504
    return 503 if isinstance(error, StorageError) or type(error) is ClicklineError else 409


def _json(body: bytes, status: int = 200) -> Response:
    return Response(body, status, media_type="application/json")


def _error_response(status: int, message: str) -> Response:
    response = _json(json.dumps({"error": message}).encode(), status)
    if status == 401:
        response.headers["www-authenticate"] = "Bearer"
    return response


async def _refused(request: Request, error: HTTPException) -> Response:
    """An error of the router: unknown path or wrong method."""
    status = error.status_code
    allowed = (error.headers or {}).get("Allow", "GET, HEAD")  # files of the page name none
    messages = {404: "not found.", 405: f"this method is not allowed here. Allowed: {allowed}."}
    response = _error_response(status, messages.get(status, str(error.detail)))
    if status == 405:
        response.headers["allow"] = allowed
    return response


async def _bug(request: Request, error: Exception) -> Response:
    traceback.print_exception(error)
    return _error_response(
        500, f"this is a bug in Clickline: {type(error).__name__}. See the log for details."
    )
