"""A studio whose homes are in states that are hard to reach for real: a double of the JSON API, one home a scenario.

`python tests/studio/page/fake_api.py [PORT]` shows all of them at http://127.0.0.1:8599/.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from fake_homes import DIFF, SCENARIOS, FakeHome, ago, curve, report, scored
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import (
    FileResponse,
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route

PAGE = Path(__file__).parents[3] / "src" / "clickline" / "studio" / "page"
TOKEN = "a-token-of-sixteen-letters"
_CSP = "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"


def application(homes: list[FakeHome], closing: threading.Event, *, guarded: bool = False) -> Starlette:
    """The API of the studio over these homes; `guarded`: reading needs the token too."""
    known = {home.id: home for home in homes}

    def guard(answer: Callable[[Request], Any]) -> Callable[[Request], Any]:
        async def asked(request: Request) -> Response:
            if guarded and request.headers.get("authorization") != f"Bearer {TOKEN}":
                return refuse(401, "The token is missing or wrong.")
            if "home" in request.path_params and request.path_params["home"] not in known:
                return refuse(404, f"No home is called {request.path_params['home']}.")
            found: Response | Awaitable[Response] = answer(request)
            return found if isinstance(found, Response) else await found

        return asked

    def refuse(code: int, words: str) -> Response:
        return JSONResponse({"error": words}, code)

    def home_of(request: Request) -> FakeHome:
        return known[request.path_params["home"]]

    def simple(tell: Callable[[FakeHome], Any]) -> Callable[[Request], Response]:
        return lambda request: JSONResponse(tell(home_of(request)))

    def place(home: FakeHome, run: str) -> int | None:
        return next((n for n, one in enumerate(home.runs) if one["run"] == run), None)

    def one_run(request: Request) -> Response:
        home, run = home_of(request), request.path_params["run"]
        n = place(home, run)
        return (
            refuse(404, f"There is no run {run}.")
            if n is None
            else JSONResponse(report(run, n, home.runs[n]["state"]))
        )

    def one_curve(request: Request) -> Response:
        home, run = home_of(request), request.path_params["run"]
        n = place(home, run)
        if n is None:
            return refuse(404, f"There is no run {run}.")
        return JSONResponse(curve(n, share=home.share() if home.runs[n]["state"] == "training" else 1.0))

    def one_form(request: Request) -> Response:
        home = home_of(request)
        if home.form is None:
            return JSONResponse(
                {
                    "fields": [],
                    "examples": [],
                    "version": None,
                    "error": "No server answers here: there is no live version to ask.",
                }
            )
        return JSONResponse(home.form | {"version": home.versions["current"]})

    def diff(request: Request) -> Response:
        a, b = int(request.query_params["a"]), int(request.query_params["b"])
        return JSONResponse({"versions": [a, b], **DIFF})

    async def tried(request: Request) -> Response:
        home, body = home_of(request), await request.json()
        if "boom" in json.dumps(body["rows"]):
            return refuse(400, "I1 is 'boom', not a number. Give a number or leave it out.")
        rows: list[dict[str, Any]] = []
        for row in body["rows"]:
            score = scored(row)
            parts: list[dict[str, Any]] = [
                {"column": key, "without": scored({k: v for k, v in row.items() if k != key})} for key in row
            ]
            for part in parts:
                part["change"] = score - part["without"]
            parts.sort(key=lambda part: -abs(part["change"]))
            rows.append(
                {
                    "probability": score,
                    "previous": {"version": home.versions["current"] - 1, "probability": scored(row, 0.08)},
                    "contributions": parts,
                }
            )
        order = sorted(range(len(rows)), key=lambda n: -rows[n]["probability"])
        return JSONResponse(
            {"version": home.versions["current"], "rows": rows, "ranking": order, "latency_ms": 3.4}
        )

    async def acted(request: Request) -> Response:
        home, verb = home_of(request), request.path_params["verb"]
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            return refuse(401, "The token is missing or wrong.")
        body = await request.json()
        if not body.get("reason"):
            return refuse(400, "A reason is required.")
        known_versions = home.versions
        target = body.get("version") or known_versions["previous"]
        if verb != "unpin":
            known_versions |= {"previous": known_versions["current"], "current": target}
        known_versions["pinned"] = verb == "pin"
        for one in known_versions["list"]:
            one["state"] = [
                *(["current"] if one["version"] == known_versions["current"] else []),
                *(
                    ["pinned"]
                    if one["version"] == known_versions["current"] and known_versions["pinned"]
                    else []
                ),
                *(["previous"] if one["version"] == known_versions["previous"] else []),
            ]
        move = {
            "sequence": len(known_versions["moves"]) + 1,
            "version": known_versions["current"],
            "reason": body["reason"],
            "at": ago(0),
            "pinned": known_versions["pinned"],
            "by": "studio",
        }
        known_versions["moves"].insert(0, move)
        home.changed.append("versions")
        return JSONResponse({"current": known_versions["current"], "sequence": move["sequence"]})

    def heard(request: Request) -> Response:
        home = home_of(request)

        async def tell() -> AsyncIterator[str]:
            last: Any = None
            while not closing.is_set():
                now = home.status()
                if _still(now) != last:
                    last = _still(now)
                    yield f"event: status\ndata: {json.dumps(now)}\n\n"
                current = home.serving()
                if current["alive"]:
                    yield f"event: serving\ndata: {json.dumps(current['history'][-1])}\n\n"
                while home.changed:
                    yield f'event: {home.changed.pop()}\ndata: {{"changed": true}}\n\n'
                yield ": still here\n\n"
                await asyncio.sleep(0.3)

        return StreamingResponse(
            tell(), media_type="text/event-stream", headers={"Cache-Control": "no-store"}
        )

    def listed(_: Request) -> Response:
        return JSONResponse(
            [
                {
                    "id": home.id,
                    "name": home.name,
                    "home": f"/srv/{home.name}/.clickline",
                    "config": f"/srv/{home.name}/clickline.yaml",
                    "state": home.state(),
                }
                for home in homes
            ]
        )

    def page(_: Request) -> Response:
        return FileResponse(
            PAGE / "index.html", headers={"Content-Security-Policy": _CSP, "Cache-Control": "no-cache"}
        )

    def static(request: Request) -> Response:
        file = PAGE / Path(request.path_params["file"]).name
        if not file.is_file():
            return refuse(404, "There is no such file.")
        return FileResponse(
            file,
            headers={
                "Content-Security-Policy": _CSP,
                "Cache-Control": "no-cache",
                "X-Content-Type-Options": "nosniff",
            },
        )

    at = "/api/homes/{home}"
    return Starlette(
        routes=[
            Route("/", page),
            Route("/api/homes", guard(listed)),
            Route(f"{at}/status", guard(simple(lambda home: home.status()))),
            Route(f"{at}/runs", guard(simple(lambda home: home.runs))),
            Route(f"{at}/runs/{{run}}", guard(one_run)),
            Route(f"{at}/runs/{{run}}/curve", guard(one_curve)),
            Route(
                f"{at}/runs/{{run}}/report.html",
                guard(
                    lambda _: HTMLResponse(
                        "<!doctype html><html lang=en><title>Report</title><h1>Report</h1>"
                    )
                ),
            ),
            Route(f"{at}/versions", guard(simple(lambda home: home.versions))),
            Route(f"{at}/versions/diff", guard(diff)),
            Route(f"{at}/serving", guard(simple(lambda home: home.serving()))),
            Route(f"{at}/data", guard(simple(lambda home: home.data))),
            Route(f"{at}/cluster", guard(simple(lambda home: home.status()["cluster"]))),
            Route(f"{at}/form", guard(one_form)),
            Route(f"{at}/try", guard(tried), methods=["POST"]),
            Route(f"{at}/actions/{{verb}}", guard(acted), methods=["POST"]),
            Route(
                f"{at}/logs/{{stage}}",
                guard(lambda request: PlainTextResponse("\n".join(home_of(request).log))),
            ),
            Route(f"{at}/events", guard(heard)),
            Route(
                "/api/ticket", guard(lambda _: JSONResponse({"ticket": "t", "seconds": 60})), methods=["POST"]
            ),
            Route("/{file}", static),
        ]
    )


def _still(status: dict[str, Any]) -> str:
    """What of a status counts as a change: not the times that this double makes up anew."""
    return json.dumps(
        [
            status["state"],
            status["stage"],
            status["work"],
            status["versions"]["current"],
            status["health"],
            [one["state"] for one in status["stages"].values()],
        ]
    )


@contextmanager
def fake_studio(homes: list[FakeHome], *, guarded: bool = False, port: int = 0) -> Iterator[tuple[str, int]]:
    """Serves until left: the base URL and the port."""
    closing = threading.Event()
    listener = socket.create_server(("127.0.0.1", port))
    port = listener.getsockname()[1]
    server = uvicorn.Server(
        uvicorn.Config(
            application(homes, closing, guarded=guarded),
            log_level="critical",
            lifespan="off",
            timeout_graceful_shutdown=1,
        )
    )
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])), name="fake studio")
    thread.start()
    deadline = time.monotonic() + 10
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port}/", port
    finally:
        closing.set()
        server.should_exit = True
        thread.join(10)
        listener.close()


if __name__ == "__main__":
    with fake_studio(
        [make() for make in SCENARIOS.values()], port=int(sys.argv[1]) if len(sys.argv) > 1 else 8599
    ):
        threading.Event().wait()
