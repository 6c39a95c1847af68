"""`Client` and `AsyncClient`: the same requests, blocking or for asyncio.

    rows ──as_table──▶ columns ──codec──▶ PreparedRequest ──transport──▶ RawResponse ──decode──▶ Prediction

Only sending differs between the two; gRPC, HTTP and protobuf are imported when a client is created.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from ssl import SSLContext
from typing import Any, Literal, Protocol, Self, TypeVar, get_args

from clickline.client.attempts import AttemptFailed, PreparedRequest, RawResponse, RetryBudget, ServerAddress
from clickline.client.columnar import RequestTable, Rows, as_table
from clickline.client.results import ModelInfo, Prediction, Ranking
from clickline.errors import ClicklineError, ConfigError, Mistake, RequestRefused

ProtocolName = Literal["grpc", "http", "v2-grpc", "v2-http", "elasticctr"]
"""TensorFlow Serving over gRPC or REST, the Open Inference Protocol over either, ElasticCTR's over HTTP."""

Result = TypeVar("Result")


class _Codec(Protocol):
    """Builds the requests of one protocol."""

    def predict(self, table: RequestTable, version: int | None) -> PreparedRequest[Prediction]: ...
    def rank(
        self, context: RequestTable | None, candidates: RequestTable, top: int | None
    ) -> PreparedRequest[Ranking]: ...
    def metadata(self) -> PreparedRequest[ModelInfo]: ...
    def ready(self) -> PreparedRequest[bool]: ...


class _BaseClient:
    """What both clients share: everything but sending."""

    _blocking = True

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
        """`address` is HOST:PORT. `tls` is True, or the PEM file of a CA to trust; over HTTP also an SSLContext, for
        more control. `timeout`: seconds for a request, including retries. `retries`: further attempts if the server
        cannot be reached or is overloaded. `model` may be omitted over gRPC; over HTTP its name is part of the path."""
        if protocol not in get_args(ProtocolName):
            allowed = ", ".join(get_args(ProtocolName))
            problem = f"is {protocol!r}; allowed: {allowed}."
            raise ConfigError([Mistake("", 0, "protocol", problem, "Name one of them.")])
        if isinstance(tls, SSLContext) and protocol in ("grpc", "v2-grpc"):
            problem = f"is an SSLContext, which only HTTP protocols support, and protocol is {protocol}."
            raise ConfigError([Mistake("", 0, "tls", problem, "Name the PEM file of a CA.")])
        self.address = ServerAddress.of(address)
        self.retried = 0
        self._timeout = timeout
        self._retries = retries
        self._codec, transports = _codec_and_transports(protocol, model)
        self._transport: Any = transports[self._blocking](self.address, token, tls, timeout)

    def prepare(self, rows: Rows, version: int | None = None) -> PreparedRequest[Prediction]:
        """Build a prediction request for these rows; `send` can send it any number of times."""
        if version is not None and version < 0:
            raise RequestRefused("invalid", f"version is {version}; allowed: the number of a version.")
        return self._codec.predict(as_table(rows), version)

    def _prepare_ranking(
        self, context: Mapping[str, Any], candidates: Rows, top_k: int | None
    ) -> PreparedRequest[Ranking]:
        if top_k is not None and not 1 <= top_k < 2**31:
            raise RequestRefused("invalid", f"top_k is {top_k}; allowed: at least 1, or None for all.")
        shared = as_table([context]) if context else None
        return self._codec.rank(shared, as_table(candidates), top_k)

    def _decode(self, request: PreparedRequest[Result], response: RawResponse) -> Result:
        try:
            return request.decode(response)
        except ClicklineError:
            raise
        except Exception as error:  # the response may be anything if it is not our server
            raise ClicklineError(
                f"{self.address} sent an unexpected response ({type(error).__name__}: {error}). "
                "Is it a clickline server?"
            ) from error

    @staticmethod
    def _not_ready(error: ClicklineError) -> bool:
        """Whether an error only means that the server cannot answer now."""
        return not isinstance(error, RequestRefused) or error.kind in ("unavailable", "overloaded", "late")


