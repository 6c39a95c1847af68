"""A model for the gRPC endpoints, and a gRPC server with only those endpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import grpc
import numpy as np

from clickline.errors import RequestRefused
from clickline.features import DenseField, FeatureSpec, SlotField
from clickline.serving.protocols import kserve_grpc, ranking_grpc, tfserving_grpc
from clickline.serving.protocols.call import Limits

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


def answer(*probabilities: float) -> Answer:
    p = np.array(probabilities, dtype=np.float32)
    return Answer(MODEL.number, np.log(p / (1 - p)).astype(np.float32), p)


def scored(endpoint, body: bytes) -> bytes:
    """Answer a request: row b of B gets the probability (b + 1) / (B + 1)."""
    endpoint.target(body)
    call = endpoint.decode(body, MODEL, LIMITS)
    return endpoint.encode(call, answer(*((row + 1) / (call.rows.rows + 1) for row in range(call.rows.rows))))


METHODS: dict[str, Callable[[bytes], bytes]] = {
    "tensorflow.serving.PredictionService/Predict": lambda body: scored(tfserving_grpc, body),
    "tensorflow.serving.PredictionService/GetModelMetadata": lambda body: tfserving_grpc.metadata(
        body, MODEL
    ),
    "tensorflow.serving.ModelService/GetModelStatus": lambda body: tfserving_grpc.status(
        {11: "UNLOADING", 12: "AVAILABLE"}
    ),
    "inference.GRPCInferenceService/ServerLive": lambda body: kserve_grpc.server_live(),
    "inference.GRPCInferenceService/ServerReady": lambda body: kserve_grpc.server_ready(True),
    "inference.GRPCInferenceService/ModelReady": lambda body: kserve_grpc.model_ready(
        kserve_grpc.target(body).version in (None, 12)
    ),
    "inference.GRPCInferenceService/ServerMetadata": lambda body: kserve_grpc.server_metadata("0.1.0"),
    "inference.GRPCInferenceService/ModelMetadata": lambda body: kserve_grpc.model_metadata(
        body, MODEL, [11, 12]
    ),
    "inference.GRPCInferenceService/ModelInfer": lambda body: scored(kserve_grpc, body),
    "clickline.v1.Ranking/Rank": lambda body: scored(ranking_grpc, body),
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
