"""The same value gets the same id and the same float by every reader, every protocol and every type that can hold it.

What the id has to be is worked out here once more, in plain Python, from the rules of docs/explanation/id-encoder.md.
"""

from __future__ import annotations

import csv
import json
import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from clickline.client.columnar import as_table
from clickline.client.elasticctr_codec import ElasticCtrCodec
from clickline.client.grpc_codec import InferenceGrpcCodec, TfServingGrpcCodec
from clickline.client.http_codec import InferenceHttpCodec, TfServingHttpCodec
from clickline.client.predict.elasticctr_columns import to_elasticctr_columns
from clickline.data.prepare.column_sketches import RowStatistics
from clickline.data.readers.delimited import CsvReader
from clickline.data.readers.parquet import ParquetReader
from clickline.data.readers.tf_example import ExampleParser, Records
from clickline.data.targets import TargetFields, TimeBounds, read_targets
from clickline.errors import DataError, RequestRefused
from clickline.features import DenseField, Encoder, FeatureSpec, SlotField
from clickline.features.raw_columns import raw_column
from clickline.features.request_encoder import RequestEncoder
from clickline.records import Block, EncodedRows, NumberColumn, RawRows, RequestRows, SourceFile
from clickline.serving.open_versions import OpenVersions
from clickline.serving.protocols import kserve_grpc, kserve_http, tfserving_grpc, tfserving_http
from clickline.serving.protocols.http_common import Route
from clickline.serving.protocols.http_routes import route
from clickline.serving.protocols.request import Limits, Request
from clickline.wire.messages import (
    GetModelMetadataResponse,
    ModelInferRequest,
    ModelMetadataResponse,
    PredictRequest,
    SignatureDefMap,
    TensorProto,
)
from clickline.wire.protobuf_writer import bytes_field, encode_varint

TEXTS = FeatureSpec((), (SlotField("v", "v", 7),))
BOTH = FeatureSpec((DenseField("n", "v", "none"),), (SlotField("v", "v", 7), SlotField("b", "v", 8, "log2")))
LIMITS = Limits(max_rows=1000, max_body=1 << 20)
HTTP = {"predict": "/v1/models/m:predict", "infer": "/v2/models/m/infer"}


class Model:
    """The part of a scorer that endpoints use."""

    number = 1

    def __init__(self, features: FeatureSpec) -> None:
        self.features = features
        self.columns = features.columns


def canonical(text: str) -> str:
    text = text.strip(" \t\r\n")
    whole = re.fullmatch(r"(-?)(0|[1-9][0-9]*)(\.0+)?", text)
    if whole is None:
        return text
    return "0" if whole[2] == "0" else whole[1] + whole[2]


def id_of(text: str, slot: int = 7) -> int:
    mask = 2**64 - 1

    def fmix64(x: int) -> int:
        x = ((x ^ (x >> 33)) * 0xFF51AFD7ED558CCD) & mask
        x = ((x ^ (x >> 33)) * 0xC4CEB9FE1A85EC53) & mask
        return x ^ (x >> 33)

    return fmix64(xxhash.xxh64_intdigest(text.encode()) ^ fmix64((slot + 0x9E3779B97F4A7C15) & mask))


# ── the paths: values in, encoded rows out ─────────────────────────────────────────────────────


def logged(spec: FeatureSpec, raw: RawRows) -> EncodedRows:
    assert not raw.bad
    encoded, faults = Encoder(spec).encode(raw)
    assert not faults
    return encoded


def asked(spec: FeatureSpec, rows: RequestRows) -> EncodedRows:
    encoded, faults = RequestEncoder(spec).encode(rows)
    assert not faults
    return encoded


def by_csv(
    spec: FeatureSpec, texts: Sequence[str], folder: Path, *, quotes: int = csv.QUOTE_ALL
) -> EncodedRows:
    path = folder / "log.csv"
    with path.open("w", newline="") as file:
        csv.writer(file, quoting=quotes).writerows([["v", "more"], *([text, "x"] for text in texts)])
    reader = CsvReader(wanted=("v",))
    (block,) = reader.blocks("log.csv", path)
    return logged(spec, reader.parse(block))


