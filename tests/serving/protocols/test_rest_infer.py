"""The Open Inference Protocol over HTTP, with tritonclient's request builder and response parser."""

from __future__ import annotations

import gzip
import json
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rest_model import (
    FEATURES,
    LIMITS,
    MODEL,
    Model,
    answered,
    call,
    encoded,
    header,
    same,
    values,
    versions_of,
)
from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput, InferResult
from tritonclient.utils import np_to_triton_dtype

from clickline.errors import RequestRefused
from clickline.features import Encoder
from clickline.serving.protocols.http_common import Route
from clickline.serving.protocols.http_routes import route
from clickline.serving.protocols.request import Limits

INFER = "/v2/models/ads/infer"
HEADER = b"inference-header-content-length"


def tensor(name, array, binary=True):
    given_ = InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    return given_.set_data_from_numpy(array, binary_data=binary)


def built(inputs, **options):
    """A request as tritonclient writes it."""
    body, json_size = InferenceServerClient.generate_request_body(inputs, **options)
    return body, ({} if json_size is None else {HEADER: str(json_size).encode()})


def infer(inputs, limits=LIMITS, **options):
    return call(INFER, *built(inputs, **options), limits)


def refused(body, headers=None, limits=LIMITS) -> str:
    with pytest.raises(RequestRefused) as found:
        call(INFER, body if isinstance(body, bytes) else json.dumps(body).encode(), headers, limits)
    assert found.value.kind == "invalid"
    return str(found.value)


def texts(*given_):
    return np.array(given_, dtype=np.object_)


# ── values ─────────────────────────────────────────────────────────────────────────────────────

COLUMNS = {
    "I1": np.array([3, np.nan, -1], dtype=np.float32),
    "I2": np.array([[7], [8], [9]], dtype=np.int64),
    "C1": texts(b"ab", b"", "é".encode()),
    "C2": texts([b"x"], [b"\xff\x00"], [b"z"]),
    "tags": texts([b"a", b"bb"], [b"", b"c"], [b"", b""]),
}
ROWS = [
    {"I1": 3.0, "I2": 7, "C1": "ab", "C2": b"x", "tags": ["a", "bb"]},
    {"I1": None, "I2": 8, "C1": "", "C2": b"\xff\x00", "tags": ["c"]},
    {"I1": -1.0, "I2": 9, "C1": "é", "C2": b"z", "tags": []},
]


def test_binary_tensors():
    rows = infer([tensor(name, array) for name, array in COLUMNS.items()]).rows
    assert values(rows) == {
        "I1": [3.0, None, -1.0],
        "I2": [7, 8, 9],
        "C1": [b"ab", None, "é".encode()],
        "C2": [b"x", b"\xff\x00", b"z"],
        "tags": [[b"a", b"bb"], [None, b"c"], [None, None]],
    }
    assert same(encoded(rows), Encoder(FEATURES).encode_values(ROWS)[0])


def test_json_and_binary_tensors_in_one_request():
    mixed = [
        tensor("C1", COLUMNS["C1"], binary=False),
        tensor("C2", COLUMNS["C2"]),
        tensor("I1", COLUMNS["I1"]),
        tensor("I2", COLUMNS["I2"], binary=False),
        tensor("tags", COLUMNS["tags"], binary=False),
    ]
    assert same(encoded(infer(mixed).rows), Encoder(FEATURES).encode_values(ROWS)[0])


def test_flat_and_nested_json():
    flat = {"name": "tags", "shape": [2, 2], "datatype": "BYTES", "data": ["a", "b", "c", ""]}
    nested = {**flat, "data": [["a", "b"], ["c", ""]]}
    column = {"name": "I1", "shape": [2, 1], "datatype": "FP32", "data": [[1.5], [None]]}
    for form in (flat, nested):
        rows = call(INFER, json.dumps({"inputs": [form, column]}).encode()).rows
        assert values(rows) == {"tags": [[b"a", b"b"], [b"c", None]], "I1": [1.5, None]}
    nan = b'{"inputs":[{"name":"I1","shape":[2],"datatype":"FP64","data":[NaN,2]}]}'
    assert values(call(INFER, nan).rows) == {"I1": [None, 2.0]}


