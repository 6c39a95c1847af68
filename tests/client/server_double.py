"""The server side of a client test, without a server: real protocol code decodes requests and encodes answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clickline.client.attempts import PreparedRequest, RawResponse
from clickline.client.elasticctr_codec import ElasticCtrCodec
from clickline.client.grpc_codec import InferenceGrpcCodec, TfServingGrpcCodec
from clickline.client.http_codec import InferenceHttpCodec, TfServingHttpCodec
from clickline.features import DenseField, FeatureSpec, SlotField
from clickline.features.request_encoder import RequestEncoder
from clickline.records import EncodedRows, RequestRows
from clickline.serving.grpc_methods import GRPC_ENDPOINTS, GRPC_INFO_ENDPOINTS
from clickline.serving.open_versions import OpenVersions
from clickline.serving.protocols.http_common import Route
from clickline.serving.protocols.http_routes import route
from clickline.serving.protocols.request import Call, Limits, Request

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
VERSIONS = OpenVersions(("ads",), lambda scorer: None)
VERSIONS.add(MODEL)
VERSIONS.switch(MODEL.number)


@dataclass(frozen=True)
class Scores:
    version: int
    logit_B: NDArray[np.float32]
    probability_B: NDArray[np.float32]


def read_request(request: PreparedRequest[Any]) -> Request:
    """A client's request as the server reads it."""
    assert request.body is not None
    if request.path in GRPC_ENDPOINTS:
        made = GRPC_ENDPOINTS[request.path](request.body, Limits())
    else:
        found = route("POST", request.path)
        assert isinstance(found, Route), found
        headers = {name.lower().encode(): value.encode() for name, value in request.headers.items()}
        made = found.request(request.body, headers, Limits())
    made.read_target()
    return made


def decode_request(request: PreparedRequest[Any]) -> Call:
    """A client's request as the server decodes it."""
    return read_request(request).decode(MODEL)


def decode_answer(request: PreparedRequest[Any], scores: Scores) -> Any:
    """The server's answer as the client decodes it."""
    made = read_request(request)
    made.decode(MODEL)
    reply = made.encode(scores)
    return request.decode(
        RawResponse(reply.body, {name.decode(): value.decode() for name, value in reply.headers})
    )


def decode_metadata(request: PreparedRequest[Any]) -> Any:
    """The server's metadata as the client decodes it."""
    if request.body is not None:
        _, info = GRPC_INFO_ENDPOINTS[request.path]
        return request.decode(RawResponse(info(request.body, VERSIONS)))
    found = route("GET", request.path)
    assert isinstance(found, Route), found
    return request.decode(RawResponse(found.description(VERSIONS).body))


def encode_rows(rows: RequestRows) -> EncodedRows:
    result, errors = _ENCODER.encode(rows)
    assert not errors, [error for group in errors for error in group]
    return result