def by_parquet(spec: FeatureSpec, column: pa.Array, folder: Path) -> EncodedRows:
    path = folder / "log.parquet"
    pq.write_table(pa.table({"v": column}), path)
    reader = ParquetReader(("v",))
    (block,) = reader.blocks("log.parquet", path)
    return logged(spec, reader.parse(block))


def by_example(spec: FeatureSpec, features: Sequence[bytes]) -> EncodedRows:
    records = [
        bytes_field(1, bytes_field(1, bytes_field(1, b"v") + bytes_field(2, feature))) for feature in features
    ]
    ends = np.cumsum([len(record) for record in records])
    starts = np.append(0, ends[:-1])
    data = np.frombuffer(b"".join(records), dtype=np.uint8)
    return logged(spec, ExampleParser(("v",)).rows(Block("log", 1, Records(data, starts, ends), 0)))


def by_http(
    spec: FeatureSpec, path: str, body: bytes, headers: Mapping[bytes, bytes] | None = None
) -> EncodedRows:
    found = route("POST", path)
    assert isinstance(found, Route)
    return asked(spec, found.request(body, dict(headers or {}), LIMITS).decode(Model(spec)).rows)


def by_grpc(spec: FeatureSpec, endpoint: type[Request], body: bytes) -> EncodedRows:
    request = endpoint(body, LIMITS)
    request.read_target()
    return asked(spec, request.decode(Model(spec)).rows)


def by_json(spec: FeatureSpec, values: Sequence[Any], form: str) -> EncodedRows:
    if form == "rows":
        document: Any = {"instances": [{"v": value} for value in values]}
    else:
        document = {"inputs": {"v": list(values)}}
    return by_http(spec, HTTP["predict"], orjson.dumps(document))


def by_infer_json(spec: FeatureSpec, values: Sequence[Any], datatype: str) -> EncodedRows:
    tensor = {"name": "v", "shape": [len(values)], "datatype": datatype, "data": list(values)}
    return by_http(spec, HTTP["infer"], json.dumps({"inputs": [tensor]}).encode())


def sized(texts: Sequence[bytes]) -> bytes:
    return b"".join(struct.pack("<I", len(text)) + text for text in texts)


def by_infer_bytes(spec: FeatureSpec, content: bytes, rows: int, datatype: str) -> EncodedRows:
    parameters = {"binary_data_size": len(content)}
    tensor = {"name": "v", "shape": [rows], "datatype": datatype, "parameters": parameters}
    head = json.dumps({"inputs": [tensor]}).encode()
    size = {b"inference-header-content-length": b"%d" % len(head)}
    return by_http(spec, HTTP["infer"], head + content, size)


def by_grpc_infer(spec: FeatureSpec, rows: int, datatype: str, **contents: Any) -> EncodedRows:
    """`raw`: bytes; anything else: a list of InferTensorContents."""
    request = ModelInferRequest(model_name="m")
    tensor = request.inputs.add(name="v", datatype=datatype, shape=[rows])
    for name, values in contents.items():
        if name == "raw":
            request.raw_input_contents.append(values)
        else:
            getattr(tensor.contents, name).extend(values)
    return by_grpc(spec, kserve_grpc.Infer, request.SerializeToString())


def by_grpc_predict(spec: FeatureSpec, rows: int, dtype: int, **values: Any) -> EncodedRows:
    request = PredictRequest()
    tensor = TensorProto(dtype=dtype, **values)
    tensor.tensor_shape.dim.add(size=rows)
    request.inputs["v"].CopyFrom(tensor)
    return by_grpc(spec, tfserving_grpc.Predict, request.SerializeToString())


def by_client(spec: FeatureSpec, column: Any) -> dict[str, EncodedRows]:
    """Our own client, by all its protocols."""
    table = as_table({"v": column})
    found = {}
    for protocol in (TfServingHttpCodec, InferenceHttpCodec):
        ask = protocol("m").predict(table, None)
        headers = {name.encode(): text.encode() for name, text in ask.headers.items()}
        found[protocol.__name__] = by_http(spec, ask.path, ask.body, headers)
    for protocol, endpoint in (
        (TfServingGrpcCodec, tfserving_grpc.Predict),
        (InferenceGrpcCodec, kserve_grpc.Infer),
    ):
        ask = protocol("m").predict(table, None)
        found[protocol.__name__] = by_grpc(spec, endpoint, ask.body)
    return found


