"""Requests and answers of Paddle Serving's clients, in every layout, against messages that are built independently."""

from __future__ import annotations

import json
import zlib
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import rest_model

from clickline.errors import RequestRefused
from clickline.features import DenseField, FeatureSpec, SlotField
from clickline.features.encoder_kernels import xxh64
from clickline.features.request_encoder import RequestEncoder
from clickline.serving.protocols.http_routes import route
from clickline.serving.protocols.paddle_common import FeedRequest
from clickline.serving.protocols.paddle_ctr import Ctr, ElasticCtr
from clickline.serving.protocols.paddle_general_model import GeneralModel
from clickline.serving.protocols.request import Limits
from clickline.wire.client_config import client_config
from servers.paddle_messages import ELASTIC_CTR, OLD_CTR, V0_2_0, V0_6, V0_9

# Captured from the unmodified paddle-serving-client 0.2.1: the same row, alone and as the first of two.
ONE_ROW = bytes.fromhex(
    "50525043000000e8000000590a4f0a4062616964752e706164646c655f73657276696e672e707265646963746f722e67656e6572616c5f6d"
    "6f64656c2e47656e6572616c4d6f64656c536572766963651209696e666572656e6365180018002082808080200a7c0a1818fbffffffffff"
    "ffffff01280030ffffffffffffffffff010a1718ffffffffffffffff7f280030ffffffffffffffffff010a1118031804280030ffffffffff"
    "ffffffff010a13180518061807280030ffffffffffffffffff010a0f1808280030ffffffffffffffffff010a0e250000c03f25000000c028"
    "013002120f7369676d6f69645f302e746d705f30"
)
TWO_ROWS = bytes.fromhex(
    "505250430000016a000000590a4f0a4062616964752e706164646c655f73657276696e672e707265646963746f722e67656e6572616c5f6d"
    "6f64656c2e47656e6572616c4d6f64656c536572766963651209696e666572656e6365180018002082808080600a7c0a1818fbffffffffff"
    "ffffff01280030ffffffffffffffffff010a1718ffffffffffffffff7f280030ffffffffffffffffff010a1118031804280030ffffffffff"
    "ffffffff010a13180518061807280030ffffffffffffffffff010a0f1808280030ffffffffffffffffff010a0e250000c03f25000000c028"
    "0130020a710a0f1801280030ffffffffffffffffff010a1718ffffffffffffffff7f280030ffffffffffffffffff010a0f1809280030ffff"
    "ffffffffffffff010a13180518061807280030ffffffffffffffffff010a0f1808280030ffffffffffffffffff010a0e250000c03f250000"
    "00c028013002120f7369676d6f69645f302e746d705f30120d70726f626162696c6974696573"
)

ROW = {"C1": [-5], "C2": [2**63 - 1], "tags": [3, 4], "4": [5, 6, 7], "5": [8], "dense_input": [1.5, -2.0]}
OTHER = {**ROW, "tags": [9], "C1": [1]}
LIMITS = Limits(max_rows=50, output_names={"logistic": "sigmoid_0.tmp_0"})
ANSWER = rest_model.ANSWER


def rows_of(
    service: type[FeedRequest], body: bytes, model: Any = rest_model.MODEL, limits: Limits = LIMITS
) -> list[Any]:
    """The rows of a request as encoded ids and floats, one list per field."""
    encoded, errors = RequestEncoder(model.features).encode(service(body, limits).decode(model).rows)
    assert not errors
    slots = []
    for ids in encoded.slots:
        offsets = range(encoded.rows + 1) if ids.offsets_B1 is None else ids.offsets_B1.tolist()
        slots.append([ids.ids_N[a:b].tolist() for a, b in pairwise(offsets)])
    return [encoded.dense_DB.tolist(), *slots]


