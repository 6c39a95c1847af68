"""TensorFlow Serving's REST interface: decoding, errors and answers."""

from __future__ import annotations

import gzip
import json
import time
import zlib

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rest_model import (
    FEATURES,
    LIMITS,
    MODEL,
    Answer,
    Model,
    answered,
    call,
    encoded,
    endpoint,
    header,
    same,
    values,
    versions_of,
)

from clickline.errors import RequestRefused
from clickline.features import Encoder
from clickline.serving.protocols.http_common import (
    Route,
    preview,
)
from clickline.serving.protocols.http_routes import route
from clickline.serving.protocols.request import Limits, Response

PREDICT = "/v1/models/ads:predict"


def predict(document, limits=LIMITS):
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    return call(PREDICT, body, limits=limits)


def rows_of(*instances):
    return values(predict({"instances": list(instances)}).rows)


def refused(document, limits=LIMITS) -> str:
    with pytest.raises(RequestRefused) as found:
        predict(document, limits)
    assert found.value.kind == "invalid"
    return str(found.value)


# ── values ─────────────────────────────────────────────────────────────────────────────────────


def test_rows_and_columns_are_equivalent():
    instances = [
        {"I1": 3, "I2": 0.5, "C1": "ab", "tags": ["x", "y"]},
        {"I1": None, "I2": 2, "C1": "", "tags": []},
        {"I1": 7, "I2": 1e-3, "C1": "é", "tags": "z"},
    ]
    inputs = {name: [row[name] for row in instances] for name in instances[0]}
    by_rows = predict({"instances": instances}).rows
    by_columns = predict({"inputs": inputs}).rows
    expected = {
        "I1": [3.0, None, 7.0],
        "I2": [0.5, 2.0, 1e-3],
        "C1": [b"ab", None, "é".encode()],
        "tags": [[b"x", b"y"], [], [b"z"]],
    }
    assert values(by_rows) == values(by_columns) == expected
    reference, _ = Encoder(FEATURES).encode_values(instances)
    assert same(encoded(by_rows), reference)


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(-1e15, 1e15, allow_nan=False),
    st.text(max_size=12),
)
NUMBERS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**9), 10**9),
    st.floats(-1e9, 1e9),
    st.integers().map(lambda n: str(n % 1000)),
)
INSTANCE = st.fixed_dictionaries(
    {},
    optional={
        "I1": NUMBERS,
        "I2": NUMBERS,
        "C1": SCALARS,
        "C2": st.one_of(SCALARS, st.lists(SCALARS, max_size=1)),
        "tags": st.one_of(SCALARS, st.lists(SCALARS, max_size=3)),
        "4": st.lists(st.integers(0, 2**64 - 1), max_size=3),
    },
)


@given(st.lists(INSTANCE, min_size=1, max_size=6))
def test_any_json_values_get_the_ids_of_training(instances):
    """A value is encoded as in prepare, whatever other values are in its column."""
    reference, faults = Encoder(FEATURES).encode_values(instances)
    assert not faults
    body = orjson.dumps({"instances": instances})
    assert same(encoded(predict(body).rows), reference)


def test_all_forms_of_seven_are_the_same_category():
    found = encoded(predict({"instances": [{"C1": v} for v in (7, "7", [7], {"b64": "Nw=="})]}).rows)
    floats = encoded(predict({"inputs": {"C1": [7.0, 7.0]}}).rows)
    assert len({*found.slots[0].ids_N.tolist(), *floats.slots[0].ids_N.tolist()}) == 1


def test_all_forms_of_missing_values_are_missing():
    given_ = encoded(
        predict(
            b'{"instances":[{"I1":null,"C1":null},{"I1":NaN,"C1":NaN},{"I1":"","C1":""},{},{"I1":[]}]}'
        ).rows
    )
    assert set(given_.dense_DB[0].tolist()) == {0.0}
    assert set(given_.slots[0].ids_N.tolist()) == {FEATURES.slots[0].missing_id}