# ── texts ──────────────────────────────────────────────────────────────────────────────────────

texts = st.one_of(
    st.text(st.sampled_from(" \t\r\n.-+0017e北a"), max_size=8),
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20),
    st.sampled_from(
        ["7", "7.0", "-12.00", "-0", "-0.0", "0.0", "0", "00", "007", "007.0", ".0", "-.0", "7.", "+7.0", "1.10",
         "1e3", "1.0.0", "v1.0", "--7.0", "10", "100.000", "trail ", "\tx", "  ", "NULL", "7.0\n", "-00.0"]
    ),
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("paths")


def text_paths(spec: FeatureSpec, given: Sequence[str], folder: Path) -> dict[str, EncodedRows]:
    raw = [text.encode() for text in given]
    rows = len(given)
    return {
        "csv": by_csv(spec, given, folder),
        "parquet string": by_parquet(spec, pa.array(given, pa.string()), folder),
        "parquet dictionary": by_parquet(spec, pa.array(given, pa.string()).dictionary_encode(), folder),
        "parquet binary": by_parquet(spec, pa.array(raw, pa.binary()), folder),
        "tf.Example bytes": by_example(spec, [bytes_field(1, bytes_field(1, text)) for text in raw]),
        "json rows": by_json(spec, given, "rows"),
        "json columns": by_json(spec, given, "columns"),
        "json among numbers": by_json(spec, [*given, 3], "columns"),
        "infer json": by_infer_json(spec, given, "BYTES"),
        "infer binary": by_infer_bytes(spec, sized(raw), rows, "BYTES"),
        "infer grpc": by_grpc_infer(spec, rows, "BYTES", bytes_contents=raw),
        "infer grpc raw": by_grpc_infer(spec, rows, "BYTES", raw=sized(raw)),
        "predict grpc": by_grpc_predict(spec, rows, 7, string_val=raw),
        **by_client(spec, given),
    }


@settings(max_examples=40, deadline=None)
@given(given=st.lists(texts, min_size=1, max_size=6))
@example(given=["7.0", "trail ", " ", "-0.0", "1.10", "007.0"])
def test_a_text_has_one_id_however_it_comes(given: list[str], folder: Path):
    expected = [id_of(canonical(text)) for text in given]
    for path, encoded in text_paths(TEXTS, given, folder).items():
        assert encoded.slots[0].ids_N.tolist()[: len(given)] == expected, path
    ask = ElasticCtrCodec("m").predict(as_table({"v": given}), None)
    assert by_http(TEXTS, ask.path, ask.body).slots[0].ids_N.tolist() == expected


def test_pieces_between_separators_are_trimmed_too():
    spec = FeatureSpec((), (SlotField("v", "v", 7, multi=True, separator="|"),))
    encoded, _ = Encoder(spec).encode_values([{"v": " a | 7.0 ||  |b"}])
    assert encoded.slots[0].ids_N.tolist() == [id_of("a"), id_of("7"), id_of("b")]


# ── numbers ────────────────────────────────────────────────────────────────────────────────────


def text_of(value: np.floating) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(str(value)))


