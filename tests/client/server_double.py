"""The server side of a client test, without a server: real protocol code decodes requests and encodes answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clickline.client.elasticctr_codec import ElasticCtrCodec
from clickline.client.grpc_codec import InferenceGrpcCodec, TfServingGrpcCodec
from clickline.client.http_codec import InferenceHttpCodec, TfServingHttpCodec
from clickline.client.request import PreparedRequest, RawResponse
from clickline.features import DenseField, FeatureSpec, SlotField
from clickline.features.request_encoder import RequestEncoder
from clickline.records import EncodedRows, RequestRows
from clickline.serving.protocols import kserve_grpc, ranking_grpc, tfserving_grpc
from clickline.serving.protocols.call import Call, Limits
from clickline.serving.protocols.http_common import HttpEndpoint, HttpInfoEndpoint, HttpLimits, ServerState
from clickline.serving.protocols.http_routes import route

FEATURES = FeatureSpec(
    dense=(DenseField("I1", "I1", "log1p"), DenseField("I2", "I2", "none")),
    slots=(
        SlotField("C1", "C1", 1),
        SlotField("C2", "C2", 2),
        SlotField("tags", "tags", 30, multi=True),
        SlotField("4", "4", 4, "feasign", multi=True),
        SlotField("I2_bucket", "I2", 77, "log2"),
    ),
)

CODECS = {
    "grpc": TfServingGrpcCodec,
    "v2-grpc": InferenceGrpcCodec,
    "http": TfServingHttpCodec,
    "v2-http": InferenceHttpCodec,
    "elasticctr": ElasticCtrCodec,
}


class Model:
    number = 12
    features = FEATURES
    columns = FEATURES.columns


MODEL = Model()
_ENCODER = RequestEncoder(FEATURES)
_GRPC = {
    "/tensorflow.serving.PredictionService/Predict": tfserving_grpc,
    "/inference.GRPCInferenceService/ModelInfer": kserve_grpc,
    "/clickline.v1.Ranking/Rank": ranking_grpc,
}


@dataclass(frozen=True)
class Scores:
    version: int
    logit_B: NDArray[np.float32]
    probability_B: NDArray[np.float32]


def _headers(request: PreparedRequest[Any]) -> dict[bytes, bytes]:
    return {name.lower().encode(): value.encode() for name, value in request.headers.items()}


def _endpoint(request: PreparedRequest[Any]) -> HttpEndpoint:
    endpoint = route("POST", request.path)
    assert isinstance(endpoint, HttpEndpoint), endpoint
    return endpoint


def decode_request(request: PreparedRequest[Any]) -> Call:
    """A client's request as the server decodes it."""
    assert request.body is not None
    if request.path in _GRPC:
        return _GRPC[request.path].decode(request.body, MODEL, Limits())
    return _endpoint(request).decode(request.body, _headers(request), MODEL, HttpLimits())


def target(request: PreparedRequest[Any]) -> Any:
    assert request.body is not None
    return _GRPC[request.path].target(request.body) if request.path in _GRPC else _endpoint(request).target


def decode_answer(request: PreparedRequest[Any], scores: Scores) -> Any:
    """The server's answer as the client decodes it."""
    call = decode_request(request)
    if request.path in _GRPC:
        return request.decode(RawResponse(_GRPC[request.path].encode(call, scores)))
    reply = _endpoint(request).encode(call, scores)
    return request.decode(
        RawResponse(reply.body, {name.decode(): value.decode() for name, value in reply.headers})
    )


def decode_metadata(request: PreparedRequest[Any]) -> Any:
    """The server's metadata as the client decodes it."""
    if request.body is not None:
        if request.path.endswith("GetModelMetadata"):
            return request.decode(RawResponse(tfserving_grpc.metadata(request.body, MODEL)))
        return request.decode(RawResponse(kserve_grpc.model_metadata(request.body, MODEL, [12])))
    endpoint = route("GET", request.path)
    assert isinstance(endpoint, HttpInfoEndpoint), endpoint
    return request.decode(RawResponse(endpoint.answer(ServerState(("ads",), MODEL)).body))


def encode_rows(rows: RequestRows) -> EncodedRows:
    result, errors = _ENCODER.encode(rows)
    assert not errors, [error for group in errors for error in group]
    return result
