"""Ranking over gRPC: one context, many candidates, their scores or the best of them."""

from __future__ import annotations

import numpy as np

from clickline.errors import RequestRefused
from clickline.records import ABSENT, RequestRows
from clickline.scoring.scorer import Scores
from clickline.serving.open_versions import ScorerLike
from clickline.serving.protocols.request import Call, Response, top_k
from clickline.serving.protocols.tfserving_grpc import SpecRequest, spec_bytes
from clickline.wire.protobuf_writer import bytes_field, encode_varint
from clickline.wire.request_reader import RequestReader

_CONTEXT, _CANDIDATES, _TOP = 2, 3, 4  # fields of RankRequest


class Rank(SpecRequest):
    """Scores candidates that share a context."""

    protocol = "rank_grpc"
    fields = (_TOP,)

    def decode(self, model: ScorerLike) -> Call:
        self.top = 0
        for value in self.found:
            if isinstance(value, int):
                self.top = int(np.int64(value).astype(np.int32))
        if self.top < 0:
            raise RequestRefused(
                "invalid",
                f"top_k is {self.top}; it must be 0 for all candidates, or the number of best ones to return.",
            )
        reader = RequestReader.of(model.columns)
        limits = self.limits.max_rows, self.limits.ignore_unknown
        context = reader.tensors_if_any(self.body, _CONTEXT, *limits)
        candidates = reader.tensors(self.body, _CANDIDATES, *limits)
        if context is not None:
            _check_parts(context, candidates, model.columns)
        return Call(candidates, context)

    def encode(self, answer: Scores) -> Response:
        scores_B = answer.probability_B
        spec = bytes_field(1, spec_bytes(self.model, answer.version))
        if self.top == 0:
            return Response(spec + bytes_field(2, scores_B.tobytes()))
        order_K = top_k(scores_B, self.top)
        indices = b"".join(map(encode_varint, order_K.tolist()))
        return Response(spec + bytes_field(2, scores_B[order_K].tobytes()) + bytes_field(3, indices))


def _check_parts(context: RequestRows, candidates: RequestRows, columns: tuple[str, ...]) -> None:
    """Refuse a context that is not one row, and a field that is in both context and candidates."""
    if context.rows != 1:
        raise RequestRefused(
            "invalid",
            f"The context has {context.rows} rows; it must have one. Send what differs between rows as candidates.",
        )
    both = {columns[c] for c in np.flatnonzero((context.kind_C != ABSENT) & (candidates.kind_C != ABSENT))}
    if context.multi or candidates.multi:
        both |= _held(context, columns) & _held(candidates, columns)
    if both:
        name = min(both, key=columns.index)
        raise RequestRefused(
            "invalid", f"{name} is in the context and in the candidates; it must be in only one of them."
        )


def _held(rows: RequestRows, columns: tuple[str, ...]) -> set[str]:
    return {*rows.multi, *(columns[c] for c in np.flatnonzero(rows.kind_C != ABSENT))}