def number_paths(spec: FeatureSpec, given: Sequence[np.float32], folder: Path) -> dict[str, EncodedRows]:
    """Numbers that fit in 32 bits, in all types that hold them."""
    written = [text_of(value) for value in given]
    doubles = [float(text) for text in written]
    rows, single = len(given), np.array(given, dtype="<f4").tobytes()
    double = np.array(doubles, dtype="<f8").tobytes()
    shortest = [int(text) if "." not in text and "e" not in text else float(text) for text in written]
    widened = [float(value) for value in given]  # 0.10000000149011612, as .tolist() has it
    found = {
        "csv": by_csv(spec, written, folder, quotes=csv.QUOTE_MINIMAL),
        "csv, blanks": by_csv(spec, [f" {text}\t" for text in written], folder, quotes=csv.QUOTE_MINIMAL),
        "csv, as pandas has nullable integers": by_csv(
            spec,
            [f"{text}.0" if type(n) is int else text for text, n in zip(written, shortest, strict=True)],
            folder,
        ),
        "parquet float": by_parquet(spec, pa.array(given, pa.float32()), folder),
        "parquet double": by_parquet(spec, pa.array(doubles, pa.float64()), folder),
        "tf.Example float": by_example(
            spec, [bytes_field(2, bytes_field(1, struct.pack("<f", v))) for v in given]
        ),
        "tf.Example float among texts": by_example(
            spec,
            [bytes_field(2, bytes_field(1, struct.pack("<f", v))) for v in given]
            + [bytes_field(1, bytes_field(1, b"1"))],
        ),
        "json rows": by_json(spec, shortest, "rows"),
        "json columns": by_json(spec, doubles, "columns"),
        "infer json FP32": by_infer_json(spec, shortest, "FP32"),
        "infer json FP32, widened": by_infer_json(spec, widened, "FP32"),
        "infer json FP64": by_infer_json(spec, doubles, "FP64"),
        "infer binary FP32": by_infer_bytes(spec, single, rows, "FP32"),
        "infer binary FP64": by_infer_bytes(spec, double, rows, "FP64"),
        "infer grpc FP32": by_grpc_infer(spec, rows, "FP32", fp32_contents=given),
        "infer grpc raw FP32": by_grpc_infer(spec, rows, "FP32", raw=single),
        "infer grpc FP64": by_grpc_infer(spec, rows, "FP64", fp64_contents=doubles),
        "infer grpc raw FP64": by_grpc_infer(spec, rows, "FP64", raw=double),
        "predict grpc DT_FLOAT": by_grpc_predict(spec, rows, 1, float_val=given),
        "predict grpc DT_FLOAT, content": by_grpc_predict(spec, rows, 1, tensor_content=single),
        "predict grpc DT_DOUBLE": by_grpc_predict(spec, rows, 2, double_val=doubles),
        **{f"{name}, float32": rows for name, rows in by_client(spec, np.array(given, np.float32)).items()},
        **{f"{name}, list": rows for name, rows in by_client(spec, list(given)).items()},
        **{f"{name}, text": rows for name, rows in text_paths(spec, written, folder).items()},
    }
    if all(type(n) is int for n in shortest):
        whole = np.array(shortest, dtype="<i8").tobytes()
        found |= {
            "parquet int64": by_parquet(spec, pa.array(shortest, pa.int64()), folder),
            "parquet decimal": by_parquet(spec, pa.array(written).cast(pa.decimal128(20, 2)), folder),
            "tf.Example int64": by_example(
                spec, [bytes_field(3, bytes_field(1, encode_varint(n % 2**64))) for n in shortest]
            ),
            "infer json INT64": by_infer_json(spec, shortest, "INT64"),
            "infer binary INT64": by_infer_bytes(spec, whole, rows, "INT64"),
            "infer grpc INT64": by_grpc_infer(spec, rows, "INT64", int64_contents=shortest),
            "predict grpc DT_INT64": by_grpc_predict(spec, rows, 9, int64_val=shortest),
        }
    return found


singles = st.one_of(
    st.floats(-1e6, 1e6, width=32, allow_nan=False),
    st.integers(-(2**24), 2**24).map(float),
    st.sampled_from(
        [0.1, -0.1, 7.0, -0.0, 1e-5, 0.0001, 0.3, 16777216.0, 1.1, 123456.79, 1234567.5, 2500000.25]
    ),
).map(np.float32)


@settings(max_examples=40, deadline=None)
@given(given=st.lists(singles, min_size=1, max_size=5))
@example(given=[np.float32(0.1)])
@example(given=[np.float32(7.0), np.float32(-0.0)])
@example(given=[np.float32(0.0001), np.float32(1234567.5), np.float32(2500000.25)])
def test_a_number_has_one_id_and_one_float_however_it_comes(given: list[np.float32], folder: Path):
    written = [text_of(value) for value in given]
    assume(all(np.float32(float(text)) == value for text, value in zip(written, given, strict=True)))
    expected = [id_of(canonical(text)) for text in written]
    paths = number_paths(BOTH, given, folder)
    floats = [np.float32(value + 0.0) for value in given]
    buckets = paths["csv"].slots[1].ids_N.tolist()
    for path, encoded in paths.items():
        assert encoded.slots[0].ids_N.tolist()[: len(given)] == expected, path
        assert encoded.slots[1].ids_N.tolist()[: len(given)] == buckets, path
        assert encoded.dense_DB[0, : len(given)].tolist() == floats, path