class Client(_BaseClient):
    """A blocking client of a prediction server. Safe to use from several threads, which share a connection.

    with Client("127.0.0.1:8500") as client:
        client.predict([{"I1": 3, "C1": "68fd1e64"}]).probability
    """

    def predict(self, rows: Rows, version: int | None = None) -> Prediction:
        """Score rows, given as a list of dicts or a dict of columns. `version`: by default the current one."""
        return self.send(self.prepare(rows, version))

    def rank(self, context: Mapping[str, Any], candidates: Rows, top_k: int | None = None) -> Ranking:
        """Score candidates that share the fields of `context`, which are sent once; `top_k`: return only the best."""
        return self.send(self._prepare_ranking(context, candidates, top_k))

    def metadata(self) -> ModelInfo:
        """The inputs and outputs of the model."""
        return self.send(self._codec.metadata())

    def ready(self) -> bool:
        """Whether the server is ready to answer; also False if it cannot be reached."""
        try:
            return self.send(self._codec.ready(), retries=0)
        except ClicklineError as error:
            if self._not_ready(error):
                return False
            raise

    def send(self, request: PreparedRequest[Result], *, retries: int | None = None) -> Result:
        budget = RetryBudget(self._timeout, self._retries if retries is None else retries)
        while True:
            try:
                return self._decode(request, self._transport.call(request, budget.remaining))
            except AttemptFailed as failed:
                delay = budget.next_delay(failed)
                if delay is None:
                    raise failed.error from failed.__cause__
            self.retried += 1
            time.sleep(delay)

    def close(self) -> None:
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncClient(_BaseClient):
    """The same client for asyncio. Concurrent requests share a connection.

    async with AsyncClient("127.0.0.1:8500") as client:
        (await client.predict([{"I1": 3, "C1": "68fd1e64"}])).probability
    """

    _blocking = False

    async def predict(self, rows: Rows, version: int | None = None) -> Prediction:
        return await self.send(self.prepare(rows, version))

    async def rank(self, context: Mapping[str, Any], candidates: Rows, top_k: int | None = None) -> Ranking:
        return await self.send(self._prepare_ranking(context, candidates, top_k))

    async def metadata(self) -> ModelInfo:
        return await self.send(self._codec.metadata())

    async def ready(self) -> bool:
        try:
            return await self.send(self._codec.ready(), retries=0)
        except ClicklineError as error:
            if self._not_ready(error):
                return False
            raise

    async def send(self, request: PreparedRequest[Result], *, retries: int | None = None) -> Result:
        budget = RetryBudget(self._timeout, self._retries if retries is None else retries)
        while True:
            try:
                return self._decode(request, await self._transport.call(request, budget.remaining))
            except AttemptFailed as failed:
                delay = budget.next_delay(failed)
                if delay is None:
                    raise failed.error from failed.__cause__
            self.retried += 1
            await asyncio.sleep(delay)

    async def close(self) -> None:
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _codec_and_transports(protocol: ProtocolName, model: str | None) -> tuple[_Codec, dict[bool, Any]]:
    """The codec of a protocol, and its transports: blocking (True) and async (False)."""
    try:
        if protocol.endswith("grpc"):
            from clickline.client.grpc_codec import InferenceGrpcCodec, TfServingGrpcCodec
            from clickline.client.grpc_transport import AsyncGrpcTransport, GrpcTransport

            codec = InferenceGrpcCodec if protocol == "v2-grpc" else TfServingGrpcCodec
            return codec(model), {True: GrpcTransport, False: AsyncGrpcTransport}
        from clickline.client.http_codec import InferenceHttpCodec, TfServingHttpCodec
        from clickline.client.http_transport import AsyncHttpTransport, HttpTransport

        transports = {True: HttpTransport, False: AsyncHttpTransport}
        if protocol == "elasticctr":
            from clickline.client.elasticctr_codec import ElasticCtrCodec

            return ElasticCtrCodec(model), transports
        return (InferenceHttpCodec if protocol == "v2-http" else TfServingHttpCodec)(model), transports
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("clickline"):
            raise
        raise ClicklineError(
            f"the client needs the package {error.name}: pip install 'clickline[client]'"
        ) from error