def by_json(*rows: dict[str, list[float]]) -> list[Any]:
    """The same by ElasticCTR's JSON, whose reader is another one; its numbers are whole, so they are left out there."""
    instances = [
        {
            "slots": [
                {"slot_name": name, "feasigns": values}
                for name, values in row.items()
                if name != "dense_input"
            ]
        }
        for row in rows
    ]
    call = rest_model.call(
        "/ElasticCTRPredictionService/inference", json.dumps({"instances": instances}).encode()
    )
    encoded, errors = rest_model.ENCODER.encode(call.rows)
    assert not errors
    slots = []
    for ids in encoded.slots[:5]:
        offsets = range(encoded.rows + 1) if ids.offsets_B1 is None else ids.offsets_B1.tolist()
        slots.append([ids.ids_N[a:b].tolist() for a, b in pairwise(offsets)])
    return slots


def insts(*rows: dict[str, list[float]], messages: dict[str, Any] = V0_6, **more: Any) -> bytes:
    """A request of v0.2 to v0.6 with one instance per row."""
    request = messages["Request"](**more)
    for row in rows:
        inst = request.insts.add()
        for name, values in row.items():
            if name == "dense_input" or name.startswith("I"):
                inst.tensor_array.add(elem_type=1, shape=[len(values)], float_data=values)
            else:
                inst.tensor_array.add(elem_type=0, shape=[-1], int64_data=values)
    return request.SerializeToString()


def batch(*rows: dict[str, list[float]]) -> bytes:
    """A request of v0.6: one instance with the batch in the shapes, and a lod where rows have several values."""
    request = V0_6["Request"](log_id=0)
    inst = request.insts.add()
    for name in rows[0]:
        values = [value for row in rows for value in row[name]]
        if name == "dense_input":
            inst.tensor_array.add(elem_type=1, shape=[len(rows), 2], float_data=values)
        elif all(len(row[name]) == 1 for row in rows):
            inst.tensor_array.add(elem_type=0, shape=[len(rows), 1], int64_data=values)
        else:
            lod = np.cumsum([0, *(len(row[name]) for row in rows)]).tolist()
            inst.tensor_array.add(elem_type=0, shape=[len(values), 1], lod=lod, int64_data=values)
    return request.SerializeToString()


def named(*rows: dict[str, list[float]], **more: Any) -> bytes:
    """A request of v0.7 to v0.9; its tensors are in no particular order."""
    request = V0_9["Request"](**more)
    for name in reversed(rows[0]):
        values = [value for row in rows for value in row[name]]
        tensor = request.tensor.add(alias_name=name)
        tensor.name = "embedding_0.tmp_0" if name == "C2" else name
        if name == "dense_input":
            tensor.elem_type = 1
            tensor.shape.extend([len(rows), 2])
            tensor.float_data.extend(values)
        else:
            tensor.shape.extend([len(values), 1])
            tensor.lod.extend(np.cumsum([0, *(len(row[name]) for row in rows)]).tolist())
            tensor.int64_data.extend(values)
    return request.SerializeToString()


def test_frames_of_the_real_client_are_those_that_these_tests_build():
    for frame, rows, fetched in (
        (ONE_ROW, [ROW], ["sigmoid_0.tmp_0"]),
        (TWO_ROWS, [ROW, OTHER], ["sigmoid_0.tmp_0", "probabilities"]),
    ):
        meta_size = int.from_bytes(frame[8:12])
        assert frame[12 + meta_size :] == insts(*rows, fetch_var_names=fetched)


def test_every_layout_gives_the_same_rows():
    wanted = rows_of(GeneralModel, insts(ROW, OTHER))
    assert wanted[0] == [pytest.approx([np.log1p(1.5)] * 2), [-2.0, -2.0]]
    assert wanted[1:6] == by_json(ROW, OTHER)
    split = {name: values for name, values in ROW.items() if name != "dense_input"}
    for body in (
        insts(ROW, OTHER, messages=V0_2_0),
        TWO_ROWS[12 + 0x59 :],
        batch(ROW, OTHER),
        named(ROW, OTHER),
        insts(
            {**split, "I1": [1.5], "I2": [-2.0]}, {**split, "C1": [1], "tags": [9], "I1": [1.5], "I2": [-2.0]}
        ),
    ):
        assert rows_of(GeneralModel, body) == wanted