@given(st.floats(allow_nan=False, allow_infinity=False))
@example(0.1)
@example(1e-5)
def test_a_double_has_the_id_of_its_shortest_text(value: float):
    written = repr(value) if not value.is_integer() else str(int(value))
    encoded, _ = Encoder(TEXTS).encode_values([{"v": value}, {"v": written}])
    assert encoded.slots[0].ids_N.tolist() == [id_of(written)] * 2


def test_floats_of_16_bits_have_their_own_shortest_text(folder: Path):
    tenth, expected = np.float16(0.1), id_of("0.1")
    bfloat = struct.pack("<f", 0.10009765625)[2:]
    half = tenth.tobytes()
    paths = {
        "parquet": by_parquet(TEXTS, pa.array([tenth], pa.float16()), folder),
        "infer json": by_infer_json(TEXTS, [float(tenth)], "FP16"),
        "infer binary": by_infer_bytes(TEXTS, half, 1, "FP16"),
        "infer grpc FP16": by_grpc_infer(TEXTS, 1, "FP16", raw=half),
        "infer grpc BF16": by_grpc_infer(TEXTS, 1, "BF16", raw=bfloat),
        "predict grpc DT_HALF": by_grpc_predict(TEXTS, 1, 19, tensor_content=half),
        "predict grpc DT_BFLOAT16": by_grpc_predict(TEXTS, 1, 14, tensor_content=bfloat),
        **by_client(TEXTS, np.array([tenth])),
    }
    for path, encoded in paths.items():
        assert encoded.slots[0].ids_N.tolist() == [expected], path


@pytest.mark.parametrize(("value", "written"), [(1e-4, "0.0001"), (5e-4, "0.0005"), (-1e-5, "-1e-05")])
def test_small_floats_of_16_bits_are_written_as_python_writes_them(value: float, written: str):
    half = np.float16(value).tobytes()
    assert by_infer_bytes(TEXTS, half, 1, "FP16").slots[0].ids_N.tolist() == [id_of(written)]
    bfloat = struct.pack("<I", struct.unpack("<I", struct.pack("<f", value))[0] + 0x8000)[2:]  # rounded
    assert by_grpc_infer(TEXTS, 1, "BF16", raw=bfloat).slots[0].ids_N.tolist() == [id_of(written)]


@pytest.mark.parametrize("value", [np.inf, -np.inf])
def test_an_infinite_category_in_a_log_is_the_text_inf_in_every_width(value: float, folder: Path):
    expected = [id_of(repr(value)), id_of("0.5")]
    given = np.array([value, 0.5])
    paths = {
        f"parquet {kind}": by_parquet(TEXTS, pa.array(given.astype(kind)), folder)
        for kind in ("float16", "float32", "float64")
    }
    paths["tf.Example"] = by_example(
        TEXTS, [bytes_field(2, bytes_field(1, struct.pack("<f", v))) for v in given]
    )
    for path, encoded in paths.items():
        assert encoded.slots[0].ids_N.tolist() == expected, path


def test_several_narrow_floats_a_row_have_their_shortest_texts():
    spec = FeatureSpec((), (SlotField("v", "v", 7, multi=True),))
    content = np.array([0.1, 7.0, 0.3, 0.5], "<f4").tobytes()
    expected = [id_of("0.1"), id_of("7"), id_of("0.3"), id_of("0.5")]
    request = PredictRequest()
    tensor = TensorProto(dtype=1, tensor_content=content)
    for size in (2, 2):
        tensor.tensor_shape.dim.add(size=size)
    request.inputs["v"].CopyFrom(tensor)
    found = by_grpc(spec, tfserving_grpc.Predict, request.SerializeToString())
    assert found.slots[0].ids_N.tolist() == expected
    infer = {
        "name": "v",
        "shape": [2, 2],
        "datatype": "FP32",
        "parameters": {"binary_data_size": len(content)},
    }
    head = json.dumps({"inputs": [infer]}).encode()
    size_of_head = {b"inference-header-content-length": b"%d" % len(head)}
    assert by_http(spec, HTTP["infer"], head + content, size_of_head).slots[0].ids_N.tolist() == expected


# ── dates, decimals, booleans ──────────────────────────────────────────────────────────────────


