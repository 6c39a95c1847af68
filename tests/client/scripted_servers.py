"""Servers that follow a script: each request is answered by its next step."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np
from server_double import MODEL, Scores

from clickline.client import AsyncClient, Client
from clickline.serving.protocols.http_common import Route
from clickline.serving.protocols.http_routes import route
from clickline.serving.protocols.request import Limits, Request, Response
from clickline.serving.protocols.tfserving_grpc import Predict
from servers.serving import QuietHandler, served


def _answered(request: Request) -> Response:
    request.read_target()
    rows = request.decode(MODEL).rows.rows
    return request.encode(Scores(12, np.full(rows, 0.5, np.float32), np.full(rows, 0.75, np.float32)))


class Script:
    """What happens to each request: a status and body, or None for an answer. After the last step, all are answered."""

    def __init__(self, *steps: tuple[Any, str] | None) -> None:
        self.steps = list(steps)
        self.received: list[dict[str, str]] = []  # metadata or headers of each request
        self.gate: threading.Event | None = None  # requests wait for it

    def next(self, metadata: dict[str, str]) -> tuple[Any, str] | None:
        self.received.append(metadata)
        if self.gate is not None:
            self.gate.wait(30)
        return self.steps.pop(0) if self.steps else None


@contextmanager
def grpc_server(script: Script, port: int = 0) -> Iterator[str]:
    def predict(body: bytes, context: Any) -> bytes:
        step = script.next({key: str(value) for key, value in context.invocation_metadata()})
        if step is not None:
            context.abort(*step)
        return _answered(Predict(body, Limits())).body

    class Methods(grpc.GenericRpcHandler):
        def service(self, details: Any) -> Any:
            known = details.method == "/tensorflow.serving.PredictionService/Predict"
            return grpc.unary_unary_rpc_method_handler(predict) if known else None

    with ThreadPoolExecutor(4) as pool:
        server = grpc.server(
            pool, handlers=[Methods()], options=[("grpc.max_receive_message_length", 1 << 20)]
        )
        port = server.add_insecure_port(f"127.0.0.1:{port}")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            if script.gate is not None:
                script.gate.set()
            server.stop(None).wait(10)


@contextmanager
def http_server(script: Script, **headers: str) -> Iterator[str]:
    class Handler(QuietHandler):
        def do_POST(self) -> None:
            sent = self.body()
            step = script.next({key.lower(): value for key, value in self.headers.items()})
            if step is not None:
                status, body = step
                if status is None:  # close the connection without an answer
                    self.close_connection = True
                    return
                self.answer(status, body.encode(), **headers)
                return
            found = route("POST", self.path)
            assert isinstance(found, Route)
            names = {name.lower().encode(): value.encode() for name, value in self.headers.items()}
            reply = _answered(found.request(sent, names, Limits()))
            self.answer(reply.status, reply.body, **{n.decode(): v.decode() for n, v in reply.headers})

    with served(Handler) as port:
        try:
            yield f"127.0.0.1:{port}"
        finally:
            if script.gate is not None:
                script.gate.set()


def free_port() -> int:
    """A port that no process listens on."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        return port


@contextmanager
def silent_port() -> Iterator[str]:
    """Accepts connections and never answers."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        bound.listen()
        yield f"127.0.0.1:{bound.getsockname()[1]}"


class ClientRunner:
    """Runs the same call with a blocking or an async client."""

    def __init__(self, blocking: bool) -> None:
        self.blocking = blocking
        self.retried = 0  # by the client that was used last
        self.attempts = 0

    def __call__(self, address: str, call: Callable[[Any], Any], **options: Any) -> Any:
        """The result of `call(client)`."""
        if self.blocking:
            with Client(address, **options) as client:
                try:
                    return call(client)
                finally:
                    self.retried = client.retried

        async def run() -> Any:
            async with AsyncClient(address, **options) as client:
                try:
                    return await call(client)
                finally:
                    self.retried = client.retried

        return asyncio.run(run())
