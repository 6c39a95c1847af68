"""A model for the gRPC endpoints, and a gRPC server with only those endpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import grpc
import numpy as np

from clickline.errors import RequestRefused
from clickline.features import DenseField, FeatureSpec, SlotField
from clickline.serving.grpc_methods import GRPC_ENDPOINTS, GRPC_INFO_ENDPOINTS
from clickline.serving.open_versions import OpenVersions
from clickline.serving.protocols.request import Limits, Request

FEATURES = FeatureSpec(
    (DenseField("I1", "I1", "log1p"), DenseField("I2", "I2", "none")),
    (
        SlotField("C1", "C1", 1),
        SlotField("C2", "C2", 2),
        SlotField("I1_bucket", "I1", 101, "log2"),
        SlotField("hour", "hour", 102, "log2"),
        SlotField("tags", "tags", 103, multi=True),
    ),
)


@dataclass(frozen=True)
class StandIn:
    number: int = 12
    features: FeatureSpec = FEATURES

    @property
    def columns(self) -> tuple[str, ...]:
        return self.features.columns


@dataclass(frozen=True)
class Answer:
    version: int
    logit_B: np.ndarray
    probability_B: np.ndarray


MODEL = StandIn()
LIMITS = Limits(max_rows=1000)


def versions(*numbers: int) -> OpenVersions:
    """Versions that were current one after the other and are still leased; the last one is current."""
    made = OpenVersions(("ads",), lambda scorer: None)
    for number in numbers:
        made.add(StandIn(number))
        made.switch(number)
        made.lease("", None)
    return made


VERSIONS = versions(11, 12)


def answer(*probabilities: float) -> Answer:
    p = np.array(probabilities, dtype=np.float32)
    return Answer(MODEL.number, np.log(p / (1 - p)).astype(np.float32), p)


def read(endpoint: type[Request], body: bytes, limits: Limits = LIMITS) -> Request:
    """A request whose target is known."""
    request = endpoint(body, limits)
    request.read_target()
    return request


def target(endpoint: type[Request], body: bytes) -> tuple[str, int | None]:
    request = read(endpoint, body)
    return request.model, request.version


def decoded(endpoint: type[Request], body: bytes, limits: Limits = LIMITS):
    return read(endpoint, body, limits).decode(MODEL)


def answered(endpoint: type[Request], body: bytes, *probabilities: float) -> bytes:
    """The answer to a request. By default row b of B gets the probability (b + 1) / (B + 1)."""
    request = read(endpoint, body)
    rows = request.decode(MODEL).rows.rows
    return request.encode(answer(*(probabilities or ((row + 1) / (rows + 1) for row in range(rows))))).body


METHODS: dict[str, Callable[[bytes], bytes]] = {
    path.removeprefix("/"): partial(answered, endpoint) for path, endpoint in GRPC_ENDPOINTS.items()
} | {
    path.removeprefix("/"): partial(lambda info, body: info(body, VERSIONS), info)
    for path, (_, info) in GRPC_INFO_ENDPOINTS.items()
}


class _Handler(grpc.GenericRpcHandler):
    def service(self, details):
        method = METHODS.get(details.method.removeprefix("/"))
        if method is None:
            return None

        def serve(body: bytes, context: grpc.ServicerContext) -> bytes:
            try:
                return method(body)
            except RequestRefused as refused:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(refused))

        return grpc.unary_unary_rpc_method_handler(serve)


@contextmanager
def grpc_server() -> Iterator[str]:
    """Serve the endpoints on a free port; yields the address."""
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((_Handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait(10)
