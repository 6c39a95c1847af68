"""PaddleRec lines: against a simple parser on any bytes, at any block size; and the layout of a block."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from whole_file import read

from clickline.data.readers.paddlerec_lines import NamedTokens, PaddleRecReader, dense_and_slots_in


def number(token: bytes) -> int | None:
    return int(token) if token.isdigit() and int(token) < 2**64 else None


def by_hand(
    text: bytes, dense: int, slots: tuple[int, ...], modulo: int | None
) -> tuple[list[tuple[int, dict[str, Any]]], list[tuple[int, str]]]:
    rows, bad = [], []
    for at, line in enumerate(text.split(b"\n"), start=1):
        tokens = [t for t in re.split(rb"[ \t\r,]", line) if t]
        if tokens:
            found = line_by_hand(tokens, dense, slots, modulo)
            if isinstance(found, str):
                bad.append((at, found))
            else:
                rows.append((at, found))
    return rows, bad


def line_by_hand(
    tokens: list[bytes], dense: int, slots: tuple[int, ...], modulo: int | None
) -> dict[str, Any] | str:
    clicks, numbers = [], []
    pairs: list[tuple[int, int]] = []
    for token in tokens:
        key, colon, value = token.partition(b":")
        if key == b"click" and colon:
            if clicks:
                return "bad label"
            clicks.append(value)
        elif key == b"dense_feature" and colon:
            numbers.append(value)
        else:
            slot, feasign = number(key), number(value)
            if slot is None or feasign is None:
                return "not a number"
            pairs.append((slot, feasign))
    if len(clicks) != 1:
        return "bad label"
    if len(numbers) != dense:
        return "wrong column count"
    values: dict[str, Any] = {"click": clicks[0]}
    values |= {f"dense_{i}": value for i, value in enumerate(numbers, start=1)}
    for slot in slots:
        values[str(slot)] = [(v % modulo if modulo else v) or None for s, v in pairs if s == slot]
    return values


token_texts = st.one_of(
    st.sampled_from([b"click:0", b"click:1", b"dense_feature:0.5", b"dense_feature:", b"dense_feature:a:b"]),
    st.tuples(st.integers(0, 4), st.integers(0, 2**65)).map(lambda pair: b"%d:%d" % pair),
    st.tuples(st.integers(0, 4), st.integers(0, 9)).map(lambda pair: b"%d:%d" % pair),
    st.sampled_from(
        [
            b"click",
            b"click:2",
            b"click:x",
            b"clicks:1",
            b"dense_feature",
            b"dense:1",
            b"3",
            b"3:",
            b":3",
            b"1:2:3",
            b"1_4:3",
            b"1,2:3",
        ]
    ),
    st.binary(max_size=4),
)
good_lines = st.tuples(
    st.sampled_from([b"click:0", b"click:1"]),
    st.lists(st.sampled_from([b"0.25", b"-3", b"", b"nan", b"\xff"]), min_size=2, max_size=2),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2**64 - 1)), max_size=6),
).map(
    lambda parts: b" ".join(
        [
            parts[0],
            *(b"dense_feature:" + value for value in parts[1]),
            *(b"%d:%d" % pair for pair in parts[2]),
        ]
    )
)
texts = st.lists(
    st.tuples(
        st.one_of(good_lines, st.lists(token_texts, max_size=6).map(b"  ".join)),
        st.sampled_from([b"\n", b"\r\n", b"\t\n\n"]),
    ).map(b"".join),
    max_size=8,
).map(b"".join)


@given(
    text=texts,
    dense=st.integers(0, 2),
    modulo=st.sampled_from([None, 7]),
    block_bytes=st.sampled_from([1, 60, 8 << 20]),
)
def test_lines_read_as_a_simple_parser_reads_them(
    tmp_path: Path, text: bytes, dense: int, modulo: int | None, block_bytes: int
):
    path = tmp_path / "log.txt"
    text = b"\n" + text  # so that no bytes look compressed
    path.write_bytes(text)
    slots = (1, 3)
    rows, bad = read(PaddleRecReader(dense=dense, slots=slots, modulo=modulo, block_bytes=block_bytes), path)
    expected_rows, expected_bad = by_hand(text, dense, slots, modulo)
    assert rows == expected_rows
    assert [(b.line, b.reason) for b in bad] == expected_bad


def test_a_line_with_too_few_dense_values_says_how_many(tmp_path: Path):
    path = tmp_path / "log.txt"
    path.write_bytes(b"click:1 dense_feature:1 2:3\nclick:1 dense_feature:1 dense_feature:2 2:3\n")
    rows, (bad,) = read(PaddleRecReader(dense=2, slots=(2,)), path)
    assert rows == [(2, {"click": b"1", "dense_1": b"1", "dense_2": b"2", "2": [3]})]
    assert (bad.line, bad.reason, bad.detail) == (1, "wrong column count", "1 dense values, 2 expected")


@pytest.mark.parametrize(
    ("line", "reason", "said"),
    [
        (b"1:5", "bad label", "one click:…"),
        (b"click:0 click:1", "bad label", "one click:…"),
        (b"click:0 user:5", "not a number", "slot:feasign"),
    ],
)
def test_message_of_a_bad_line_says_what_is_allowed(tmp_path: Path, line: bytes, reason: str, said: str):
    path = tmp_path / "log.txt"
    path.write_bytes(line)
    rows, (bad,) = read(PaddleRecReader(dense=0, slots=(1,)), path)
    assert rows == []
    assert bad.reason == reason
    assert said in bad.detail


def test_the_number_of_dense_values_is_the_most_frequent_one():
    text = b"\nbroken\nclick:1 dense_feature:1 dense_feature:2 9:1 4:2\r\nclick:0 dense_feature:1 dense_feature:2 4:1\n"
    assert dense_and_slots_in(np.frombuffer(text, np.uint8).copy()) == (2, (4, 9))
    assert dense_and_slots_in(np.empty(0, np.uint8)) == (0, ())


def test_the_real_paddlerec_lines(real_data: Path):
    path = real_data / "paddlerec_80.txt"
    slots = tuple(range(1, 27))
    assert dense_and_slots_in(np.fromfile(path, np.uint8)) == (13, slots)
    rows, bad = read(PaddleRecReader(dense=13, slots=slots, block_bytes=3000), path)
    assert bad == []
    assert (rows, []) == by_hand(path.read_bytes(), 13, slots, None)
    assert len(rows) == 80


def test_named_tokens_are_labels_weights_numbers_and_slots(tmp_path: Path):
    path = tmp_path / "log.txt"
    path.write_bytes(
        b"click:1 conversion:0 weight:0.5 price:1e2 7:9 1_4:22 1_4:23 user:5 note:x\n"
        b"user:6 conversion:1 weight:2 note: click:1\n"
        b"click:1 weight:1 7:9\n"
    )
    named = NamedTokens(
        targets=("conversion", "weight"), dense=("price",), slots=("1_4", "user"), ignored=("click", "note")
    )
    rows, (bad,) = read(PaddleRecReader(dense=0, slots=(7,), named=named), path)
    first = {"conversion": b"0", "weight": b"0.5", "price": b"1e2", "7": [9], "1_4": [22, 23], "user": [5]}
    second = {"conversion": b"1", "weight": b"2", "price": b"", "7": [], "1_4": [], "user": [6]}
    assert rows == [(1, first), (2, second)]
    assert (bad.line, bad.reason) == (3, "bad label")
    assert bad.detail == "a line must have one conversion:… and weight:…"
    assert dense_and_slots_in(np.fromfile(path, np.uint8), named) == (0, (7,))


def test_the_lines_of_paddlerecs_multi_task_models(tmp_path: Path):
    """ESMM and ESCM2: sample, click, conversion, then slot:feature, all separated by commas."""
    path = tmp_path / "small.txt"
    path.write_bytes(b"1,1,0,210:1,210:2,150_14:18,301:5\n2,0,0,301:5\n3,1\n4\n")
    named = NamedTokens(
        targets=("conversion", "click"), slots=("150_14",), columns=("sample", "click", "conversion")
    )
    rows, bad = read(PaddleRecReader(dense=0, slots=(210, 301), named=named), path)
    assert rows == [
        (1, {"click": b"1", "conversion": b"0", "210": [1, 2], "301": [5], "150_14": [18]}),
        (2, {"click": b"0", "conversion": b"0", "210": [], "301": [5], "150_14": []}),
    ]
    assert [(one.line, one.reason) for one in bad] == [(3, "bad label"), (4, "bad label")]
    assert bad[0].detail == "a line must have the columns sample, click, conversion at its beginning"
    assert dense_and_slots_in(np.fromfile(path, np.uint8), named) == (0, (210, 301))


def test_a_name_that_is_not_declared_says_what_to_do(tmp_path: Path):
    path = tmp_path / "log.txt"
    path.write_bytes(b"click:0 conversion:1 1:5")
    _, (bad,) = read(PaddleRecReader(dense=0, slots=(1,)), path)
    assert "its name is not in data.fields (as label, weight, time, slot, dense or ignore)" in bad.detail
