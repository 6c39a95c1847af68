"""Ranking over gRPC: context and candidates are decoded, and scores are returned in the requested order."""

from __future__ import annotations

import pytest
from grpc_model import answered, decoded, target

from clickline.errors import RequestRefused
from clickline.serving.protocols.ranking_grpc import Rank
from clickline.wire.messages import RankRequest, RankResponse


def tensor(into, dtype: int, field: str, values: list, rows: int | None = None) -> None:
    into.dtype = dtype
    into.tensor_shape.dim.add(size=len(values) if rows is None else rows)
    getattr(into, field).extend(values)


def request(top_k: int = 0, context: bool = True) -> RankRequest:
    made = RankRequest(top_k=top_k)
    made.model_spec.name = "ads"
    if context:
        tensor(made.context["I1"], 1, "float_val", [4.0])
        tensor(made.context["C1"], 7, "string_val", [b"user"])
    tensor(made.candidates["C2"], 7, "string_val", [b"x", b"y", b"z", b"w"])
    return made


def ranked(made: RankRequest) -> RankResponse:
    return RankResponse.FromString(answered(Rank, made.SerializeToString(), 0.25, 0.75, 0.5, 0.75))


def refusal(made: RankRequest) -> str:
    with pytest.raises(RequestRefused) as refused:
        decoded(Rank, made.SerializeToString())
    assert refused.value.kind == "invalid"
    return str(refused.value)


def test_context_and_candidates_are_decoded():
    body = request().SerializeToString()
    assert target(Rank, body) == ("ads", None)
    call = decoded(Rank, body)
    assert call.rows.rows == 4 and call.context.rows == 1
    assert call.context.kind_C.astype(bool).tolist() == [True, False, True, False, False, False]
    assert call.rows.kind_C.astype(bool).tolist() == [False, False, False, True, False, False]


def test_scores_keep_the_order_of_the_candidates():
    response = ranked(request())
    assert list(response.scores) == [0.25, 0.75, 0.5, 0.75] and not response.indices
    assert (response.model_spec.name, response.model_spec.version.value) == ("ads", 12)


@pytest.mark.parametrize(("top_k", "order"), [(1, [1]), (3, [1, 3, 2]), (9, [1, 3, 2, 0])])
def test_best_come_first_and_ties_keep_their_order(top_k, order):
    response = ranked(request(top_k))
    assert list(response.indices) == order
    assert list(response.scores) == [[0.25, 0.75, 0.5, 0.75][n] for n in order]


def test_context_is_optional():
    call = decoded(Rank, request(context=False).SerializeToString())
    assert call.context is None and call.rows.rows == 4


def test_invalid_rankings_are_refused():
    assert (
        refusal(request(-2))
        == "top_k is -2; it must be 0 for all candidates, or the number of best ones to return."
    )
    two = request()
    two.context["I1"].Clear()
    two.context["C1"].Clear()
    tensor(two.context["I1"], 1, "float_val", [1.0, 2.0])
    tensor(two.context["C1"], 7, "string_val", [b"a", b"b"])
    assert "The context has 2 rows; it must have one." in refusal(two)
    both = request()
    tensor(both.candidates["C1"], 7, "string_val", [b"a"] * 4)
    assert refusal(both) == "C1 is in the context and in the candidates; it must be in only one of them."
    both.candidates["C1"].tensor_shape.dim.add(size=2)
    both.candidates["C1"].string_val.extend([b"b"] * 4)
    assert "C1 is in the context and in the candidates" in refusal(both)
    none = request()
    none.candidates.clear()
    assert "no rows" in refusal(none)
    unknown = request()
    tensor(unknown.candidates["C9"], 7, "string_val", [b"a"] * 4)
    assert '"C9" is not a field' in refusal(unknown)
