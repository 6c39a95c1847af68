"""ElasticCTR's interface and ranking over HTTP."""

from __future__ import annotations

import json

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from rest_model import FEATURES, LIMITS, MODEL, Answer, answered, call, encoded, endpoint, values

from clickline.errors import RequestRefused
from clickline.features import encoder_kernels
from clickline.records import FEATURE_ID, FLOAT64, INTEGER
from clickline.serving.protocols.http_routes import route
from clickline.serving.protocols.request import Limits, Response

CTR = "/ElasticCTRPredictionService/inference"
RANK = "/v1/models/ads:rank"


def refused(path, body, limits=LIMITS) -> str:
    with pytest.raises(RequestRefused) as found:
        call(path, body if isinstance(body, bytes) else json.dumps(body).encode(), limits=limits)
    assert found.value.kind == "invalid"
    return str(found.value)


# ── ElasticCTR ─────────────────────────────────────────────────────────────────────────────────


def instance(**slots):
    return {"slots": [{"slot_name": name, "feasigns": feasigns} for name, feasigns in slots.items()]}


def ctr(*instances, limits=LIMITS):
    return call(CTR, json.dumps({"instances": instances}).encode(), limits=limits).rows


def test_feasigns_of_a_text_slot_are_the_hashes_of_its_texts():
    messages = [b"ab", b"c"]
    hashes = [xxhash.xxh64_intdigest(word) for word in messages]
    rows = ctr(*(instance(**{"1": [value]}) for value in hashes))
    column = MODEL.columns.index("C1")
    assert rows.kind_C[column] == FEATURE_ID
    assert values(rows)["C1"] == hashes
    bits_B = rows.integers_CB[column].view(np.uint64)
    ids_B = np.empty(2, dtype=np.uint64)
    encoder_kernels.mix_feature_ids(bits_B, bits_B == 0, FEATURES.slots[0].salt, ids_B)
    by_text = encoded(call("/v1/models/ads:predict", b'{"inputs":{"C1":["ab","c"]}}').rows)
    assert ids_B.tolist() == by_text.slots[0].ids_N.tolist()
    several = ctr(instance(**{"30": hashes}), instance(**{"30": [0]}))
    assert several.kind_C[MODEL.columns.index("tags")] == FEATURE_ID
    assert values(several)["tags"] == [hashes, [None]]


def test_feasigns_of_a_feasign_slot_get_the_ids_of_training():
    rows = ctr(
        instance(**{"4": [7, 2**64 - 1], "5": [9]}),
        instance(**{"5": [0]}),
        instance(**{"4": ["12"], "5": [-1]}),
    )
    found = encoded(rows)
    by_text = {"4": [["7", str(2**64 - 1)], [], ["12"]], "5": ["9", "", str(2**64 - 1)]}
    body = json.dumps({"inputs": by_text}).encode()
    reference = encoded(call("/v1/models/ads:predict", body).rows)
    for slot in (3, 4):
        assert found.slots[slot].ids_N.tolist() == reference.slots[slot].ids_N.tolist()
    assert found.slots[3].offsets_B1.tolist() == reference.slots[3].offsets_B1.tolist()
    assert rows.kind_C[MODEL.columns.index("5")] == INTEGER


def test_slots_by_number_and_by_name_and_in_pieces():
    by_name = {"slots": [{"slot_name": "tags", "feasigns": [1]}, {"slot_name": 30, "feasigns": [2]}]}
    assert values(ctr(by_name))["tags"] == [[1, 2]]
    assert values(ctr(instance(C2=[5])))["C2"] == [5]


def test_dense_field_takes_the_feasign_as_a_number():
    rows = ctr(instance(I1=[0]), instance(), instance(I1=["3"]))
    assert values(rows) == {"I1": [0.0, None, 3.0]}
    assert rows.kind_C[MODEL.columns.index("I1")] == FLOAT64


def test_rows_without_slots_are_accepted():
    assert ctr({"slots": []}, {"slots": []}).rows == 2


@pytest.mark.parametrize(
    ("document", "messages"),
    [
        ({"instances": [instance(**{"99": [1]})]}, ("'99'", "instances[0]")),
        ({"instances": [instance(**{"1": [1]}), instance(tag=[1])]}, ("'tag'", "instances[1]", "'tags'")),
        ({"instances": [instance(**{"1": [1, 2]})]}, ("C1", "2 values")),
        ({"instances": [instance(**{"1": [1.5]})]}, ("'1'", "1.5", "instances[0]")),
        ({"instances": [instance(**{"1": [2**64]})]}, ("'1'", "64-bit")),
        ({"instances": [instance(**{"1": ["x"]})]}, ("'1'", "'x'")),
        ({"instances": [instance(**{"1": ["1" * 30]})]}, ("'1'", "64-bit")),
        ({"instances": [instance(**{"1": [True]})]}, ("'1'", "True")),
        ({"instances": [instance(**{"1": [None]})]}, ("'1'", "None")),
        ({"instances": [instance(**{"1": 7})]}, ("'1'", "a number")),
        ({"instances": [{"slots": [{"feasigns": [1]}]}]}, ("slot_name", "null")),
        ({"instances": [{"slots": [{"slot_name": True, "feasigns": [1]}]}]}, ("slot_name", "true or false")),
        ({"instances": [{"slots": ["x"]}]}, ("instances[0]", "slots")),
        ({"instances": [{}]}, ("instances[0]", "slots")),
        ({"instances": ["x"]}, ("instances[0]", "slots")),
        ({"instances": {}}, ("instances",)),
        ({"instances": []}, ("no rows",)),
        ({"instances": [{"slots": []}] * 51}, ("51 rows",)),
        ([], ("instances",)),
        (b"{", ("not JSON",)),
    ],
)
def test_invalid_slots_are_refused(document, messages):
    message = refused(CTR, document)
    for word in messages:
        assert word in message