@pytest.mark.parametrize("dtype", ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"])
@pytest.mark.parametrize("binary", [True, False])
def test_every_numeric_type(dtype, binary):
    array = np.array([1, 0, 1], dtype=dtype)
    rows = infer([tensor("I2", array, binary), tensor("C1", array, binary)]).rows
    found = encoded(rows)
    reference, _ = Encoder(FEATURES).encode_values([{"I2": v, "C1": str(v)} for v in (1, 0, 1)])
    assert same(found, reference)


def test_large_unsigned_numbers_keep_every_digit():
    array = np.array([2**64 - 1, 5], dtype=np.uint64)
    assert values(infer([tensor("C1", array)]).rows) == {"C1": [b"18446744073709551615", b"5"]}
    several = np.array([[2**63, 5], [1, 2]], dtype=np.uint64)
    assert values(infer([tensor("4", several)]).rows) == {"4": [[b"9223372036854775808", b"5"], [b"1", b"2"]]}


def test_numbers_do_not_have_to_be_aligned():
    head = tensor("C1", texts(b"abc", b"d"))
    assert values(infer([head, tensor("I1", np.array([1.5, 2.5]))]).rows)["I1"] == [1.5, 2.5]


@given(st.lists(st.binary(max_size=20), min_size=1, max_size=20), st.booleans())
def test_any_bytes_are_valid_texts(given_, matrix):
    array = texts(*([value] for value in given_)) if matrix else texts(*given_)
    assert values(infer([tensor("C1", array)]).rows) == {"C1": [value or None for value in given_]}


def test_compressed_with_binary_data():
    body, headers = built([tensor("C1", COLUMNS["C1"])])
    headers[b"content-encoding"] = b"gzip"
    assert values(call(INFER, gzip.compress(body), headers).rows)["C1"][0] == b"ab"


# ── refusals ───────────────────────────────────────────────────────────────────────────────────


def one(**changes):
    given_ = {"name": "C1", "shape": [2], "datatype": "BYTES", "data": ["a", "b"], **changes}
    return {"inputs": [{key: value for key, value in given_.items() if value is not ...}]}


@pytest.mark.parametrize(
    ("document", "messages"),
    [
        (one(name="tag"), ("'tag'", "'tags'")),
        (one(name=7), ("name",)),
        (one(datatype="STRING"), ("'C1'", "'STRING'", "BYTES")),
        (one(datatype=...), ("'C1'", "datatype")),
        (one(shape=...), ("'C1'", "shape")),
        (one(shape=[2, 1, 1]), ("'C1'", "shape")),
        (one(shape=[-2]), ("'C1'", "shape")),
        (one(shape=[2, 0]), ("'C1'", "shape")),
        (one(shape=[True]), ("'C1'", "shape")),
        (one(shape=[2**62]), ("4611686018427387904 rows", "50")),
        (one(shape=[2, 2**62]), ("'C1'", "2 values")),
        (one(shape=[3]), ("'C1'", "2 values", "3")),
        (one(shape=[0], data=[]), ("no rows",)),
        (one(shape=[60], data=["a"] * 60), ("60 rows", "50")),
        (one(data="a"), ("'C1'", "text")),
        (one(data=["a", 7]), ("'C1'", "BYTES", "a number", "row 1")),
        (one(data=[["a"], "b"]), ("'C1'", "a list", "row 0")),
        (one(data=[[["a"]], [["b"]]]), ("'C1'", "a list")),
        (one(data=...), ("'C1'", "either")),
        (one(datatype="FP32"), ("'C1'", "FP32", "text", "row 0")),
        (one(datatype="INT32", data=[1, 1.5]), ("'C1'", "INT32", "row 1")),
        (one(shape=[1, 2]), ("C1", "2 values", "row 0")),
        (one(parameters={"binary_data_size": 5}), ("'C1'", "either")),
        (one(data=..., parameters={"binary_data_size": 5}), ("'C1'", "0 bytes")),
        (one(data=..., parameters={"shared_memory_region": "x"}), ("'C1'", "shared memory")),
        (one(parameters=[]), ("parameters", "'C1'")),
        ({"inputs": []}, ("inputs",)),
        ({"inputs": {}}, ("inputs",)),
        ({"inputs": ["x"]}, ("each input",)),
        ({"inputs": one()["inputs"] * 2}, ("'C1'", "twice")),
        (
            {"inputs": [*one()["inputs"], *one(name="C2", shape=[1], data=["a"])["inputs"]]},
            ("'C2'", "1 rows"),
        ),
        ({**one(), "outputs": [{"name": "score"}]}, ("score", "probabilities")),
        ({**one(), "outputs": ["logits"]}, ("outputs",)),
        ({**one(), "id": 7}, ("id",)),
        ([], ("a list",)),
    ],
)
def test_invalid_values_are_refused_with_the_field_name(document, messages):
    message = refused(document)
    for word in messages:
        assert word in message


def test_infinity_is_refused():
    body, headers = built([tensor("I1", np.array([1, np.inf], dtype=np.float32))])
    message = refused(body, headers)
    assert "I1" in message and "row 1" in message
    assert "I1" in refused(b'{"inputs":[{"name":"I1","shape":[1],"datatype":"FP32","data":[1e999]}]}')


def test_unknown_inputs_are_ignored_if_configured():
    ignoring = Limits(max_rows=50, ignore_unknown=True)
    given_ = [tensor("X", texts(b"zzz", b"y")), tensor("C1", texts(b"a", b"b"))]
    assert values(infer(given_, ignoring).rows) == {"C1": [b"a", b"b"]}


@pytest.mark.parametrize("length", [b"x", b"-1", b"", b"99999", b"9" * 30, b"\xff"])
def test_invalid_length_header_is_refused(length):
    body, headers = built([tensor("C1", texts(b"a"))])
    assert "Inference-Header-Content-Length" in refused(body, {**headers, HEADER: length})


def test_binary_data_must_fit_exactly():
    body, headers = built([tensor("C1", texts(b"a", b"b")), tensor("I1", np.array([1, 2], dtype=np.float32))])
    assert "'I1'" in refused(body[:-1], headers)
    assert "1 bytes" in refused(body + b"x", headers)
    half, half_headers = built([InferInput("I1", [3], "FP32").set_shape([2])])
    assert "'I1'" in refused(half, half_headers)


@pytest.mark.parametrize(
    ("raw", "shape", "word"),
    [
        (struct.pack("<I1sI1s", 1, b"a", 2, b"b"), [2], "row 1"),
        (struct.pack("<I1sI1s", 0xFFFFFFFF, b"a", 1, b"b"), [2], "row 0"),
        (struct.pack("<I6s", 6, b"abcdef"), [2], "row 1"),
        (struct.pack("<I1sI1s", 1, b"a", 0, b"b"), [2], "after the last row"),
        (b"\0\0\0", [1], "3 bytes"),
    ],
)
def test_texts_with_wrong_lengths_are_refused(raw, shape, word):
    document = {
        "inputs": [
            {"name": "C1", "shape": shape, "datatype": "BYTES", "parameters": {"binary_data_size": len(raw)}}
        ]
    }
    head = json.dumps(document).encode()
    message = refused(head + raw, {HEADER: str(len(head)).encode()})
    assert "'C1'" in message and word in message


GOOD, GOOD_HEADERS = built([tensor(name, array) for name, array in COLUMNS.items()])


@given(st.integers(0, len(GOOD) - 1), st.integers(0, 255), st.integers(0, 3))
def test_request_with_a_changed_byte_is_answered_or_refused(place, byte, cut):
    body = GOOD[:place] + bytes([byte]) + GOOD[place + 1 : len(GOOD) - cut]
    try:
        rows = call(INFER, body, GOOD_HEADERS).rows
    except RequestRefused:
        return
    values(rows)


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 2**65)
    | st.floats()
    | st.sampled_from(["C1", "FP32", "BYTES", ""]),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=6,
)
TENSORS = st.fixed_dictionaries(
    {"name": st.sampled_from(MODEL.columns)},
    optional={
        "shape": st.one_of(ANYTHING, st.lists(st.integers(0, 3), min_size=1, max_size=2)),
        "datatype": st.one_of(ANYTHING, st.sampled_from(["FP32", "BYTES", "INT64", "BOOL"])),
        "data": ANYTHING,
        "parameters": st.one_of(
            ANYTHING, st.fixed_dictionaries({"binary_data_size": st.one_of(ANYTHING, st.integers(0, 9))})
        ),
    },
)


