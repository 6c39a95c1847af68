"""`Client` and `AsyncClient`: the same questions, waited for or awaited.

    rows ──as_table──▶ columns ──protocol──▶ Ask ──transport──▶ Reply ──decode──▶ Prediction

Only how an `Ask` is sent differs between the two; gRPC, HTTP and protobuf are imported when a client is made.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from ssl import SSLContext
from types import TracebackType
from typing import Any, Literal, Protocol, Self, TypeVar, get_args

from clickline.client.columnar import Rows, Table, as_table
from clickline.client.request import Address, Ask, Attempts, Failed, Reply
from clickline.client.results import ModelInfo, Prediction, Ranking
from clickline.errors import ClicklineError, ConfigError, Mistake, RequestRefused

ProtocolName = Literal["grpc", "http", "v2-grpc", "v2-http", "elasticctr"]
"""TensorFlow Serving over gRPC or REST, the Open Inference Protocol over either, ElasticCTR's over HTTP."""

Answer = TypeVar("Answer")


class _Asks(Protocol):
    """What a protocol can say."""

    def predict(self, table: Table, version: int | None) -> Ask[Prediction]: ...
    def rank(self, context: Table | None, candidates: Table, top: int | None) -> Ask[Ranking]: ...
    def metadata(self) -> Ask[ModelInfo]: ...
    def ready(self) -> Ask[bool]: ...


class _Questions:
    """What both clients share: everything but the call."""

    _waits = True

    def __init__(
        self,
        address: str,
        *,
        protocol: ProtocolName = "grpc",
        model: str | None = None,
        token: str | None = None,
        tls: bool | str | SSLContext = False,
        timeout: float = 10.0,
        retries: int = 2,
    ) -> None:
        """`address` is HOST:PORT. `tls` is True, or the PEM file of an authority to trust; over HTTP also a context of
        Python's ssl, for what these two cannot say. `timeout`: seconds for a request, all its tries together;
        `retries`: further tries when the server cannot be reached or has too much to do. `model` may be left out over
        gRPC; over HTTP its name is part of the path."""
        if protocol not in get_args(ProtocolName):
            allowed = ", ".join(get_args(ProtocolName))
            problem = f"is {protocol!r}; allowed: {allowed}."
            raise ConfigError([Mistake("", 0, "protocol", problem, "Name one of them.")])
        if isinstance(tls, SSLContext) and protocol in ("grpc", "v2-grpc"):
            problem = f"is an SSLContext, and protocol is {protocol}. Allowed with it: protocols over HTTP."
            raise ConfigError([Mistake("", 0, "tls", problem, "Give the PEM file of an authority.")])
        self.address = Address.of(address)
        self.retried = 0
        self._timeout = timeout
        self._retries = retries
        self._asks, transports = _parts(protocol, model)
        self._transport: Any = transports[self._waits](self.address, token, tls, timeout)

    def ask(self, rows: Rows, version: int | None = None) -> Ask[Prediction]:
        """The request for the scores of these rows; `send` sends it, any number of times."""
        if version is not None and version < 0:
            raise RequestRefused("invalid", f"version is {version}; a version's number is allowed.")
        return self._asks.predict(as_table(rows), version)

    def _ranking(self, context: Mapping[str, Any], candidates: Rows, top_k: int | None) -> Ask[Ranking]:
        if top_k is not None and not 1 <= top_k < 2**31:
            raise RequestRefused("invalid", f"top_k is {top_k}; at least 1 is allowed, or None for all.")
        shared = as_table([context]) if context else None
        return self._asks.rank(shared, as_table(candidates), top_k)

    def _decoded(self, ask: Ask[Answer], reply: Reply) -> Answer:
        try:
            return ask.decode(reply)
        except ClicklineError:
            raise
        except Exception as error:  # whatever a stranger's answer breaks
            raise ClicklineError(
                f"{self.address} answered something else than scores ({type(error).__name__}: {error}). "
                "Is it a clickline server?"
            ) from error

    @staticmethod
    def _not_ready(error: ClicklineError) -> bool:
        """Whether an error only says that the server cannot answer now."""
        return not isinstance(error, RequestRefused) or error.kind in ("unavailable", "overloaded", "late")