def test_true_is_one_as_in_training():
    found = encoded(predict({"instances": [{"I2": True, "C1": True}, {"I2": 1, "C1": "1"}]}).rows)
    assert found.dense_DB[1].tolist() == [1.0, 1.0]
    assert len(set(found.slots[0].ids_N.tolist())) == 1


def test_large_whole_numbers_keep_every_digit():
    numbers = [2**63 + 1, 2**64 - 1, 2**53 + 1]
    assert rows_of(*({"C1": n} for n in numbers))["C1"] == [str(n).encode() for n in numbers]
    assert rows_of({"C1": 2**53 + 1}, {"C1": 0.5})["C1"] == [b"9007199254740993", b"0.5"]
    assert rows_of({"C1": 2**53 + 1}, {"C1": None})["C1"] == [b"9007199254740993", None]


def test_large_numbers_are_accepted_in_dense_fields():
    assert rows_of({"I1": 1e30}, {"I1": 2**64}) == {"I1": [1e30, 2.0**64]}
    mixed = encoded(predict({"instances": [{"I2": 1e30}, {"I2": "1e30"}]}).rows).dense_DB[1]
    assert mixed[0] == mixed[1] == np.float32(1e30)


def test_texts_with_a_nul_or_beyond_ascii():
    texts = ["a\0b", "", "\0", "ü", "日本", "x"]
    found = rows_of(*({"C1": text, "C2": "c"} for text in texts))
    assert found == {"C1": [text.encode() or None for text in texts], "C2": [b"c"] * 6}


def test_base64_bytes_are_used_unchanged():
    assert rows_of({"C1": {"b64": "/4A="}}, {"C1": "ü"})["C1"] == [b"\xff\x80", "ü".encode()]


def test_rows_may_have_different_fields():
    assert rows_of({"C1": "a"}, {"C2": "b", "C1": "c"}, {}) == {
        "C1": [b"a", b"c", None],
        "C2": [None, b"b", None],
    }


def test_column_without_values_is_not_absent():
    """Ranking splits depend on which fields are given, so a null must not change the split."""
    rows = predict({"instances": [{"C1": None, "I1": 1}]}).rows
    assert rows.kind_C[MODEL.columns.index("C1")] != 0


# ── refusals ───────────────────────────────────────────────────────────────────────────────────


def test_unknown_fields_are_refused_with_a_suggestion():
    message = refused({"instances": [{"C1": "a"}, {"Tag": "a"}]})
    assert "'Tag'" in message and "'tags'" in message
    assert "'D9'" in refused({"inputs": {"D9": [1]}})
    ignoring = Limits(max_rows=50, ignore_unknown=True)
    assert values(predict({"instances": [{"C1": "a", "Tag": {}}]}, ignoring).rows) == {"C1": [b"a"]}
    assert values(predict({"inputs": {"C1": ["a"], "Tag": [[1, {}]]}}, ignoring).rows) == {"C1": [b"a"]}