def test_feasign_of_a_text_gives_the_id_of_the_log():
    text = np.frombuffer(b"68fd1e64", dtype=np.uint8)
    feasign = int(np.uint64(xxh64(text, 0, text.size)).astype(np.int64))
    ids = rows_of(GeneralModel, insts({**ROW, "C1": [feasign]}))[1]
    call = rest_model.call("/v1/models/ads:predict", b'{"instances": [{"C1": "68fd1e64"}]}')
    encoded, _ = rest_model.ENCODER.encode(call.rows)
    assert ids == [encoded.slots[0].ids_N.tolist()]


def test_missing_values():
    """0 is no feasign, an empty variable has no value, NaN is no number, and a named variable may be absent."""
    missing = rows_of(GeneralModel, insts({**ROW, "C1": [0], "5": [], "dense_input": [float("nan"), 1.0]}))
    call = rest_model.call("/v1/models/ads:predict", b'{"instances": [{"I2": 1}]}')
    encoded, _ = rest_model.ENCODER.encode(call.rows)
    assert missing[1] == [encoded.slots[0].ids_N.tolist()]
    assert missing[5] == [encoded.slots[4].ids_N.tolist()]
    assert missing[0] == encoded.dense_DB.tolist()
    assert rows_of(GeneralModel, named({"dense_input": [float("nan"), 1.0]}))[1:6] == [
        [ids.ids_N.tolist()] for ids in encoded.slots[:5]
    ]


@pytest.mark.parametrize(
    ("kind", "field", "content"),
    [
        (0, "tensor_content", np.array([7, 8], dtype="<i8").tobytes()),
        (2, "tensor_content", np.array([7, 8], dtype="<i4").tobytes()),
        (2, "int_data", [7, 8]),
        (7, "tensor_content", b"\7\x08"),
    ],
)
def test_integers_of_other_types(kind, field, content):
    request = V0_9["Request"]()
    request.tensor.add(name="5", elem_type=kind, shape=[2, 1], **{field: content})
    assert rows_of(GeneralModel, request.SerializeToString())[5] == by_json({"5": [7]}, {"5": [8]})[4]


@pytest.mark.parametrize(
    ("kind", "field", "content"),
    [
        (3, "float64_data", [1.5, -2.0]),
        (0, "int64_data", [1, -2]),
        (5, "tensor_content", np.array([1.5, -2.0], dtype="<f2").tobytes()),
        (1, "tensor_content", np.array([1.5, -2.0], dtype="<f4").tobytes()),
    ],
)
def test_numbers_of_other_types(kind, field, content):
    request = V0_9["Request"]()
    request.tensor.add(name="I2", elem_type=kind, shape=[2, 1], **{field: content})
    assert rows_of(GeneralModel, request.SerializeToString())[0][1] == [1.5 if kind else 1.0, -2.0]


def refusal(service: type[FeedRequest], body: bytes, **more: Any) -> str:
    with pytest.raises(RequestRefused) as caught:
        rows_of(service, body, **more)
    assert caught.value.kind == "invalid"
    return str(caught.value)