def test_dates_are_iso_text_decimals_are_digits_and_booleans_are_1_or_0(folder: Path):
    import datetime as dt

    day = [dt.date(2026, 1, 31), dt.date(1969, 12, 31), None]
    expected = [id_of("2026-01-31"), id_of("1969-12-31"), id_of("")]
    for kind in (pa.date32(), pa.date64()):
        assert by_parquet(TEXTS, pa.array(day, kind), folder).slots[0].ids_N.tolist() == expected
    assert by_csv(TEXTS, ["2026-01-31", "1969-12-31", ""], folder).slots[0].ids_N.tolist() == expected
    decimals = pa.array(["7.00", "1.10", "-0.50"]).cast(pa.decimal128(10, 2))
    expected = [id_of("7"), id_of("1.10"), id_of("-0.50")]
    assert by_parquet(TEXTS, decimals, folder).slots[0].ids_N.tolist() == expected
    assert by_csv(TEXTS, ["7.00", "1.10", "-0.50"], folder).slots[0].ids_N.tolist() == expected
    truths = [id_of("1"), id_of("0")]
    assert by_parquet(TEXTS, pa.array([True, False]), folder).slots[0].ids_N.tolist() == truths
    assert by_json(TEXTS, [True, False], "rows").slots[0].ids_N.tolist() == truths
    assert by_json(TEXTS, [True, False, "x"], "rows").slots[0].ids_N.tolist()[:2] == truths
    assert by_infer_bytes(TEXTS, b"\1\0", 2, "BOOL").slots[0].ids_N.tolist() == truths
    assert by_grpc_predict(TEXTS, 2, 10, bool_val=[True, False]).slots[0].ids_N.tolist() == truths
    moment = pa.array([dt.datetime(2026, 1, 31, 12)], pa.timestamp("us"))
    assert by_parquet(TEXTS, moment, folder).slots[0].ids_N.tolist() == [id_of("1769860800")]


# ── what stands for no value ───────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("listed", ["-1.0", "-1", " -1.00 "])
def test_a_missing_number_is_missing_however_it_comes(listed: str, folder: Path):
    spec = FeatureSpec(BOTH.dense, BOTH.slots, missing=(listed,))
    gap = [slot.missing_id for slot in spec.slots]
    given = [np.float32(-1.0), np.float32(-2.0)]
    for path, encoded in number_paths(spec, given, folder).items():
        assert [int(slot.ids_N[0]) for slot in encoded.slots] == gap, path
        assert int(encoded.slots[0].ids_N[1]) == id_of("-2"), path
        assert encoded.dense_DB[0, :2].tolist() == [0.0, -2.0], path


def test_a_missing_fraction_is_missing_however_it_comes(folder: Path):
    spec = FeatureSpec(BOTH.dense, BOTH.slots, missing=("0.1", "NULL"))
    gap = [slot.missing_id for slot in spec.slots]
    for path, encoded in number_paths(spec, [np.float32(0.1), np.float32(0.3)], folder).items():
        assert [int(slot.ids_N[0]) for slot in encoded.slots] == gap, path
        assert encoded.dense_DB[0, :2].tolist() == [0.0, np.float32(0.3)], path


NUMBERS = FeatureSpec(BOTH.dense, BOTH.slots[1:])


@pytest.mark.parametrize("listed", ["-9.50", "-9.5", " -95e-1", "-9.500000000000000000000"])
def test_a_missing_number_is_compared_by_value_in_number_fields(listed: str, folder: Path):
    spec = FeatureSpec(NUMBERS.dense, NUMBERS.slots, missing=(listed,))
    for path, encoded in number_paths(spec, [np.float32(-9.5), np.float32(-9.25)], folder).items():
        assert encoded.dense_DB[0, :2].tolist() == [0.0, -9.25], path
        assert int(encoded.slots[0].ids_N[0]) == spec.slots[0].missing_id != int(encoded.slots[0].ids_N[1]), (
            path
        )
    written = ["-9.5", "-9.50", " -9.500", "-0.95e1", "-9.50000000000000000000", "-9.51"]
    for path, encoded in text_paths(spec, written, folder).items():
        assert encoded.dense_DB[0, :6].tolist() == [0.0] * 5 + [np.float32(-9.51)], path


