"""Ranking over gRPC: one context, many candidates, their scores or the best of them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from clickline.errors import RequestRefused
from clickline.records import ABSENT, RequestRows
from clickline.serving.protocols import tfserving_grpc
from clickline.serving.protocols.call import Call, Limits, Scores, ServedModel, Target, top_k
from clickline.wire.protobuf_writer import bytes_field, encode_varint
from clickline.wire.request_reader import RequestReader, top_level_fields

_SPEC, _CONTEXT, _CANDIDATES, _TOP = 1, 2, 3, 4  # fields of RankRequest


class _Details(NamedTuple):
    model: str
    top: int


def target(body: bytes) -> Target:
    """Return the model that the request names."""
    return tfserving_grpc.target(body)  # the model_spec is in the same place


def decode(body: bytes, model: ServedModel, limits: Limits) -> Call:
    """Context and candidates of a RankRequest."""
    top, spec = 0, b""
    for _, piece in top_level_fields(body, _SPEC, _TOP):
        if isinstance(piece, bytes):
            spec += piece  # protobuf concatenates the pieces of one message
        else:
            top = int(np.int64(piece).astype(np.int32))
    if top < 0:
        raise RequestRefused(
            "invalid",
            f"top_k is {top}; it must be 0 for all candidates, or the number of best ones to return.",
        )
    reader = RequestReader.of(model.columns)
    context = reader.tensors_if_any(body, _CONTEXT, limits.max_rows, limits.ignore_unknown)
    candidates = reader.tensors(body, _CANDIDATES, limits.max_rows, limits.ignore_unknown)
    if context is not None:
        check_parts(context, candidates, model.columns)
    return Call(candidates, context, _Details(tfserving_grpc.target_of(spec).model, top))


def check_parts(context: RequestRows, candidates: RequestRows, columns: tuple[str, ...]) -> None:
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


def encode(call: Call, answer: Scores) -> bytes:
    """A RankResponse."""
    details: _Details = call.details
    scores_B = answer.probability_B
    spec = bytes_field(1, tfserving_grpc.spec_bytes(details.model, answer.version))
    if details.top == 0:
        return spec + bytes_field(2, scores_B.tobytes())
    order_K = top_k(scores_B, details.top)
    indices = b"".join(map(encode_varint, order_K.tolist()))
    return spec + bytes_field(2, scores_B[order_K].tobytes()) + bytes_field(3, indices)
