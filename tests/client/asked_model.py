"""A model's double at the far end: real doors decode what a client sends, its values can be looked at, and real doors
encode the answer."""

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
from clickline.serving.protocols.http_common import HttpEndpoint, HttpLimits, ServerState, HttpInfoEndpoint
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

ASKS = {
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


def _headers(ask: PreparedRequest[Any]) -> dict[bytes, bytes]:
    return {name.lower().encode(): value.encode() for name, value in ask.headers.items()}


def _door(ask: PreparedRequest[Any]) -> HttpEndpoint:
    found = route("POST", ask.path)
    assert isinstance(found, HttpEndpoint), found
    return found


def decoded(ask: PreparedRequest[Any]) -> Call:
    """What the server finds in a request."""
    assert ask.body is not None
    if ask.path in _GRPC:
        return _GRPC[ask.path].decode(ask.body, MODEL, Limits())
    return _door(ask).decode(ask.body, _headers(ask), MODEL, HttpLimits())


def target(ask: PreparedRequest[Any]) -> Any:
    assert ask.body is not None
    return _GRPC[ask.path].target(ask.body) if ask.path in _GRPC else _door(ask).target


def answered(ask: PreparedRequest[Any], scores: Scores) -> Any:
    """What the client makes of the server's answer."""
    call = decoded(ask)
    if ask.path in _GRPC:
        return ask.decode(RawResponse(_GRPC[ask.path].encode(call, scores)))
    reply = _door(ask).encode(call, scores)
    return ask.decode(RawResponse(reply.body, {name.decode(): value.decode() for name, value in reply.headers}))


def page(ask: PreparedRequest[Any]) -> Any:
    """What the client makes of what the server tells of itself."""
    if ask.body is not None:
        if ask.path.endswith("GetModelMetadata"):
            return ask.decode(RawResponse(tfserving_grpc.metadata(ask.body, MODEL)))
        return ask.decode(RawResponse(kserve_grpc.model_metadata(ask.body, MODEL, [12])))
    found = route("GET", ask.path)
    assert isinstance(found, HttpInfoEndpoint), found
    return ask.decode(RawResponse(found.answer(ServerState(("ads",), MODEL)).body))


def encoded(rows: RequestRows) -> EncodedRows:
    result, faults = _ENCODER.encode(rows)
    assert not faults, [fault for found in faults for fault in found]
    return result