def tensors(*given: dict[str, Any]) -> bytes:
    return V0_9["Request"](tensor=given).SerializeToString()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "no rows"),
        (b"\x0a\x05\x0a", "malformed"),
        (b"\x0a\x02\x0a\x05", "malformed at instance 0"),
        (insts({"C1": [1]}), r"has 1 tensors; this model takes 6, or 7 with --per-field"),
        (insts({**ROW, "C1": [1, 2]}), "C1 has several values in a row; it takes one value per row"),
        (insts({**ROW, "dense_input": [1.0]}), "dense_input has 1 values in 1 rows; allowed: 2 in each"),
        (insts({**ROW, "dense_input": [float("inf"), 1.0]}), "dense_input contains infinity"),
        (tensors({"name": "C9", "int64_data": [1], "shape": [1, 1]}), '"C9" is not a field of this model'),
        (
            tensors({"name": "C1", "int64_data": [1], "shape": [2, 1]}),
            "C1 has 1 values, which do not match its shape",
        ),
        (
            tensors({"name": "C1", "int64_data": [1], "shape": [1, 1], "lod": [0, 2]}),
            "C1 has a lod that does not",
        ),
        (
            tensors({"name": "tags", "int64_data": [1, 2], "shape": [2, 1], "lod": [0, 2, 1, 2]}),
            "tags has a lod",
        ),
        (
            tensors({"name": "C1", "elem_type": 1, "float_data": [1], "shape": [1, 1]}),
            "C1 has elem_type 1; .* int64",
        ),
        (tensors({"name": "C1", "elem_type": 20, "data": ["a"], "shape": [1, 1]}), "C1 has elem_type 20"),
        (
            tensors({"name": "C1", "elem_type": 3, "tensor_content": b"1234567", "shape": [1]}),
            "C1 has 0 values",
        ),
        (tensors(*[{"name": "C1", "int64_data": [1], "shape": [1, 1]}] * 2), "C1 is sent twice"),
        (
            tensors(
                {"name": "I1", "elem_type": 1, "float_data": [1], "shape": [1, 1]},
                {"name": "dense_input", "elem_type": 1, "float_data": [1, 2], "shape": [1, 2]},
            ),
            "sent twice, by itself or within dense_input",
        ),
        (
            tensors(
                {"name": "C1", "int64_data": [1, 2], "shape": [2, 1]},
                {"name": "C2", "int64_data": [1, 2], "shape": [2]},
            ),
            "C2 has 1 rows and the variables before it have 2",
        ),
        (tensors({"name": "C1", "int64_data": [1] * 51, "shape": [51, 1]}), "51 rows; allowed: up to 50"),
        (insts(*[ROW] * 51), "51 rows; allowed: up to 50"),
        (tensors({"name": "C1", "int64_data": [], "shape": [0, 1]}), "no rows"),
        (
            named(ROW, fetch_var_names=["x"]),
            'There is no fetch variable "x". Available: logistic, .*sigmoid_0.tmp_0',
        ),
    ],
)
def test_refused_requests(body, message):
    with pytest.raises(RequestRefused, match=message) as caught:
        GeneralModel(body, LIMITS).decode(rest_model.MODEL)
    assert caught.value.kind == "invalid"


def test_unknown_variables_can_be_ignored():
    body = tensors(
        {"name": "C9", "int64_data": [1], "shape": [1, 1]}, {"name": "5", "int64_data": [8], "shape": [1, 1]}
    )
    limits = Limits(ignore_unknown=True)
    assert rows_of(GeneralModel, body, limits=limits)[5] == by_json({"5": [8]})[4]


# ── answers ────────────────────────────────────────────────────────────────────────────────────


def answered(service: type[FeedRequest], body: bytes) -> bytes:
    request = service(body, LIMITS)
    request.decode(rest_model.MODEL)
    return request.encode(ANSWER).body


NAMES = ["sigmoid_0.tmp_0", "probabilities", "class_ids"]
VALUES = ([0.1, 0.7], [0.9, 0.1, 0.3, 0.7], [0, 1])


