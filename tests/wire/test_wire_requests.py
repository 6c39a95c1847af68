"""Values of decoded requests, and messages for invalid ones. The rest is in test_wire_fuzz.py."""

from __future__ import annotations

import re

import numpy as np
import pytest
from naive_requests import tables

from clickline.errors import RequestRefused
from clickline.records import FLOAT32, INTEGER, TEXT
from clickline.wire.messages import ModelInferRequest, PredictRequest, RankRequest, TensorProto
from clickline.wire.request_reader import RequestReader, top_level_fields

COLUMNS = ("I1", "C1", "tags")
FLOAT, STRING, INT64, UINT64 = 1, 7, 9, 23


def tensor(dtype: int, shape: tuple[int, ...], **lists) -> TensorProto:
    built = TensorProto(dtype=dtype, **lists)
    for size in shape:
        built.tensor_shape.dim.add(size=size)
    return built


def predict(**inputs) -> bytes:
    request = PredictRequest()
    for name, value in inputs.items():
        request.inputs[name].CopyFrom(value)
    return request.SerializeToString()


def read(body: bytes, max_rows: int = 100, ignore: bool = False):
    return RequestReader.of(COLUMNS).tensors(body, 2, max_rows, ignore)


def infer(body: ModelInferRequest, max_rows: int = 100, ignore: bool = False):
    return RequestReader.of(COLUMNS).inputs(body.SerializeToString(), max_rows, ignore)


def refusal(call, *args) -> str:
    with pytest.raises(RequestRefused) as refused:
        call(*args)
    assert refused.value.kind == "invalid"
    return str(refused.value)


def test_texts_stay_in_the_request_and_numbers_are_decoded():
    body = predict(
        I1=tensor(FLOAT, (2,), float_val=[1.5, float("nan")]),
        C1=tensor(STRING, (2, 1), string_val=[b"68fd1e64", b""]),
    )
    rows = read(body)
    assert rows.rows == 2 and rows.kind_C.tolist() == [FLOAT32, TEXT, 0] and not rows.multi
    assert rows.data.tobytes() == body
    assert tables(rows, COLUMNS)["C1"] == [[b"68fd1e64"], [b""]]
    np.testing.assert_array_equal(rows.numbers_CB[0], [1.5, np.nan])


def test_multi_valued_and_uint64_columns_are_kept_separately():
    rows = read(
        predict(
            tags=tensor(STRING, (2, 2), string_val=[b"a", b"b", b"c", b""]),
            C1=tensor(UINT64, (2,), uint64_val=[5, 2**64 - 1]),
        )
    )
    assert tables(rows, COLUMNS) == {"tags": [[b"a", b"b"], [b"c", b""]], "C1": [[5], [2**64 - 1]]}
    assert rows.kind_C.tolist() == [0, 0, 0]


def test_single_value_fills_a_tensor():
    rows = read(predict(I1=tensor(FLOAT, (3,), float_val=[2.0]), C1=tensor(INT64, (3, 1), int64_val=[-7])))
    assert tables(rows, COLUMNS) == {"I1": [[2.0]] * 3, "C1": [[-7]] * 3}
    assert rows.kind_C.tolist() == [FLOAT32, INTEGER, 0]


def test_value_without_a_shape_is_one_row():
    assert tables(read(predict(I1=TensorProto(dtype=FLOAT, float_val=[4.0]))), COLUMNS) == {"I1": [[4.0]]}


def test_last_of_equal_names_wins():
    body = predict(I1=tensor(FLOAT, (5,), float_val=range(5))) + predict(
        I1=tensor(STRING, (1,), string_val=[b"x"])
    )
    assert tables(read(body), COLUMNS) == {"I1": [[b"x"]]}


def test_context_and_candidates_of_a_ranking_request():
    request = RankRequest(top_k=3)
    request.context["I1"].CopyFrom(tensor(FLOAT, (1,), float_val=[1.0]))
    request.candidates["C1"].CopyFrom(tensor(STRING, (2,), string_val=[b"a", b"b"]))
    body = request.SerializeToString()
    reader = RequestReader.of(COLUMNS)
    assert tables(reader.tensors(body, 2, 10, False), COLUMNS) == {"I1": [[1.0]]}
    assert tables(reader.tensors(body, 3, 10, False), COLUMNS) == {"C1": [[b"a"], [b"b"]]}
    assert reader.tensors_if_any(RankRequest().SerializeToString(), 2, 10, False) is None