class Client(_Questions):
    """Asks a prediction server and waits for the answer. Safe to use from several threads, which share a connection.

    with Client("127.0.0.1:8500") as client:
        client.predict([{"I1": 3, "C1": "68fd1e64"}]).probability
    """

    def predict(self, rows: Rows, version: int | None = None) -> Prediction:
        """Scores of rows: a list of dicts, or a dict of columns. `version`: other than the current one."""
        return self.send(self.ask(rows, version))

    def rank(self, context: Mapping[str, Any], candidates: Rows, top_k: int | None = None) -> Ranking:
        """Scores of candidates that share the fields of `context`, which are sent once; or the best `top_k`."""
        return self.send(self._ranking(context, candidates, top_k))

    def metadata(self) -> ModelInfo:
        """What the model takes and gives."""
        return self.send(self._asks.metadata())

    def ready(self) -> bool:
        """Whether the server has a version that answers; also False if it cannot be reached."""
        try:
            return self.send(self._asks.ready(), retries=0)
        except ClicklineError as error:
            if self._not_ready(error):
                return False
            raise

    def send(self, ask: Ask[Answer], *, retries: int | None = None) -> Answer:
        attempts = Attempts(self._timeout, self._retries if retries is None else retries)
        while True:
            try:
                return self._decoded(ask, self._transport.call(ask, attempts.left))
            except Failed as failed:
                pause = attempts.pause(failed)
                if pause is None:
                    raise failed.error from failed.__cause__
            self.retried += 1
            time.sleep(pause)

    def close(self) -> None:
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient(_Questions):
    """The same for asyncio. Requests that run at once share a connection.

    async with AsyncClient("127.0.0.1:8500") as client:
        (await client.predict([{"I1": 3, "C1": "68fd1e64"}])).probability
    """

    _waits = False

    async def predict(self, rows: Rows, version: int | None = None) -> Prediction:
        return await self.send(self.ask(rows, version))

    async def rank(self, context: Mapping[str, Any], candidates: Rows, top_k: int | None = None) -> Ranking:
        return await self.send(self._ranking(context, candidates, top_k))

    async def metadata(self) -> ModelInfo:
        return await self.send(self._asks.metadata())

    async def ready(self) -> bool:
        try:
            return await self.send(self._asks.ready(), retries=0)
        except ClicklineError as error:
            if self._not_ready(error):
                return False
            raise

    async def send(self, ask: Ask[Answer], *, retries: int | None = None) -> Answer:
        attempts = Attempts(self._timeout, self._retries if retries is None else retries)
        while True:
            try:
                return self._decoded(ask, await self._transport.call(ask, attempts.left))
            except Failed as failed:
                pause = attempts.pause(failed)
                if pause is None:
                    raise failed.error from failed.__cause__
            self.retried += 1
            await asyncio.sleep(pause)

    async def close(self) -> None:
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _parts(protocol: ProtocolName, model: str | None) -> tuple[_Asks, dict[bool, Any]]:
    """What is said, and the transports that carry it: the one that waits, and the other."""
    try:
        if protocol.endswith("grpc"):
            from clickline.client.grpc_codec import InferenceGrpc, TfServingGrpc
            from clickline.client.grpc_transport import AsyncGrpc, Grpc

            spoken = InferenceGrpc if protocol == "v2-grpc" else TfServingGrpc
            return spoken(model), {True: Grpc, False: AsyncGrpc}
        from clickline.client.http_codec import InferenceHttp, TfServingHttp
        from clickline.client.http_transport import AsyncHttp, Http

        transports = {True: Http, False: AsyncHttp}
        if protocol == "elasticctr":
            from clickline.client.elasticctr_codec import ElasticCtr

            return ElasticCtr(model), transports
        return (InferenceHttp if protocol == "v2-http" else TfServingHttp)(model), transports
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("clickline"):
            raise
        raise ClicklineError(
            f"the client needs the package {error.name}: pip install 'clickline[client]'"
        ) from error