def check_tensors(tensors: Any) -> None:
    for tensor, values in zip(tensors, VALUES, strict=True):
        integers = isinstance(values[0], int)
        assert list(tensor.int64_data if integers else tensor.float_data) == pytest.approx(values)
        assert (tensor.elem_type, list(tensor.shape)) == (0 if integers else 1, [2, len(values) // 2])


def test_an_answer_suits_both_releases_whose_requests_are_the_same():
    body = answered(GeneralModel, insts(ROW, OTHER, fetch_var_names=NAMES))
    check_tensors(V0_2_0["Response"].FromString(body).insts[0].tensor_array)
    outputs = V0_6["Response"].FromString(body).outputs
    assert [one.engine_name for one in outputs] == ["general_infer_0"]
    check_tensors(outputs[0].insts[0].tensor_array)


def test_answers_of_later_releases():
    body = answered(GeneralModel, insts(ROW, OTHER, fetch_var_names=NAMES, log_id=7))
    response = V0_6["Response"].FromString(body)
    assert len(response.outputs[0].insts) == 1
    check_tensors(response.outputs[0].insts[0].tensor_array)
    response = V0_9["Response"].FromString(answered(GeneralModel, named(ROW, OTHER, fetch_var_names=NAMES)))
    check_tensors(response.outputs[0].tensor)
    assert [(one.name, one.alias_name) for one in response.outputs[0].tensor] == [
        ("logistic", "sigmoid_0.tmp_0"),
        ("probabilities", "probabilities"),
        ("class_ids", "class_ids"),
    ]
    everything = V0_9["Response"].FromString(answered(GeneralModel, named(ROW, OTHER))).outputs[0].tensor
    assert [one.alias_name for one in everything] == [
        "sigmoid_0.tmp_0",
        "probabilities",
        "logits",
        "class_ids",
    ]


# ── ElasticCTR's services ──────────────────────────────────────────────────────────────────────


def slots(*rows: dict[str, list[int]]) -> bytes:
    request = ELASTIC_CTR["Request"]()
    for row in rows:
        instance = request.instances.add()
        for name, values in row.items():
            instance.slots.add(slot_name=name, feasigns=values)
    return request.SerializeToString()


def test_slots_in_protobuf_are_those_in_json():
    """By number, name or column; slots may be missing, and 0 is no value."""
    rows = [{"1": [7], "30": [3, 4], "4": [5]}, {"C2": [9], "4": [0], "5": [6]}, {}]
    assert rows_of(ElasticCtr, slots(*rows))[1:6] == by_json(*rows)
    response = ELASTIC_CTR["Response"].FromString(answered(ElasticCtr, slots(*rows[:2])))
    assert [(one.prob0, one.prob1) for one in response.predictions] == [
        pytest.approx(pair) for pair in ((0.9, 0.1), (0.3, 0.7))
    ]
    assert (response.err_code, response.err_msg) == (0, "")


def test_ambiguous_columns_are_refused():
    both = FeatureSpec((DenseField("n", "C1", "none"),), (SlotField("C1", "C1", 1),))
    model = rest_model.Model()
    model.features, model.columns = both, both.columns
    body = slots({"C1": [1]})
    with pytest.raises(
        RequestRefused, match="C1 is a feasign, but this model reads it as a category and as a number"
    ):
        ElasticCtr(body, LIMITS).decode(model)
    with pytest.raises(Exception, match="C1: this model reads it as a category and as a number"):
        client_config(both, {}, {}, per_field=False)
    response = ELASTIC_CTR["Response"].FromString(ElasticCtr.error_body("wrong"))
    assert (response.err_code, response.err_msg) == (-1, "wrong")


def ids(*rows: tuple[list[int], list[float]]) -> bytes:
    request = OLD_CTR["Request"]()
    for sparse, dense in rows:
        request.instances.add(sparse_ids=sparse, dense_ids=dense)
    return request.SerializeToString()


def test_ids_by_position():
    spec = FeatureSpec(
        (DenseField("d", "d", "none"),),
        (SlotField("2", "2", 2, "feasign"), SlotField("3", "3", 3, "feasign")),
    )
    model = rest_model.Model()
    model.features, model.columns = spec, spec.columns
    found = rows_of(Ctr, ids(([5, 6], [0.5]), ([7, 8], [0.25])), model)
    by_slot = rows_of(ElasticCtr, slots({"2": [5], "3": [6]}, {"2": [7], "3": [8]}), model)
    assert found == [[[0.5, 0.25]], *by_slot[1:]]
    assert "sparse_ids has 1 values in 1 rows; allowed: 2 in each" in refusal(
        Ctr, ids(([5], [0.5])), model=model
    )
    assert "dense_input has 0 values" in refusal(Ctr, ids(([5, 6], [])), model=model)
    assert "Python 2's hashes modulo 1000001" in refusal(Ctr, ids(([5, 6], [])))


# ── HTTP ───────────────────────────────────────────────────────────────────────────────────────

PROTO = {b"content-type": b"application/proto"}


def posted(path: str, body: bytes, headers: dict[bytes, bytes], model: Any = rest_model.MODEL) -> Any:
    request = rest_model.endpoint(path).request(body, headers, LIMITS)
    request.decode(model)
    return request.encode(ANSWER)


def test_general_model_over_http_in_protobuf_and_json():
    path = "/GeneralModelService/inference"
    response = posted(path, named(ROW, OTHER, fetch_var_names=NAMES), PROTO)
    assert response.headers[0] == (b"content-type", b"application/proto")
    check_tensors(V0_9["Response"].FromString(response.body).outputs[0].tensor)
    document = {
        "tensor": [
            {"name": "C1", "shape": [2, 1], "elem_type": 0, "int64_data": [1, "2"]},
            {"alias_name": "dense_input", "shape": [2, 2], "elem_type": 1, "float_data": [1.5, 2, 3, 4]},
        ],
        "fetch_var_names": ["sigmoid_0.tmp_0"],
        "log_id": 10000,
    }
    response = posted(path, json.dumps(document).encode(), {b"content-type": b"application/json"})
    assert json.loads(response.body) == {
        "outputs": [
            {
                "tensor": [
                    {
                        "float_data": pytest.approx([0.1, 0.7]),
                        "elem_type": 1,
                        "shape": [2, 1],
                        "name": "logistic",
                        "alias_name": "sigmoid_0.tmp_0",
                    }
                ],
                "engine_name": "general_infer_0",
            }
        ],
        "err_no": 0,
    }
    old = {"insts": [{"tensor_array": [{"int64_data": [1], "elem_type": 0, "shape": [1]}] * 5}] * 2}
    old["insts"][0]["tensor_array"].append({"float_data": [1, 2], "elem_type": 1, "shape": [2]})
    response = posted(path, json.dumps({"insts": [old["insts"][0]] * 2}).encode(), {})
    assert json.loads(response.body)["outputs"][0]["insts"][0]["tensor_array"][3]["int64_data"] == [0, 1]


def test_large_answers_over_http_are_compressed_if_the_client_accepts_it():
    headers = {**PROTO, b"accept-encoding": b"gzip, deflate"}
    path = "/GeneralModelService/inference"
    assert (b"content-encoding", b"gzip") not in posted(path, named(ROW, OTHER), headers).headers
    request = rest_model.endpoint(path).request(named(*[ROW] * 50), headers, LIMITS)
    request.decode(rest_model.MODEL)
    response = request.encode(rest_model.Answer(12, np.zeros(50, "f4"), np.zeros(50, "f4")))
    assert response.headers[-1] == (b"content-encoding", b"gzip")
    tensor = V0_9["Response"].FromString(zlib.decompress(response.body, 31)).outputs[0].tensor[0]
    assert list(tensor.shape) == [50, 1]


def test_elasticctr_over_http_in_protobuf_and_json():
    path = "/ElasticCTRPredictionService/inference"
    response = ELASTIC_CTR["Response"].FromString(posted(path, slots({"5": [1]}, {"5": [2]}), PROTO).body)
    assert [one.prob1 for one in response.predictions] == pytest.approx([0.1, 0.7])
    body = b'{"instances": [{"slots": [{"slot_name": "5", "feasigns": [1]}]}, {"slots": []}]}'
    assert json.loads(posted(path, body, {}).body)["predictions"][1]["prob1"] == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/GeneralModelService/inference", b"[]", "the body is a list; it must be an object"),
        (
            "/GeneralModelService/inference",
            b'{"tensor": [{"shape": "x"}]}',
            "the body does not match its message",
        ),
        ("/CTRPredictionService/inference", b'{"instances": 1}', "the body does not match its message"),
        ("/GeneralModelService/inference", b"{}", "no rows"),
    ],
)
def test_refused_json(path, body, message):
    found = rest_model.endpoint(path)
    model = rest_model.Model()
    model.features = FeatureSpec((), (SlotField("5", "5", 5, "feasign"),))
    with pytest.raises(RequestRefused, match=message) as caught:
        found.request(body, {}, LIMITS).decode(model)
    document = json.loads(found.refuse(caught.value.kind, str(caught.value)).body)
    assert message in document["err_msg"] and 400 in document.values()


def test_only_post_is_allowed():
    response = route("GET", "/GeneralModelService/inference")
    assert response.status == 405 and dict(response.headers)[b"allow"] == b"POST"