def test_top_level_fields_are_in_order():
    request = PredictRequest(output_filter=[f"o{n}" for n in range(20)])
    request.model_spec.name = "ads"
    body = request.SerializeToString()
    assert [piece for field, piece in top_level_fields(body, 1, 3) if field == 3] == [
        f"o{n}".encode() for n in range(20)
    ]
    assert list(top_level_fields(RankRequest(top_k=300).SerializeToString(), 4)) == [(4, 300)]
    assert list(top_level_fields(b"", 1)) == []


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            {"Tag": tensor(FLOAT, (1,), float_val=[1])},
            '"Tag" is not a field of this model. Did you mean "tags"?',
        ),
        (
            {"weight": tensor(FLOAT, (1,), float_val=[1])},
            '"weight" is not a field of this model. Its fields: I1, C1, tags.',
        ),
        ({}, "The request has no rows. Send at least one field of the model, such as I1."),
        ({"I1": tensor(FLOAT, (0,))}, "The request has no rows: its tensors are empty."),
        (
            {"I1": tensor(FLOAT, (2,), float_val=[1, float("-inf")])},
            "I1 contains infinity; allowed: a finite number",
        ),
        ({"tags": tensor(FLOAT, (1, 2), float_val=[1, float("inf")])}, "tags contains infinity"),
        ({"I1": tensor(FLOAT, (3,), float_val=[1, 2])}, "I1 has shape [3] and 2 values; they must match."),
        ({"I1": tensor(STRING, (3,), float_val=[1, 2, 3])}, "I1 has shape [3] and 0 values"),
        ({"I1": TensorProto(dtype=FLOAT, float_val=[1, 2])}, "I1 has shape of one value and 2 values"),
        (
            {"I1": tensor(FLOAT, (2, 1, 1), float_val=[1, 2])},
            "I1 has 3 dimensions; allowed: [rows] or [rows, values]",
        ),
        ({"I1": tensor(FLOAT, (-1,), float_val=[1])}, "I1 has shape [-1]; allowed: sizes of at least 0"),
        ({"I1": tensor(FLOAT, (1,), tensor_content=b"12345")}, "bytes that are not a whole number of values"),
        (
            {"C1": tensor(STRING, (1,), tensor_content=b"\x01a")},
            "C1 has shape [1] and text that is not in the list",
        ),
        ({"I1": tensor(0, (1,), float_val=[1])}, "I1 has no dtype; allowed: text, a number or a bool."),
        (
            {"I1": tensor(8, (1,), scomplex_val=[1, 1])},
            "I1 has dtype DT_COMPLEX64; allowed: text, a number or a bool",
        ),
        ({"I1": tensor(77, (1,))}, "I1 has dtype 77"),
        ({"I1": tensor(FLOAT, (101,), float_val=range(101))}, "I1 has 101 rows; allowed: up to 100."),
        ({"I1": tensor(FLOAT, (2**62,), float_val=[1])}, f"I1 has {2**62} rows; allowed: up to 100"),
        ({"I1": tensor(FLOAT, (4, 2**62))}, f"I1 has shape [4, {2**62}] and 0 values"),
        ({"I1": tensor(FLOAT, (2, 2**62), float_val=[1])}, f"I1 has shape [2, {2**62}] and 1 values"),
        (
            {"I1": tensor(FLOAT, (2,), float_val=[1, 2]), "C1": tensor(STRING, (3,), string_val=[b"a"] * 3)},
            "C1 has 3 rows and I1 has 2; all fields of a request must have the same number of rows.",
        ),
    ],
)
def test_error_message_names_the_field(inputs, message):
    assert message in refusal(read, predict(**inputs))


def test_malformed_bytes_are_reported_with_their_field():
    body = predict(C1=tensor(STRING, (1,), string_val=[b"abc"]))
    assert 'malformed at field "C1"' in refusal(read, body[:-6] + b"\xff\xff\xff\xff\xff\xff")
    assert "The request is malformed:" in refusal(read, body[:-1])
    assert "malformed" in refusal(lambda: list(top_level_fields(b"\x0a\x05", 1)))