@given(st.lists(TENSORS, max_size=3), st.binary(max_size=20), ANYTHING)
def test_any_tensors_are_answered_or_refused(tensors, raw, outputs):
    head = json.dumps({"inputs": tensors, "outputs": outputs}).encode()
    try:
        rows = call(INFER, head + raw, {HEADER: str(len(head)).encode()}).rows
    except RequestRefused:
        return
    values(rows)


# ── answers ────────────────────────────────────────────────────────────────────────────────────


def result(inputs, **options) -> InferResult:
    reply = answered(INFER, *built(inputs, **options))
    assert reply.status == 200
    length = header(reply, HEADER)
    return InferResult.from_response_body(reply.body, header_length=None if length is None else int(length))


EXPECTED = {
    "probabilities": np.array([[0.9, 0.1], [0.3, 0.7]], dtype=np.float32),
    "logistic": np.array([[0.1], [0.7]], dtype=np.float32),
    "logits": np.array([[-2.25], [0.3]], dtype=np.float32),
    "class_ids": np.array([[0], [1]]),
}


@pytest.mark.parametrize("binary", [True, False])
def test_answers_are_read_by_tritonclient(binary):
    options = {} if binary else {"outputs": [InferRequestedOutput(n, binary_data=False) for n in EXPECTED]}
    found = result([tensor("C1", texts(b"a", b"b"))], request_id="r-1", **options)
    for name, array in EXPECTED.items():
        got = found.as_numpy(name)
        assert got.dtype == array.dtype and got.shape == array.shape
        np.testing.assert_allclose(got, array, atol=1e-6)
    response = found.get_response()
    assert (response["model_name"], response["model_version"], response["id"]) == ("ads", "12", "r-1")


