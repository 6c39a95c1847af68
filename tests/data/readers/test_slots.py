"""Slot lines: against a simple parser on any bytes, at any block size; labels, modulo, slot.conf."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from whole_file import read

from clickline.data.readers.slot_lines import SlotReader, read_slot_conf, slots_in
from clickline.errors import ConfigError


def number(token: bytes) -> int | None:
    """A u64 in decimal digits, or None."""
    if not token.isdigit() or int(token) >= 2**64:
        return None
    return int(token)


def line_by_hand(line: bytes) -> tuple[int, int, list[tuple[int, int]]] | str | None:
    """(show, click, [(slot, feasign)]), or the reason why not, or None for an empty line."""
    tokens = re.split(rb"[ \t\r,]", line)
    tokens = [token for token in tokens if token]
    if not tokens:
        return None
    if b":" in tokens[0]:
        if tokens[0].count(b":") > 1:
            return "bad label"
        label, slot = map(number, tokens[0].split(b":"))
        if label not in (0, 1) or slot != 1:
            return "bad label"
        show, click, tokens = 1, label, tokens[1:]
    else:
        counts = [number(token) for token in tokens[:2]]
        if len(counts) < 2 or None in counts:
            return "bad label"
        show, click = counts  # type: ignore[assignment]
        tokens = tokens[2:]
    if show == 0 or click > show:
        return "bad label"
    pairs = []
    for token in tokens:
        if token.count(b":") != 1:
            return "not a number"
        feasign, slot = map(number, token.split(b":"))
        if feasign is None or slot is None:
            return "not a number"
        pairs.append((slot, feasign))
    return show, click, pairs


def by_hand(
    text: bytes, slots: tuple[int, ...], modulo: int | None
) -> tuple[list[tuple[int, dict[str, Any]]], list[tuple[int, str]]]:
    rows, bad = [], []
    for at, line in enumerate(text.split(b"\n"), start=1):
        found = line_by_hand(line)
        if isinstance(found, str):
            bad.append((at, found))
        elif found is not None:
            show, click, pairs = found
            values: dict[str, Any] = {"show": show, "click": click}
            for slot in slots:
                feasigns = [v % modulo if modulo else v for s, v in pairs if s == slot]
                values[str(slot)] = [v or None for v in feasigns]
            rows.append((at, values))
    return rows, bad


numbers = st.one_of(
    st.integers(0, 30),
    st.integers(0, 2**64 - 1),
    st.sampled_from([0, 2**63, 2**64 - 1, 2**64, 10**20, 18446744073709551609, 65535, 65536]),
).map(lambda n: b"%d" % n)
tokens = st.one_of(
    st.tuples(numbers, st.integers(0, 5).map(lambda n: b"%d" % n)).map(b":".join),
    st.tuples(numbers, numbers).map(b":".join),
    st.sampled_from(
        [b"1:1", b"0:1", b":", b"5:", b":5", b"1:2:3", b"x:1", b"-1:2", b"007:02", b"\0", b"\xff:1"]
    ),
    st.binary(max_size=5),
)
heads = st.sampled_from(
    [
        b"1 0",
        b"1 1",
        b"7 3",
        b"0 0",
        b"1 2",
        b"1",
        b"1.0 0",
        b"0:1",
        b"1:1",
        b"2:1",
        b"1:2",
        b"a b",
        b"  3\t1",
    ]
)
lines = st.tuples(heads, st.lists(st.one_of(tokens, tokens, st.just(b"")), max_size=6)).map(
    lambda parts: b" ".join([parts[0], *parts[1]])
)
texts = st.lists(
    st.tuples(st.one_of(lines, lines, st.binary(max_size=20)), st.sampled_from([b"\n", b"\r\n", b" \n"])).map(
        b"".join
    ),
    max_size=8,
).map(b"".join)


@given(
    text=texts,
    slots=st.sampled_from([(), (1,), (0, 1, 2, 3, 4), (3, 65536, 2**64 - 1)]),
    modulo=st.sampled_from([None, 1, 7, 100_000_001]),
    block_bytes=st.sampled_from([1, 30, 8 << 20]),
)
def test_slots_read_what_a_simple_parser_reads(
    tmp_path: Path, text: bytes, slots: tuple[int, ...], modulo: int | None, block_bytes: int
):
    path = tmp_path / "log.txt"
    text = b"\n" + text  # so that no bytes look compressed
    path.write_bytes(text)
    rows, bad = read(SlotReader(slots=slots, modulo=modulo, block_bytes=block_bytes), path)
    expected_rows, expected_bad = by_hand(text, slots, modulo)
    assert rows == expected_rows
    assert [(b.line, b.reason) for b in bad] == expected_bad


@given(text=texts)
def test_the_slots_of_good_lines_are_found_in_order(text: bytes):
    rows = [found for line in text.split(b"\n") if isinstance(found := line_by_hand(line), tuple)]
    slots = {slot for _, _, pairs in rows for slot, _ in pairs}
    assert slots_in(np.frombuffer(text, np.uint8).copy()) == tuple(sorted(slots))


def test_a_complete_line(tmp_path: Path):
    path = tmp_path / "log.txt"
    path.write_bytes(b"10 3 5:2 0:7 18446744073709551615:2 9:4\n1:1 8:7\n")
    rows, bad = read(SlotReader(slots=(2, 7)), path)
    assert bad == []
    assert rows == [
        (1, {"show": 10, "click": 3, "2": [5, 2**64 - 1], "7": [None]}),
        (2, {"show": 1, "click": 1, "2": [], "7": [8]}),
    ]


def test_lines_of_several_tasks_begin_with_several_labels(tmp_path: Path):
    path = tmp_path / "log.txt"
    path.write_bytes(b"1 1 0 5:2\n1:1 0:2 1:3 7:2\n3,2,1,6:2\n1 0 x:2\n1 0\n")
    columns = ("show", "click", "conversion")
    rows, bad = read(SlotReader(slots=(2,), columns=columns), path)
    assert rows == [
        (1, {"show": 1, "click": 1, "conversion": 0, "2": [5]}),
        (2, {"show": 1, "click": 0, "conversion": 1, "2": [7]}),
        (3, {"show": 3, "click": 2, "conversion": 1, "2": [6]}),
    ]
    assert [(one.line, one.reason) for one in bad] == [(4, "bad label"), (5, "bad label")]
    assert "the integers show, click, conversion" in bad[0].detail
    assert slots_in(np.fromfile(path, np.uint8), columns) == (2,)


def test_a_feasign_that_modulo_makes_zero_is_missing(tmp_path: Path):
    path = tmp_path / "log.txt"
    path.write_bytes(b"1 0 200000002:2 100000002:2\n")
    ((_, values),), _ = read(SlotReader(slots=(2,), modulo=100_000_001), path)
    assert values["2"] == [None, 1]


def test_message_of_a_bad_line_says_what_is_allowed(tmp_path: Path):
    path = tmp_path / "log.txt"
    path.write_bytes(b"0 0 1:1\n1 0 18446744073709551616:1\n")
    rows, bad = read(SlotReader(slots=(1,)), path)
    assert rows == []
    assert bad[0].reason == "bad label"
    assert "show >= 1 and click <= show" in bad[0].detail
    assert bad[0].text == "0 0 1:1"
    assert bad[1].reason == "not a number"
    assert "feasign:slot" in bad[1].detail
    assert "below 2**64" in bad[1].detail


def test_the_real_elasticctr_lines(real_data: Path):
    path = real_data / "elasticctr_100_slots.txt"
    slots = read_slot_conf("slot.conf", (real_data / "elasticctr_slot.conf").read_bytes())
    assert slots == tuple(range(27))
    rows, bad = read(SlotReader(slots=slots, block_bytes=5000), path)
    assert bad == []
    assert (rows, []) == by_hand(path.read_bytes(), slots, None)
    assert len(rows) == 100
    assert sum(values["click"] for _, values in rows) == 22
    assert slots_in(np.fromfile(path, np.uint8)) == slots


def test_the_real_slot_dnn_lines(real_data: Path):
    path = real_data / "paddlerec_slot_dnn_10.txt"
    slots = slots_in(np.fromfile(path, np.uint8))
    rows, bad = read(SlotReader(slots=slots), path)
    assert bad == []
    assert (rows, []) == by_hand(path.read_bytes(), slots, None)
    assert [sum(values["click"] for _, values in rows), len(rows)] == [4, 10]


def test_slot_conf_may_have_comments_and_empty_lines(tmp_path: Path):
    path = tmp_path / "slot.conf"
    path.write_bytes(b"\xef\xbb\xbf# ads\r\n7\r\n\r\n 3 # the user\r\n12")
    assert read_slot_conf(str(path), path.read_bytes()) == (7, 3, 12)


def test_all_mistakes_of_a_slot_conf_are_reported_at_once(tmp_path: Path):
    path = tmp_path / "slot.conf"
    path.write_text("1\ntwo\n3\n1\n-4\n99999999999999999999\n٣\n")
    with pytest.raises(ConfigError) as error:
        read_slot_conf(str(path), path.read_bytes())
    assert [m.line for m in error.value.mistakes] == [2, 4, 5, 6, 7]
    said = str(error.value).splitlines()
    assert said[0] == f"{path}:2 'two' is not a slot number; write one slot number (0 to 2**64-1) per line"
    assert said[1] == f"{path}:4 slot 1 is already listed in line 1; remove one of the two"


def test_an_empty_slot_conf_is_a_mistake(tmp_path: Path):
    path = tmp_path / "slot.conf"
    path.write_text("# none yet\n")
    with pytest.raises(ConfigError, match=r"no slot is listed; write one slot number per line"):
        read_slot_conf(str(path), path.read_bytes())