@pytest.mark.parametrize(
    ("body", "messages"),
    [
        (b'{"instances":[{"I1":1},{"I1":1e999}]}', ("I1", "row 1", "finite")),
        (b'{"instances":[{"I1":-Infinity}]}', ("I1", "row 0", "finite")),
        (b'{"inputs":{"C1":["a",Infinity]}}', ("C1", "row 1", "finite")),
        (b'{"inputs":{"tags":[["a"],["b",Infinity]]}}', ("tags", "row 1", "finite")),
        (b'{"inputs":{"tags":[[1.5],[2.5,Infinity]]}}', ("tags", "row 1", "finite")),
        (b'{"inputs":{"C1":[1.5,1e30]}}', ("C1", "row 1", "text")),
        (b'{"inputs":{"C1":["x",18446744073709551616]}}', ("C1", "row 1", "text")),
        (b'{"inputs":{"C1":["x",-9223372036854775809]}}', ("C1", "row 1", "text")),
        (b'{"instances":[{"I1":{"x":1}}]}', ("I1", "row 0", "an object")),
        (b'{"instances":[{"C1":{"b64":"?"}}]}', ("C1", "row 0", "base64")),
        (b'{"instances":[{"C1":{"b64":1}}]}', ("C1", "row 0", "an object")),
        (b'{"instances":[{"I1":[1]},{"I1":[1,2]}]}', ("I1", "row 1", "one value")),
        (b'{"instances":[{"C1":["a","b"]}]}', ("C1", "row 0", "one value")),
        (b'{"instances":[{"tags":["a",["b"]]}]}', ("tags", "row 0", "a list")),
        (b'{"instances":[{"tags":[["b"]]}]}', ("tags", "row 0", "a list")),
        (b'{"instances":["a"]}', ("instances[0]", "text")),
        (b'{"instances":{"C1":"a"}}', ("instances", "an object")),
        (b'{"instances":[]}', ("no rows",)),
        (b'{"inputs":{}}', ("no rows",)),
        (b'{"inputs":{"C1":["a","b"],"I1":[1]}}', ("'I1'", "1 rows", "'C1'", "2")),
        (b'{"inputs":{"C1":"a"}}', ("'C1'", "a list")),
        (b'{"inputs":[1]}', ("inputs", "an object")),
        (b'{"inputs":{"C1":["a"]},"instances":[{}]}', ("either",)),
        (b"{}", ("either",)),
        (b"[]", ("a list",)),
        (b"", ("not JSON",)),
        (b'{"instances":[{"C1":"\\ud800"}]}', ("not JSON",)),
        (b'{"instances":[{"C1":"\\ud800","I1":NaN}]}', ("not JSON",)),
        (b'{"instances":[{"C1":"\xff","I1":NaN}]}', ("not JSON",)),
        (b'{"instances":' + b"[" * 100_000 + b"NaN", ("not JSON",)),
        (b'{"signature_name":"classify","instances":[{}]}', ("signature_name", "predict")),
        (b'{"signature_name":[],"instances":[{}]}', ("signature_name", "predict")),
    ],
)
def test_invalid_values_are_refused_with_the_field_name(body, messages):
    message = refused(body)
    for word in messages:
        assert word in message


def test_too_many_rows_are_refused():
    assert "51 rows" in refused({"instances": [{}] * 51})
    assert "51 rows" in refused({"inputs": {"C1": ["a"] * 51}})
    assert predict({"instances": [{}] * 50}).rows.rows == 50


@pytest.mark.parametrize("signature", ["predict", "serving_default", ""])
def test_signatures(signature):
    assert predict({"signature_name": signature, "instances": [{}]}).rows.rows == 1


def test_long_names_are_shortened_in_messages():
    assert len(refused({"instances": [{"x" * 100_000: 1}]})) < 400


@given(st.binary(max_size=200))
def test_random_bytes_are_always_refused(body):
    with pytest.raises(RequestRefused):
        predict(body)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*MODEL.columns, "b64", "x"]), inner)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(["instances", "inputs", "signature_name"]), JSON, max_size=2))
def test_any_json_is_answered_or_refused(document):
    try:
        rows = predict(json.dumps(document).encode()).rows
    except RequestRefused:
        return
    values(rows)


# ── compressed bodies ──────────────────────────────────────────────────────────────────────────


BODY = b'{"instances":[{"C1":"a"}]}'


@pytest.mark.parametrize(
    ("encoding", "body"),
    [(b"gzip", gzip.compress(BODY, mtime=0)), (b"deflate", zlib.compress(BODY)), (b"identity", BODY)],
)
def test_compressed_bodies(encoding, body):
    assert values(call(PREDICT, body, {b"content-encoding": encoding}).rows) == {"C1": [b"a"]}