def test_only_requested_outputs_are_returned():
    wanted = [
        InferRequestedOutput("logits", binary_data=True),
        InferRequestedOutput("logistic", binary_data=False),
    ]
    found = result([tensor("C1", texts(b"a", b"b"))], outputs=wanted)
    names = [(out["name"], "data" in out) for out in found.get_response()["outputs"]]
    assert names == [("logits", False), ("logistic", True)]
    assert "id" not in found.get_response()
    assert found.as_numpy("logits").tolist() == [[-2.25], [np.float32(0.3)]]


def test_plain_json_is_answered_in_plain_json():
    reply = answered(INFER, json.dumps(one()).encode())
    assert header(reply, b"content-type") == b"application/json" and header(reply, HEADER) is None
    found = json.loads(reply.body)
    assert [out["name"] for out in found["outputs"]] == list(EXPECTED)
    assert found["outputs"][0] == {
        "name": "probabilities",
        "datatype": "FP32",
        "shape": [2, 2],
        "data": pytest.approx([0.9, 0.1, 0.3, 0.7]),
    }


# ── metadata and health ────────────────────────────────────────────────────────────────────────


def get(path, *models):
    found = route("GET", path)
    assert isinstance(found, Route)
    reply = found.description(versions_of(*models))
    return reply.status, json.loads(reply.body)


def test_health_and_readiness():
    assert get("/v2/health/live", MODEL) == get("/v2/health/live") == (200, {"live": True})
    assert get("/v2/health/ready", MODEL) == (200, {"ready": True})
    assert get("/v2/health/ready") == (503, {"ready": False})
    assert get("/v2/models/ads/ready", MODEL) == (200, {"name": "ads", "ready": True})
    assert get("/v2/models/ads/versions/12/ready", MODEL)[0] == 200
    assert get("/v2/models/ads/versions/11/ready", MODEL)[0] == 404
    assert get("/v2/models/ads/versions/11/ready", Model(11), MODEL)[0] == 200
    assert get("/v2/models/ads/ready") == (503, {"name": "ads", "ready": False})
    assert get("/v2/models/bids/ready")[0] == 404


def test_metadata():
    status, found = get("/v2", MODEL)
    assert status == 200 and found["name"] == "clickline"
    assert found["extensions"] == ["binary_tensor_data"]
    status, found = get("/v2/models/ads/versions/12", Model(11), MODEL)
    assert status == 200
    assert (found["name"], found["versions"]) == ("ads", ["11", "12"])
    assert get("/v2/models/ads/versions/11", Model(11), MODEL) == (200, found)
    assert get("/v2/models/ads/versions/10", Model(11), MODEL)[0] == 404
    inputs = {given_["name"]: given_ for given_ in found["inputs"]}
    assert list(inputs) == list(MODEL.columns)
    assert inputs["I1"] == {"name": "I1", "datatype": "FP32", "shape": [-1]}
    assert inputs["tags"] == {"name": "tags", "datatype": "BYTES", "shape": [-1, -1]}
    assert found["outputs"][0] == {"name": "probabilities", "datatype": "FP32", "shape": [-1, 2]}