def test_unknown_slots_are_ignored_if_configured():
    rows = ctr(instance(**{"99": [1], "5": [2]}), limits=Limits(ignore_unknown=True))
    assert values(rows) == {"5": [2]}


def test_answers_and_errors_have_the_same_shape():
    inference = endpoint(CTR)
    assert inference.model == ""
    found = json.loads(answered(CTR, b'{"instances":[{"slots":[]},{"slots":[]}]}').body)
    assert found == {
        "predictions": [
            {"prob0": pytest.approx(0.9), "prob1": pytest.approx(0.1)},
            {"prob0": pytest.approx(0.3), "prob1": pytest.approx(0.7)},
        ],
        "err_code": 0,
        "err_msg": "",
    }
    reply = inference.refuse("overloaded", "later")
    assert reply.status == 429
    assert json.loads(reply.body) == {"predictions": [], "err_code": 429, "err_msg": "later"}
    wrong = route("GET", CTR)
    assert isinstance(wrong, Response) and wrong.status == 405 and json.loads(wrong.body)["err_code"] == 405


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["1", "30", "x", "-5", "-"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["slots", "slot_name", "feasigns", "instances", "C1"]), inner)
    ),
    max_leaves=12,
)


@given(st.one_of(st.lists(st.fixed_dictionaries({"slots": st.lists(JSON, max_size=2)}), max_size=3), JSON))
def test_any_instances_are_answered_or_refused(instances):
    try:
        rows = call(CTR, json.dumps({"instances": instances}).encode()).rows
    except RequestRefused:
        return
    values(rows)


# ── rank ───────────────────────────────────────────────────────────────────────────────────────


def rank(document):
    return call(RANK, json.dumps(document).encode())


def test_context_and_candidates():
    objects = rank(
        {"context": {"C1": "u", "I1": 3, "tags": ["a", "b"]}, "candidates": [{"C2": "x"}, {"C2": 7}]}
    )
    columns = rank({"context": {"C1": "u", "I1": 3, "tags": ["a", "b"]}, "candidates": {"C2": ["x", 7]}})
    for asked in (objects, columns):
        assert values(asked.rows) == {"C2": [b"x", b"7"]}
        assert asked.context is not None and asked.context.rows == 1
        assert values(asked.context) == {"C1": [b"u"], "I1": [3], "tags": [[b"a", b"b"]]}
    assert rank({"candidates": [{"C2": "x"}]}).context.rows == 1


def test_row_limit_applies_to_candidates_only():
    assert rank({"context": {"C1": "u"}, "candidates": [{"C2": "x"}] * 50}).rows.rows == 50
    assert "51 rows" in refused(RANK, {"context": {"C1": "u"}, "candidates": [{"C2": "x"}] * 51})


@pytest.mark.parametrize(
    ("document", "messages"),
    [
        ({"context": {"C1": "u"}}, ("no rows",)),
        ({"context": [], "candidates": [{}]}, ("context", "a list")),
        ({"context": {"C9": "u"}, "candidates": [{}]}, ("'C9'",)),
        ({"context": {"I1": [1, 2]}, "candidates": [{}]}, ("I1", "one value")),
        ({"context": {}, "candidates": [{"I1": {}}]}, ("I1", "an object")),
        ({"context": {}, "candidates": "x"}, ("candidates", "text")),
        ({"context": {}, "candidates": {"C2": "x"}}, ("'C2'", "a list")),
        ({"candidates": [{}], "top_k": 0}, ("top_k", "0")),
        ({"candidates": [{}], "top_k": True}, ("top_k", "True")),
        ({"candidates": [{}], "top_k": 1.0}, ("top_k", "1.0")),
        ({"candidates": [{}], "topk": 3}, ("'topk'", "'top_k'")),
        ([], ("a list",)),
    ],
)
def test_invalid_rankings_are_refused_over_http(document, messages):
    message = refused(RANK, document)
    for word in messages:
        assert word in message


def ranked(probabilities, **options):
    document = {"candidates": {"C2": ["x"] * len(probabilities)}, **options}
    probability_B = np.array(probabilities, dtype=np.float32)
    answer = Answer(5, probability_B, probability_B)
    return json.loads(answered(RANK, json.dumps(document).encode(), answer=answer).body)


def test_all_scores_in_the_order_of_the_candidates():
    assert ranked([0.25, 0.75, 0.5]) == {"version": 5, "scores": [0.25, 0.75, 0.5]}


def test_top_k_returns_indices_and_breaks_ties_by_order():
    best = ranked([0.25, 0.5, 0.75, 0.5, 0.5], top_k=3)
    assert best == {"version": 5, "scores": [0.75, 0.5, 0.5], "indices": [2, 1, 3]}
    assert ranked([0.25, 0.5], top_k=9)["indices"] == [1, 0]


@given(st.binary(max_size=100))
def test_random_bytes_are_always_refused(body):
    for path in (CTR, RANK, "/v2/models/ads/infer"):
        with pytest.raises(RequestRefused):
            call(path, body)