@pytest.mark.parametrize(
    ("encoding", "body", "word"),
    [
        (b"gzip", BODY, "decompressed"),
        (b"gzip", gzip.compress(BODY, mtime=0)[:-9], "truncated"),
        (b"gzip", gzip.compress(BODY, mtime=0) + b"more", "followed by other data"),
        (b"gzip", gzip.compress(b" " * (LIMITS.max_body + 1), mtime=0), "larger"),
        (b"br", BODY, "'br'"),
        (b"\xff", BODY, "must be gzip"),
    ],
)
def test_invalid_compressed_bodies_are_refused(encoding, body, word):
    with pytest.raises(RequestRefused, match=word):
        call(PREDICT, body, {b"content-encoding": encoding})


def test_body_may_decompress_to_the_limit():
    body = BODY + b" " * (LIMITS.max_body - len(BODY))
    assert call(PREDICT, gzip.compress(body), {b"content-encoding": b"gzip"}).rows.rows == 1


# ── answers ────────────────────────────────────────────────────────────────────────────────────


def test_answers_by_rows_and_by_columns():
    by_rows = answered(PREDICT, b'{"instances": [{}, {}]}')
    assert (by_rows.status, header(by_rows, b"content-type")) == (200, b"application/json")
    assert header(by_rows, b"clickline-version") == b"12"
    expected = [
        {"probabilities": [0.9, 0.1], "logistic": [0.1], "logits": [-2.25], "class_ids": [0]},
        {"probabilities": [0.3, 0.7], "logistic": [0.7], "logits": [0.3], "class_ids": [1]},
    ]
    found = json.loads(by_rows.body)
    assert list(found) == ["predictions"]
    for row, wanted in zip(found["predictions"], expected, strict=True):
        assert row.keys() == wanted.keys()
        for name, numbers in wanted.items():
            np.testing.assert_array_almost_equal(row[name], numbers, decimal=6)
    by_columns = json.loads(answered(PREDICT, b'{"inputs": {"C1": ["a", "b"]}}').body)
    assert by_columns == {
        "outputs": {name: [row[name] for row in found["predictions"]] for name in expected[0]}
    }


@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=20))
def test_scores_read_back_as_the_same_bits(chances):
    probability_B = np.array(chances, dtype=np.float32)
    answer = Answer(3, probability_B - 1, probability_B)
    body = b'{"instances": [{}]}'
    found = json.loads(answered(PREDICT, body, answer=answer).body)["predictions"]
    assert (
        np.array([row["logistic"][0] for row in found], dtype=np.float32).tobytes() == probability_B.tobytes()
    )


# ── metadata and status ────────────────────────────────────────────────────────────────────────


VERSIONS = versions_of(Model(11), MODEL, names=("ads", "wide_deep"))


def get(path, versions=VERSIONS):
    found = route("GET", path)
    assert isinstance(found, Route)
    reply = found.description(versions)
    return reply.status, json.loads(reply.body)


def test_status_of_every_served_version():
    ok = {"error_code": "OK", "error_message": ""}
    new = {"version": "12", "state": "AVAILABLE", "status": ok}
    old = {"version": "11", "state": "UNLOADING", "status": ok}
    assert get("/v1/models/ads") == (200, {"model_version_status": [new, old]})
    assert get("/v1/models/wide_deep/versions/12") == (200, {"model_version_status": [new]})
    assert get("/v1/models/ads/versions/11") == (200, {"model_version_status": [old]})


@pytest.mark.parametrize("verb", ["", "/metadata"])
def test_info_endpoints_of_unknown_models(verb):
    assert get(f"/v1/models/bids{verb}") == (
        404,
        {"error": 'There is no model "bids". Available: "ads", "wide_deep".'},
    )
    assert get(f"/v1/models/ads/versions/3{verb}")[0] == 404
    assert get(f"/v1/models/ads{verb}", versions_of())[0] == 503


