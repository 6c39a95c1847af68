"""Arbitrary bytes: the kernels agree with protobuf's own parser and plain Python, and read nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import naive_requests as naive
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clickline.errors import RequestRefused
from clickline.wire.messages import ModelInferRequest, PredictRequest
from clickline.wire.request_reader import RequestReader

COLUMNS = ("a", "b", "I1", "länge")
READER = RequestReader(COLUMNS)
MAX_ROWS = 6

names = st.sampled_from([*COLUMNS, *COLUMNS, "c", "", "I"])
rarely = st.integers(0, 7).map(lambda n: n == 7)
texts = st.binary(max_size=6) | st.binary(min_size=125, max_size=140)
signed32, signed64 = st.integers(-(2**31), 2**31 - 1), st.integers(-(2**63), 2**63 - 1)
LISTS = {
    "float_val": st.floats(width=32),
    "double_val": st.floats(),
    "int_val": signed32,
    "string_val": texts,
    "int64_val": signed64,
    "bool_val": st.booleans(),
    "half_val": st.integers(0, 65535),
    "uint32_val": st.integers(0, 2**32 - 1),
    "uint64_val": st.integers(0, 2**64 - 1),
    "bool_contents": st.booleans(),
    "int_contents": signed32,
    "int64_contents": signed64,
    "uint_contents": st.integers(0, 2**32 - 1),
    "uint64_contents": st.integers(0, 2**64 - 1),
    "fp32_contents": st.floats(width=32),
    "fp64_contents": st.floats(),
    "bytes_contents": texts,
}


def varint(value: int) -> bytes:
    out = b""
    while value >= 0x80:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


@st.composite
def shapes(draw: st.DrawFn, rows: int, odd: bool) -> tuple[list[int], int]:
    """A shape and the number of values: they match, unless the request is `odd`."""
    usual = [[rows], [rows], [rows, 1], [rows, 2], [rows, 0]] + ([[]] if rows == 1 else [])
    shape = draw(st.sampled_from([*usual, [], [1], [0], [7], [1, 1, 1], [-1]] if odd else usual))
    count = 1
    for size in shape:
        count *= max(size, 0)
    return shape, draw(
        st.sampled_from(
            [count, count, 1, count + 1] if odd else [count, count, 1 if shape == [rows] else count]
        )
    )


def values(draw: st.DrawFn, field: str, count: int) -> list:
    drawn = draw(st.lists(LISTS[field], min_size=count, max_size=count))
    finite = draw(st.integers(0, 9)) > 0  # else a request would hardly ever be accepted
    return [0.5 if finite and isinstance(v, float) and abs(v) == float("inf") else v for v in drawn]


def raw_content(draw: st.DrawFn, kind: str | None, count: int) -> bytes:
    if kind is None:
        return b"".join(
            len(word).to_bytes(4, "little") + word
            for word in draw(st.lists(texts, min_size=count, max_size=count))
        )
    size = {"bool": 1, "bf16": 2}.get(kind) or int(kind[-1])
    return draw(st.binary(min_size=count * size, max_size=count * size))


@st.composite
def predict_requests(draw: st.DrawFn) -> bytes:
    request = PredictRequest()
    rows, odd = draw(st.integers(1, 4)), draw(rarely)
    for name in draw(st.lists(names if odd else st.sampled_from(COLUMNS), min_size=1, max_size=5)):
        request.inputs[name].Clear()
        tensor = request.inputs[name]
        tensor.dtype = draw(st.sampled_from([*naive.TENSORFLOW, 0, 8, 99] if odd else list(naive.TENSORFLOW)))
        field, kind, _ = naive.TENSORFLOW.get(tensor.dtype, ("float_val", "<f4", float))
        shape, count = draw(shapes(rows, odd))
        for size in shape:
            tensor.tensor_shape.dim.add(size=size, name=draw(st.sampled_from(["", "rows"])))
        if draw(st.integers(0, 3)) == 0 and (odd or kind):
            tensor.tensor_content = raw_content(draw, kind, count)
        else:
            getattr(tensor, field).extend(values(draw, field, count))
    request.model_spec.name = "ads"
    return request.SerializeToString()


@st.composite
def infer_requests(draw: st.DrawFn) -> bytes:
    request = ModelInferRequest(model_name="ads", id="7")
    rows, odd, raw = draw(st.integers(1, 4)), draw(rarely), draw(st.booleans())
    for name in draw(
        st.lists(names if odd else st.sampled_from(COLUMNS), min_size=1, max_size=5, unique=not odd)
    ):
        datatype = draw(st.sampled_from([*naive.INFERENCE, b"FP8", b""] if odd else list(naive.INFERENCE)))
        field, kind, _ = naive.INFERENCE.get(datatype, ("fp32_contents", "<f4", float))
        shape, count = draw(shapes(rows, odd))
        if not odd:  # only TensorFlow has one value for all rows
            count = rows * ([*shape, 1][1] if shape else 1)
        tensor = request.inputs.add(name=name, datatype=datatype, shape=shape)
        tensor.parameters["x"].int64_param = 5
        if raw and not (odd and draw(rarely)):
            request.raw_input_contents.append(raw_content(draw, kind, count))
        elif field:
            getattr(tensor.contents, field).extend(values(draw, field, count))
    return request.SerializeToString()


@st.composite
def corrupted(draw: st.DrawFn, requests: st.SearchStrategy[bytes]) -> bytes:
    """A request with a few corruptions."""
    body = draw(requests)
    for _ in range(max(0, draw(st.integers(-3, 3)))):
        at, to = sorted(draw(st.tuples(st.integers(0, len(body)), st.integers(0, len(body)))))
        match draw(st.integers(0, 7)):
            case 0:
                body = body[:at]
            case 1:
                body = body[:at] + draw(st.binary(min_size=1, max_size=3)) + body[at + 1 :]
            case 2:
                body = body[:at] + body[to:]
            case 3:
                body = body[:to] + body[at:to] + body[to:]
            case 4:
                body = body + draw(requests)  # which is how protobuf merges messages
            case 5:
                body = (
                    body[:at]
                    + varint(draw(st.sampled_from([2**31, 2**32, 2**63, 2**64 - 1, 2**70])))
                    + body[at:]
                )
            case 6:
                body = body[:at] + b"\xff" * draw(st.integers(1, 11)) + body[at:]
            case 7:  # an unknown field, or a group
                unknown = draw(
                    st.sampled_from([b"\xc8\x3e\x01", b"\xcb\x3e\xcc\x3e", b"\xcb\x3e", b"\xcd\x3e\0\0\0\0"])
                )
                body = unknown + body
    return body


def read_by_kernels(kind: str, body: bytes, ignore: bool):
    try:
        if kind == "predict":
            return naive.tables(READER.tensors(body, 2, MAX_ROWS, ignore), COLUMNS)
        return naive.tables(READER.inputs(body, MAX_ROWS, ignore)[0], COLUMNS)
    except RequestRefused:
        return "refused"


def read_by_python(kind: str, body: bytes, ignore: bool):
    read = naive.read_predict if kind == "predict" else naive.read_infer
    try:
        return {name: table for name, (_, table) in read(body, COLUMNS, MAX_ROWS, ignore).items()}
    except naive.Refused:
        return "refused"


def same(one, other) -> bool:
    return (
        repr(one) == repr(other) if one == "refused" or other == "refused" else _sorted(one) == _sorted(other)
    )


def _sorted(found) -> str:
    return repr(sorted(found.items()))  # as text: NaN is NaN


@pytest.mark.parametrize("kind", ["predict", "infer"])
@settings(max_examples=150)
@given(data=st.data())
def test_corrupted_request_is_read_as_by_protobuf(kind, data):
    body = data.draw(corrupted(predict_requests() if kind == "predict" else infer_requests()))
    ignore = data.draw(st.booleans())
    assert same(read_by_kernels(kind, body, ignore), read_by_python(kind, body, ignore))


@pytest.mark.parametrize("kind", ["predict", "infer"])
@settings(max_examples=150)
@given(body=st.binary(max_size=60))
def test_random_bytes_are_read_as_by_protobuf(kind, body):
    assert same(read_by_kernels(kind, body, True), read_by_python(kind, body, True))


@pytest.mark.parametrize("kind", ["predict", "infer"])
def test_every_truncation_and_bit_flip_is_read_as_by_protobuf(kind):
    body = PLAIN[kind]()
    assert read_by_kernels(kind, body, False) != "refused"
    for bits in range(len(body) * 8):
        flipped = bytearray(body)
        flipped[bits // 8] ^= 1 << bits % 8
        for corrupted in (bytes(flipped), body[: bits // 8]):
            assert same(read_by_kernels(kind, corrupted, False), read_by_python(kind, corrupted, False)), (
                corrupted
            )


@pytest.mark.parametrize("long", range(1, 12))
def test_overlong_varints_tags_and_lengths(long):
    """As in protobuf: up to 10 bytes for a number, up to 5 for a tag or a length."""

    def padded(value: int) -> bytes:
        return bytes([value | 0x80]) + b"\x80" * (long - 2) + b"\0" if long > 1 else bytes([value])

    def field_bytes(field: bytes, size: bytes, content: bytes) -> bytes:
        return field + size + content

    def request(tag: int, length: int, number: int) -> list[bytes]:
        """Requests in which one of the three has a padded encoding."""
        found = []
        for corrupted in range(3):
            tags = padded(tag) if corrupted == 0 else bytes([tag])
            lengths = padded(length) if corrupted == 1 else bytes([length])
            numbers = padded(number) if corrupted == 2 else bytes([number])
            values = numbers + bytes([5])
            if corrupted != 1:
                lengths = bytes([len(values)])
            else:
                values = bytes([4, 5])
            tensor = b"\x08\x09\x12\x04\x12\x02\x08\x02" + field_bytes(tags, lengths, values)
            entry = b"\x0a\x01b" + field_bytes(b"\x12", bytes([len(tensor)]), tensor)
            found.append(field_bytes(b"\x12", bytes([len(entry)]), entry))
        return found

    accepted = []
    for body in request(tag=0x52, length=2, number=4):
        mine = read_by_kernels("predict", body, False)
        assert same(mine, read_by_python("predict", body, False))
        accepted.append(mine == {"b": [[4], [5]]})
    assert accepted == [long <= 5, long <= 5, long <= 10]


def plain_predict() -> bytes:
    request = PredictRequest()
    for name, dtype, field, content in (
        ("a", 7, "string_val", [b"x", b"yy"]),
        ("b", 9, "int64_val", [300, -1]),
    ):
        tensor = request.inputs[name]
        tensor.dtype = dtype
        tensor.tensor_shape.dim.add(size=2)
        getattr(tensor, field).extend(content)
    request.inputs["I1"].dtype = 1
    request.inputs["I1"].tensor_shape.dim.add(size=2)
    request.inputs["I1"].tensor_content = bytes(8)
    return request.SerializeToString(deterministic=True)


def plain_infer() -> bytes:
    request = ModelInferRequest(model_name="ads")
    request.inputs.add(name="a", datatype="BYTES", shape=[2, 1])
    request.inputs.add(name="b", datatype="INT16", shape=[2])
    request.raw_input_contents.extend([b"\x01\0\0\0x\x02\0\0\0yy", b"\x01\x02\x03\x04"])
    return request.SerializeToString()


PLAIN = {"predict": plain_predict, "infer": plain_infer}


@pytest.mark.slow
def test_no_access_outside_of_requests_and_arrays(tmp_path):
    """Compiled with bounds checks, with each request placed right before a protected page."""
    environment = os.environ | {
        "NUMBA_BOUNDSCHECK": "1",
        "NUMBA_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": str(Path(__file__).parent),
    }
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("guarded_reading.py"))],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    accepted, refused = map(int, done.stdout.split())
    assert accepted > 200 and refused > 1000