def test_unknown_fields_are_ignored_on_request():
    body = predict(I1=tensor(FLOAT, (2,), float_val=[1, 2]), weight=tensor(FLOAT, (9,), float_val=[1]))
    assert tables(read(body, ignore=True), COLUMNS) == {"I1": [[1.0], [2.0]]}


# ── Open Inference Protocol ────────────────────────────────────────────────────────────────────


def test_typed_and_raw_contents_are_equal():
    typed = ModelInferRequest()
    typed.inputs.add(name="I1", datatype="FP32", shape=[2]).contents.fp32_contents.extend([1.5, 2.5])
    typed.inputs.add(name="C1", datatype="BYTES", shape=[2, 1]).contents.bytes_contents.extend([b"ab", b""])
    typed.inputs.add(name="tags", datatype="INT16", shape=[2, 2]).contents.int_contents.extend([1, -2, 3, 4])
    raw = ModelInferRequest(inputs=typed.inputs)
    for one in raw.inputs:
        one.ClearField("contents")
    raw.raw_input_contents.extend(
        [
            np.array([1.5, 2.5], "<f4").tobytes(),
            b"\x02\0\0\0ab\0\0\0\0",
            np.array([1, -2, 3, 4], "<i2").tobytes(),
        ]
    )
    (as_typed, was_raw), (as_raw, is_raw) = infer(typed), infer(raw)
    assert (was_raw, is_raw) == (False, True)
    expected = {"I1": [[1.5], [2.5]], "C1": [[b"ab"], [b""]], "tags": [[1, -2], [3, 4]]}
    assert tables(as_typed, COLUMNS) == tables(as_raw, COLUMNS) == expected


def test_raw_contents_of_ignored_inputs_are_skipped():
    request = ModelInferRequest(raw_input_contents=[b"\0" * 8, np.float32([7]).tobytes()])
    request.inputs.add(name="weight", datatype="FP64", shape=[1])
    request.inputs.add(name="I1", datatype="FP32", shape=[1])
    assert tables(infer(request, ignore=True)[0], COLUMNS) == {"I1": [[7.0]]}


def request_of(*inputs: tuple, raw: list[bytes] = ()) -> ModelInferRequest:
    request = ModelInferRequest(raw_input_contents=raw)
    for name, datatype, shape in inputs:
        request.inputs.add(name=name, datatype=datatype, shape=shape)
    return request


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (
            request_of(("I1", "FP8", [1]), raw=[b"1"]),
            'I1 has datatype "FP8"; allowed: text, a number or a bool.',
        ),
        (request_of(("I1", "", [1]), raw=[b"1"]), "I1 has no datatype"),
        (request_of(("I1", "FP32", [2]), raw=[b"1234"]), "I1 has shape [2] and 1 values"),
        (
            request_of(("I1", "FP32", [2]), raw=[b"12345"]),
            "I1 has shape [2] and bytes that are not a whole number",
        ),
        (
            request_of(("C1", "BYTES", [1]), raw=[b"\x05\0\0\0ab"]),
            "C1 has shape [1] and text that is not in the list",
        ),
        (request_of(("I1", "FP32", [1])), "I1 has shape [1] and 0 values"),
        (request_of(("I1", "FP32", [1]), ("C1", "FP32", [1]), raw=[b"1234"]), "1 entries for 2 inputs"),
        (request_of(("I1", "FP32", [1]), ("I1", "FP32", [1])), "I1 is sent twice. Send each field once."),
        (request_of(("c1", "FP32", [1]), raw=[b"1234"]), 'Did you mean "C1"?'),
        (request_of(), "The request has no rows."),
        (request_of(("I1", "FP32", [1]), raw=[np.float32([np.inf]).tobytes()]), "I1 contains infinity"),
    ],
)
def test_error_message_of_an_inference_request(request_, message):
    assert re.search(re.escape(message), refusal(infer, request_))


def test_contents_together_with_raw_contents_are_refused():
    request = request_of(("I1", "FP32", [1]), raw=[b"1234"])
    request.inputs[0].contents.fp32_contents.append(1)
    assert "I1 has values in contents and in raw_input_contents" in refusal(infer, request)