def test_a_missing_whole_number_written_with_an_exponent_is_every_such_number(folder: Path):
    spec = FeatureSpec(NUMBERS.dense, NUMBERS.slots, missing=("1e9", "1e400", "1_000", "NULL"))
    for path, encoded in number_paths(spec, [np.float32(1e9), np.float32(1000.0)], folder).items():
        assert encoded.dense_DB[0, :2].tolist() == [0.0, 1000.0], path
    written = ["1e9", "1000000000", "1E+9", "1e400", " NULL", "1_000", "1000"]
    for path, encoded in text_paths(spec, written, folder).items():
        assert encoded.dense_DB[0, :7].tolist() == [0.0] * 6 + [1000.0], path


def test_a_missing_text_of_a_category_is_compared_as_text(folder: Path):
    spec = FeatureSpec((), TEXTS.slots, missing=("-9.50", "1e9"))
    written = ["-9.50", "-9.5", "1e9", "1000000000"]
    expected = [id_of(""), id_of("-9.5"), id_of(""), id_of("1000000000")]
    for path, encoded in text_paths(spec, written, folder).items():
        assert encoded.slots[0].ids_N.tolist()[:4] == expected, path


def test_a_missing_fraction_leaves_narrow_floats_of_number_fields_to_the_kernel():
    spec = FeatureSpec(NUMBERS.dense, (*NUMBERS.slots, SlotField("c", "c", 9)), missing=("0.1",))
    part = RequestEncoder(spec)
    assert part._printed_C.tolist() == [False, True]


def test_numbers_sent_to_elasticctr_are_compared_with_missing_by_value():
    column = raw_column(["-9.5", "-9.500", "2"], "v")
    spec = FeatureSpec(NUMBERS.dense, (), missing=("-9.50",))
    sent = to_elasticctr_columns({"v": column}, spec, 3)["v"]
    assert isinstance(sent, NumberColumn)
    assert np.isnan(sent.values_N).tolist() == [True, True, False]


def test_a_date_in_a_number_field_is_refused_with_a_remedy(folder: Path):
    import datetime as dt

    path = folder / "dates.parquet"
    pq.write_table(pa.table({"v": pa.array([dt.date(2026, 1, 31)])}), path)
    (piece,) = (reader := ParquetReader(("v",))).blocks("dates.parquet", path)
    _, faults = Encoder(NUMBERS).encode(reader.parse(piece))
    assert [fault.detail for group in faults for fault in group] == [
        "n is '2026-01-31', a number expected; a date is text: make the field a slot, or write the date as a number "
        "in the log"
    ]


def test_a_missing_text_is_missing_with_blanks_around_it(folder: Path):
    spec = FeatureSpec((), TEXTS.slots, missing=(" NULL", "?"))
    for path, encoded in text_paths(spec, ["NULL ", "?", "\tNULL", "NUL"], folder).items():
        assert encoded.slots[0].ids_N.tolist()[:4] == [*[id_of("")] * 3, id_of("NUL")], path


def test_positive_labels_are_compared_by_their_canonical_text(folder: Path):
    fields = TargetFields("v", positive=("1.0", " yes"))
    reader = CsvReader(wanted=("v",))
    path = folder / "labels.csv"
    path.write_text("v,more\n1,x\n 1.0 ,x\nyes,x\nyes ,x\n1.01,x\nno,x\n  ,x\n")
    (block,) = reader.blocks("labels.csv", path)
    bounds = TimeBounds.for_file(SourceFile("labels.csv", 0, ""), block, 0.0)
    found, faults = read_targets(
        reader.parse(block), EncodedRows(7, np.empty((0, 7), np.float32), ()), fields, (), bounds
    )
    assert found.label_B.tolist() == [1, 1, 1, 1, 0, 0, 0]
    assert [fault.detail for group in faults for fault in group] == ["v is empty"]


def test_the_frequent_values_of_a_report_are_canonical_texts(folder: Path):
    spec = FeatureSpec((), TEXTS.slots, missing=("-1.0",))
    raw = RawRows(6, {"v": raw_column(["a ", "a", "7.0", " 7", "-1", " "], "v")}, np.arange(6))
    tally = RowStatistics.empty(1)
    tally.sample(raw, spec.slots, spec.missing)
    assert tally.slots[0].frequent == {"a": 2, "7": 2}
    narrow = RawRows(
        2, {"v": NumberColumn(np.array([0.1, 7.0], np.float32).astype(float), precision=24)}, np.arange(2)
    )
    tally = RowStatistics.empty(1)
    tally.sample(narrow, spec.slots, spec.missing)
    assert tally.slots[0].frequent == {"0.1": 1, "7": 1}