def test_metadata():
    status, found = get("/v1/models/ads/metadata")
    assert status == 200
    assert found["model_spec"] == {"name": "ads", "signature_name": "", "version": "12"}
    assert get("/v1/models/ads/versions/11/metadata")[1]["model_spec"]["version"] == "11"
    signatures = found["metadata"]["signature_def"]["signature_def"]
    assert signatures.keys() == {"predict", "serving_default"}
    signature = signatures["predict"]
    assert signature["method_name"] == "tensorflow/serving/predict"
    dim = {"size": "-1", "name": ""}
    assert signature["inputs"]["I1"] == {
        "dtype": "DT_FLOAT",
        "tensor_shape": {"dim": [dim], "unknown_rank": False},
        "name": "I1:0",
    }
    assert signature["inputs"]["tags"]["tensor_shape"]["dim"] == [dim, dim]
    assert signature["inputs"]["C1"]["dtype"] == "DT_STRING"
    assert set(signature["inputs"]) == set(MODEL.columns)
    assert signature["outputs"]["class_ids"]["dtype"] == "DT_INT64"
    assert signature["outputs"]["probabilities"]["tensor_shape"]["dim"][1]["size"] == "2"


# ── routes ─────────────────────────────────────────────────────────────────────────────────────


def test_targets_come_from_the_path():
    found = endpoint("/v1/models/a.b-c_1/versions/7:predict")
    assert (found.model, found.version, found.protocol) == ("a.b-c_1", 7, "tfserving_rest")
    assert endpoint(PREDICT).version is None
    assert endpoint("/v2/models/ads/versions/9/infer").version == 9
    assert endpoint("/v1/models/ads/versions/9:rank").protocol == "rank_rest"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1/models", 404),
        ("POST", "/v1/models/ads:classify", 404),
        ("POST", "/v1/models/ads/infer", 404),
        ("GET", "/v1/models/ads/labels/stable", 404),
        ("POST", "/v2/models/ads:predict", 405),
        ("GET", "/v2/models/ads/metadata", 404),
        ("GET", "/v1/models/ads:predict", 405),
        ("POST", "/v1/models/ads/metadata", 405),
        ("DELETE", "/v2/health/live", 405),
        ("GET", "/v1/models/ads/versions/x", 400),
        ("GET", "/v1/models/ads/versions/٣", 400),
        ("GET", "/v2/models/ads/versions/" + "9" * 50, 400),
        ("GET", "/v2/\ud800", 404),
    ],
)
def test_unknown_paths_are_not_found(method, path, status):
    reply = route(method, path)
    assert isinstance(reply, Response)
    assert reply.status == status
    assert json.loads(reply.body).keys() == {"error"}


@given(st.sampled_from(["GET", "POST"]), st.text(alphabet="/v12:models.xpredictnfhaly", max_size=30))
def test_any_path_is_answered(method, path):
    found = route(method, "/v1/models/" + path)
    if isinstance(found, Route) and found.endpoint is None:
        assert found.description(VERSIONS).status in (200, 404)


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("invalid", 400),
        ("unauthenticated", 401),
        ("not_found", 404),
        ("overloaded", 429),
        ("internal", 500),
        ("unavailable", 503),
        ("late", 504),
    ],
)
def test_refusals(kind, status):
    reply = endpoint(PREDICT).refuse(kind, "why é")
    assert (reply.status, json.loads(reply.body)) == (status, {"error": "why é"})
    assert (header(reply, b"www-authenticate") is not None) == (status == 401)


def test_preview_of_a_huge_value_is_cheap() -> None:
    huge = [list(range(1000)) for _ in range(3000)]
    began = time.process_time()
    assert preview(huge).startswith("[[0, 1, 2, 3")
    assert time.process_time() - began < 0.05
    assert len(preview(huge)) <= 80 and preview({"a": [1, 2]}) == "{'a': [1, 2]}"
