"""Rows in any form reach the server with the same values, over every protocol."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st
from server_double import (
    CODECS,
    FEATURES,
    Scores,
    decode_answer,
    decode_metadata,
    decode_request,
    encode_rows,
    read_request,
)

from clickline.client import TensorInfo
from clickline.client.columnar import Rows, as_table
from clickline.errors import RequestRefused
from clickline.features import Encoder
from clickline.records import EncodedRows, IntegerColumn, NumberColumn, TextColumn

PROTOCOLS = list(CODECS)
TYPED = [protocol for protocol in PROTOCOLS if protocol != "elasticctr"]

ROWS: list[dict[str, Any]] = [
    {"I1": 3, "I2": 0.1, "C1": "68fd1e64", "C2": "ä", "tags": ["a", "b"], "4": [7, 2**63 + 5]},
    {"I1": None, "I2": -2.5, "C1": "", "C2": "x" * 200, "tags": [], "4": []},
    {"I1": -1, "I2": None, "C1": "17", "C2": "nul\0in it", "tags": ["c"], "4": [2**64 - 1]},
]


def received(protocol: str, rows: Rows) -> EncodedRows:
    """Rows as the server encodes them after a client sent them."""
    return encode_rows(decode_request(CODECS[protocol]("ads").predict(as_table(rows), None)).rows)


def expected(rows: list[dict[str, Any]]) -> EncodedRows:
    """Rows as training encodes them."""
    result, errors = Encoder(FEATURES).encode_values(rows)
    assert not errors
    return result


def assert_same(one: EncodedRows, other: EncodedRows) -> None:
    assert one.rows == other.rows
    np.testing.assert_array_equal(one.dense_DB.view(np.uint32), other.dense_DB.view(np.uint32))
    for found, wanted in zip(one.slots, other.slots, strict=True):
        assert found.ids_N.tolist() == wanted.ids_N.tolist()
        if wanted.offsets_B1 is not None and found.offsets_B1 is not None:
            assert found.offsets_B1.tolist() == wanted.offsets_B1.tolist()


@pytest.mark.parametrize("protocol", TYPED)
def test_rows_with_every_type_of_value(protocol: str) -> None:
    assert_same(received(protocol, ROWS), expected(ROWS))
    for row in ROWS:
        assert_same(received(protocol, [row]), expected([row]))


@pytest.mark.parametrize("protocol", TYPED)
def test_columns_equal_rows(protocol: str) -> None:
    columns = {name: [row[name] for row in ROWS] for name in ROWS[0]}
    assert_same(received(protocol, columns), expected(ROWS))


@pytest.mark.parametrize("protocol", TYPED)
@pytest.mark.parametrize(
    "columns",
    [
        {"I1": np.array([3, 4], np.int32), "C1": np.array(["a", ""]), "C2": np.array([b"x", b"yy"])},
        {"I1": np.array([3.5, np.nan], np.float32), "I2": np.array([1.25, 2.0], np.float64)},
        {"I1": np.array([True, False]), "C1": np.array(["a", None], object)},
        {"4": np.array([[1, 2], [3, 2**64 - 1]], np.uint64), "tags": np.array([["a", "b"], ["c", ""]])},
        {"I1": [np.float32(1.5), np.int64(7)], "C1": [np.str_("a"), "b"]},
        {"C1": [7, 7.0], "C2": [7.5, "7"]},
        {"C1": [b"\xff\xfe", "ok"], "C2": [2**63 + 1, None]},
        {"tags": [("a", "b"), "c"], "4": [np.array([5, 6]), None]},
        {"C1": np.array([2**63 + 1, 3], np.uint64), "C2": np.array([-5, 4])},
        {"I1": np.array([2, 3])[::-1], "I2": np.array([[1.5], [2.5]])},
    ],
)
def test_numpy_arrays_and_mixed_lists(protocol: str, columns: dict[str, Any]) -> None:
    def plain(value: Any) -> Any:
        value = value.tolist() if isinstance(value, np.ndarray | np.generic) else value
        if isinstance(value, list | tuple):
            return value[0] if len(value) == 1 else [plain(one) for one in value]
        return value

    rows = [{name: plain(values[row]) for name, values in columns.items()} for row in range(2)]
    assert_same(received(protocol, columns), expected(rows))


@pytest.mark.parametrize("protocol", TYPED)
def test_arrow_arrays(protocol: str) -> None:
    columns = {
        "I1": pa.array([3, None, -1]),
        "I2": pa.chunked_array([[0.5], [None, 2.0]]),
        "C1": pa.array(["a", None, "ä"]).dictionary_encode(),
        "C2": pa.array(["", "bb", "ccc"], pa.large_string())[0:3],
        "tags": pa.array([["x", "y"], [], None], pa.list_(pa.string())),
        "4": pa.array([[1, 2**64 - 1], None, [0]], pa.list_(pa.uint64())),
    }
    rows = [{name: column[row].as_py() for name, column in columns.items()} for row in range(3)]
    for row in rows:
        row["tags"], row["4"] = row["tags"] or [], row["4"] or []
    assert_same(received(protocol, columns), expected(rows))


@pytest.mark.parametrize("protocol", TYPED)
def test_reader_columns(protocol: str) -> None:
    """Spans of one buffer in any order, with gaps, with several values per row."""
    data = np.frombuffer(b"3\tabc\tdefghi\t\tlast", dtype=np.uint8)
    spans = np.array([[0, 1], [2, 5], [6, 12], [13, 13], [14, 18]])
    order = [4, 1, 3]
    columns = {
        "I1": IntegerColumn(np.array([5, 0, 9], np.uint64), np.array([False, True, False]), True),
        "I2": NumberColumn(np.array([1.5, np.nan, -3.0])),
        "C1": TextColumn(data, spans[order, 0], spans[order, 1]),
        "C2": TextColumn(data, spans[[2, 0, 1], 0], spans[[2, 0, 1], 1]),
        "tags": TextColumn(data, spans[[1, 2, 4], 0], spans[[1, 2, 4], 1], np.array([0, 2, 2, 3])),
    }
    rows = [
        {"I1": 5, "I2": 1.5, "C1": "last", "C2": "defghi", "tags": ["abc", "defghi"]},
        {"I1": None, "I2": None, "C1": "abc", "C2": "3", "tags": []},
        {"I1": 9, "I2": -3.0, "C1": "", "C2": "abc", "tags": ["last"]},
    ]
    assert_same(received(protocol, columns), expected(rows))


TEXT = st.text(st.characters(codec="utf-8"), max_size=6) | st.text("ab", min_size=120, max_size=300)


@given(
    st.sampled_from(TYPED),
    st.lists(
        st.fixed_dictionaries(
            {},
            optional={
                "I1": st.none() | st.integers(-(2**63), 2**63 - 1),
                "I2": st.none() | st.floats(-1e30, 1e30),
                "C1": TEXT,
                "C2": st.none() | TEXT | st.integers(-(2**63), 2**64 - 1),
                "tags": st.lists(TEXT, max_size=4),
                "4": st.lists(st.integers(0, 2**64 - 1), max_size=3),
            },
        ),
        min_size=1,
        max_size=8,
    ).filter(lambda rows: any(rows)),
)
@example("grpc", [{"C2": -1}, {"C2": 2**63}, {"C2": None}])  # no integer type holds both
def test_arbitrary_rows(protocol: str, rows: list[dict[str, Any]]) -> None:
    assert_same(received(protocol, rows), expected([{"tags": [], "4": [], **row} for row in rows]))


def test_texts_of_all_lengths() -> None:
    """Lengths whose varint takes one, two and three bytes."""
    lengths = [0, 1, 127, 128, 129, 16383, 16384, 70_000]
    texts = ["x" * length for length in lengths]
    rows = [{"C1": text, "C2": text[::-1] + "é"} for text in texts]
    for protocol in TYPED:
        assert_same(received(protocol, rows), expected(rows))


def test_elasticctr_sends_feasigns() -> None:
    rows = [{"I1": 3, "C1": "68fd1e64", "tags": ["a", "b"], "4": [7, 2**63 + 5]}, {"I1": None, "4": []}]
    document = decode_request(CODECS["elasticctr"]("ads").predict(as_table(rows), None)).rows
    place = {name: c for c, name in enumerate(FEATURES.columns)}
    assert document.numbers_CB[place["I1"]].tolist()[0] == 3
    assert np.isnan(document.numbers_CB[place["I1"], 1])
    c1 = document.integers_CB[place["C1"]].view(np.uint64)
    assert c1.tolist() == [xxhash.xxh64_intdigest(b"68fd1e64"), 0]
    multi = document.multi["4"]
    assert isinstance(multi, IntegerColumn) and multi.values_N.tolist() == [7, 2**63 + 5]


def test_elasticctr_refuses_what_it_cannot_send() -> None:
    with pytest.raises(RequestRefused, match=r"I1 is 0.5; .* 64-bit integers"):
        CODECS["elasticctr"]("ads").predict(as_table([{"I1": 0.5}]), None)
    with pytest.raises(RequestRefused, match="cannot request version 3"):
        CODECS["elasticctr"]("ads").predict(as_table([{"I1": 1}]), 3)


@pytest.mark.parametrize("rows", [1, 2, 300])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_scores_are_exact_to_the_bit(protocol: str, rows: int) -> None:
    random = np.random.default_rng(rows)
    logit_B = random.normal(size=rows).astype(np.float32)
    scores = Scores(12, logit_B, (1 / (1 + np.exp(-logit_B))).astype(np.float32))
    found = decode_answer(CODECS[protocol]("ads").predict(as_table([{"I1": 1}] * rows), None), scores)
    assert found.version == 12
    assert (
        found.probability.dtype == np.float32
        and found.probability.tobytes() == scores.probability_B.tobytes()
    )
    if protocol == "elasticctr":
        assert found.logits is None
    else:
        assert found.logits.tobytes() == logit_B.tobytes()


@pytest.mark.parametrize("protocol", TYPED)
def test_requested_model_and_version(protocol: str) -> None:
    table = as_table([{"I1": 1}])
    assert (
        read_request(CODECS[protocol]("a b/ü" if "grpc" in protocol else "ads").predict(table, 300)).version
        == 300
    )
    assert read_request(CODECS[protocol]("ads").predict(table, None)).version is None
    assert read_request(CODECS[protocol]("ads").predict(table, None)).model == "ads"
    assert read_request(CODECS[protocol](None).predict(table, None)).model == (
        "" if "grpc" in protocol else "clickline"
    )


@pytest.mark.parametrize("protocol", ["grpc", "http", "v2-grpc", "v2-http"])
def test_ranking(protocol: str) -> None:
    codec = CODECS[protocol]("ads")
    context = {"I1": 3, "tags": ["a", "b"]}
    candidates = {"C1": ["x", "y", "z"], "I2": [0.5, 1.5, 2.5]}
    score_B = np.array([0.25, 0.75, 0.5], dtype=np.float32)
    scores = Scores(9, score_B, score_B)
    request = codec.rank(as_table([context]), as_table(candidates), None)
    call = decode_request(request)
    assert call.context is not None and call.context.rows == 1 and call.rows.rows == 3
    rows = {**{name: [value] * 3 for name, value in context.items()}, **candidates}
    shared, own, wanted = encode_rows(call.context), encode_rows(call.rows), received(protocol, rows)
    assert shared.dense_DB[0, 0] == wanted.dense_DB[0, 0]
    assert own.dense_DB[1].tolist() == wanted.dense_DB[1].tolist()
    assert shared.slots[2].ids_N.tolist() == wanted.slots[2].ids_N[:2].tolist()
    assert own.slots[0].ids_N.tolist() == wanted.slots[0].ids_N.tolist()
    all_scores = decode_answer(request, scores)
    assert (all_scores.version, all_scores.indices.tolist()) == (9, [0, 1, 2])
    assert all_scores.scores.tobytes() == score_B.tobytes()
    best = decode_answer(codec.rank(None, as_table(candidates), 2), scores)
    assert (best.scores.tolist(), best.indices.tolist()) == ([0.75, 0.5], [1, 2])


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_metadata(protocol: str) -> None:
    info = decode_metadata(CODECS[protocol]("ads").metadata())
    assert (info.name, info.versions) == ("ads", (12,))
    assert set(info.inputs) == set(FEATURES.columns)
    assert info.inputs["I1"] == TensorInfo("FP32", (-1,))
    assert info.inputs["tags"] == TensorInfo("BYTES", (-1, -1))
    assert info.outputs["probabilities"] == TensorInfo("FP32", (-1, 2))
    assert info.outputs["class_ids"] == TensorInfo("INT64", (-1, 1))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "no rows"),
        ({}, "no rows"),
        ({"C1": []}, "no rows"),
        ({"C1": ["a"], "C2": ["a", "b"]}, "C2 has 2 rows and C1 has 1"),
        ("abc", "a list of dicts, or a dict of columns"),
        ([["a"]], "a list of dicts, or a dict of columns"),
        ({"C1": "abc"}, "C1 is str; allowed: a list, a NumPy array or an Arrow array"),
        ({"C1": [{"a": 1}]}, "C1 contains dict; allowed: text, bytes, a number"),
        ({"C1": [[["a"]]]}, "C1 contains nested lists"),
        ({"I1": [float("inf")]}, "I1 contains infinity"),
        ({"I1": np.array([1.0, -np.inf])}, "I1 contains infinity"),
        ({"I1": ["a", float("inf")]}, "I1 contains infinity"),
        ({"C1": [2**70]}, "C1 contains integers of more than 64 bits"),
        ({"C1": np.zeros((1, 1, 1))}, "C1 has 3 dimensions"),
        ({"C1": np.zeros(1, complex)}, "C1 is an array of complex128"),
        ({"C1": pa.array([{"a": 1}])}, "C1 has the Arrow type struct"),
    ],
)
def test_values_that_cannot_be_sent_are_refused_by_name(rows: Any, message: str) -> None:
    with pytest.raises(RequestRefused, match=message) as refused:
        as_table(rows)
    assert refused.value.kind == "invalid"