# ── metadata for clients ──────────────────────────────────────────────────────────────────────


def versions_of(spec: FeatureSpec) -> OpenVersions:
    versions = OpenVersions(("m",), lambda scorer: None)
    versions.add(Model(spec))
    versions.switch(1)
    return versions


def described_types(spec: FeatureSpec) -> dict[str, dict[str, str]]:
    """The type of each column, as every protocol's metadata has it, by its name in the Open Inference Protocol."""
    versions = versions_of(spec)
    grpc = ModelMetadataResponse.FromString(kserve_grpc.model_metadata(b"", versions))
    signatures = SignatureDefMap()
    described = GetModelMetadataResponse.FromString(tfserving_grpc.metadata(b"", versions))
    described.metadata["signature_def"].Unpack(signatures)
    inputs = signatures.signature_def["serving_default"].inputs
    rest = json.loads(kserve_http.metadata("m", None, versions).body)["inputs"]
    signature = json.loads(tfserving_http.metadata("m", None, versions).body)["metadata"]["signature_def"][
        "signature_def"
    ]
    return {
        "inference grpc": {tensor.name: tensor.datatype for tensor in grpc.inputs},
        "tfserving grpc": {name: {1: "FP32", 7: "BYTES"}[info.dtype] for name, info in inputs.items()},
        "inference rest": {tensor["name"]: tensor["datatype"] for tensor in rest},
        "tfserving rest": {
            name: {"DT_FLOAT": "FP32", "DT_STRING": "BYTES"}[info["dtype"]]
            for name, info in signature["serving_default"]["inputs"].items()
        },
    }


@pytest.mark.parametrize(
    "also",
    [DenseField("n", "v", "log1p"), SlotField("b", "v", 8, "log2"), SlotField("b", "v", 8, "quantiles")],
)
def test_a_column_that_is_a_category_and_a_number_is_text_in_metadata(also: DenseField | SlotField):
    dense = (
        (also, DenseField("m", "m", "none"))
        if isinstance(also, DenseField)
        else (DenseField("m", "m", "none"),)
    )
    slots = TEXTS.slots if isinstance(also, DenseField) else (*TEXTS.slots, also)
    types = described_types(FeatureSpec(dense, slots))
    assert types == {protocol: {"v": "BYTES", "m": "FP32"} for protocol in types}


def test_the_openapi_document_lets_a_category_be_text_or_a_number():
    page = route("GET", "/openapi.json")
    assert isinstance(page, Route)
    schemas = json.loads(page.description(versions_of(BOTH)).body)["components"]["schemas"]
    assert schemas["Row"]["properties"]["v"]["type"] == ["string", "number", "null"]


# ── ElasticCTR ─────────────────────────────────────────────────────────────────────────────────


def test_a_feasign_is_refused_for_a_column_that_is_a_category_and_a_number():
    slots = [{"slot_name": "v", "feasigns": [xxhash.xxh64_intdigest(b"7")]}]
    body = orjson.dumps({"instances": [{"slots": slots}]})
    with pytest.raises(
        RequestRefused, match=r"'v' has a feasign in instances\[0\], but this model reads it as a category"
    ):
        by_http(BOTH, "/ElasticCTRPredictionService/inference", body)
    absent = orjson.dumps({"instances": [{"slots": []}]})
    assert by_http(BOTH, "/ElasticCTRPredictionService/inference", absent).dense_DB.tolist() == [[0.0]]


def test_predict_by_feasigns_is_refused_for_a_column_that_is_a_category_and_a_number():
    with pytest.raises(DataError, match=r"uses v as a category and as a number.*Use another --protocol"):
        to_elasticctr_columns({"v": raw_column(["7"], "v")}, BOTH, 1)
    sent = to_elasticctr_columns({"v": raw_column([" 7.0"], "v")}, TEXTS, 1)["v"]
    assert sent.data[sent.starts_N[0] : sent.ends_N[0]].tobytes() == b"7"
