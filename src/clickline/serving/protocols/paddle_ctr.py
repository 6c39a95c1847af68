"""ElasticCTR's two services in protobuf: of slots and feasigns, and of its first tutorial, with ids by position.

    instances { slots { slot_name: "3" feasigns: 7 feasigns: 9 } }       instances { sparse_ids: … dense_ids: … }
    predictions { prob0: 0.9 prob1: 0.1 } err_code: 0

An invalid request is answered with err_code -1 and err_msg, as in ElasticCTR.
"""

from __future__ import annotations

import numpy as np

from clickline.errors import RequestRefused
from clickline.scoring.scorer import Scores
from clickline.serving.open_versions import ScorerLike
from clickline.serving.protocols import elasticctr_http
from clickline.serving.protocols.http_common import parse_object
from clickline.serving.protocols.paddle_common import (
    FeedHttpRequest,
    FeedRequest,
    http_answer,
    is_protobuf,
    parsed_json,
    reader_of,
)
from clickline.serving.protocols.request import Call, Response
from clickline.wire.feed_tensors import IDS, SLOTS
from clickline.wire.messages import CtrRequest
from clickline.wire.protobuf_writer import encode_varint, string_field

_PREDICTION = np.dtype([("head", "S3"), ("prob0", "<f4"), ("tag", "u1"), ("prob1", "<f4")])  # its bytes
_ERR_CODE = 2 << 3
_INVALID = encode_varint(-1 % 2**64)


class ElasticCtr(FeedRequest):
    """Scores instances of slots and feasigns."""

    protocol = "elasticctr_brpc"
    layout = SLOTS

    def encode(self, answer: Scores) -> Response:
        predictions_B = np.empty(answer.probability_B.size, dtype=_PREDICTION)
        predictions_B["head"] = bytes([1 << 3 | 2, 10, 1 << 3 | 5])
        predictions_B["prob0"] = 1.0 - answer.probability_B
        predictions_B["tag"] = 2 << 3 | 5
        predictions_B["prob1"] = answer.probability_B
        return Response(predictions_B.tobytes() + bytes([_ERR_CODE, 0]))

    def to_json(self, answer: Scores) -> bytes:
        return elasticctr_http.predictions_json(answer)

    @staticmethod
    def error_body(message: str) -> bytes:
        sendable = message.encode("utf-8", "backslashreplace").decode()
        return bytes([_ERR_CODE]) + _INVALID + string_field(3, sendable)


class ElasticCtrGrpc(ElasticCtr):
    protocol = "elasticctr_grpc"


class ElasticCtrHttp(elasticctr_http.Inference):
    """Both forms over HTTP: JSON has a reader of its own, which takes more forms of feasigns."""

    def read(self, model: ScorerLike) -> Call:
        if not is_protobuf(self.headers):
            return super().read(model)
        self.inner = ElasticCtr(self.body, self.limits)
        return self.inner.decode(model)

    def encode(self, answer: Scores) -> Response:
        if not is_protobuf(self.headers):
            return super().encode(answer)
        return http_answer(self.inner.encode(answer).body, answer, self.headers)


class Ctr(ElasticCtr):
    """Scores instances of ids by position: one for each slot, then all numbers."""

    protocol = "ctr_brpc"
    layout = IDS

    def decode(self, model: ScorerLike) -> Call:
        found = reader_of(model).found
        texts = (*found.hashed, *found.ambiguous)
        if texts:
            raise RequestRefused(
                "invalid",
                f"This model has slots of texts, such as {texts[0]}. The sparse_ids of CTRPredictionService are Python "
                "2's hashes modulo 1000001, which are not the ids of texts. It needs a model trained on a log with the "
                "same ids (data.format: slots); for this model use GeneralModelService or "
                "ElasticCTRPredictionService.",
            )
        return super().decode(model)

    @classmethod
    def from_json(cls, body: bytes) -> bytes:
        return parsed_json(parse_object(body), CtrRequest())


class CtrGrpc(Ctr):
    protocol = "ctr_grpc"


class CtrHttp(FeedHttpRequest):
    protocol = "ctr_rest"
    service = Ctr
