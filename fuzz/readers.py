"""Every reader: any bytes become rows, bad rows or an error; no span leaves its text, no index its array."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from clickline.data.readers import Reader, open_reader
from clickline.data.readers.paddlerec_lines import CLICK_ONLY, NamedTokens
from clickline.data.readers.text_blocks import BrokenStream, open_decompressed
from clickline.errors import ClicklineError
from clickline.features import DenseField, Encoder, FeatureSpec, SlotField
from clickline.records import CRITEO_FIELDS, RawRows, TextColumn
from data.readers.record_writers import example, recordio, recordio_chunk, snappy_frames, tfrecord
from fuzz.target import Choices, Target, scratch

_BLOCKS = (1 << 21, 7, 64, 1000)
_OTHER_LAYOUT = 64  # with blocks of this size, readers with several layouts read another one
_WANTED = ("label", "C1", "I1")
_ENCODER = Encoder(
    FeatureSpec(
        dense=(DenseField("I1", "I1", "log1p"), DenseField("dense_1", "dense_1", "none")),
        slots=(
            SlotField("C1", "C1", 1, multi=True, separator="|"),
            SlotField("5", "5", 5, "feasign", multi=True),
            SlotField("I1_bucket", "I1", 7, "log2"),
            SlotField("C26", "C26", 26),
        ),
        missing=("-", "NULL"),
    )
)


def check(rows: RawRows) -> None:
    """Invariants that all consumers of raw rows rely on."""
    assert rows.lines_B.size == rows.rows
    for column in rows.columns.values():
        if isinstance(column, TextColumn):
            values = column.starts_N.size
            assert column.ends_N.size == values
            if values:
                assert column.starts_N.min() >= 0
                assert (column.starts_N <= column.ends_N).all()
                assert column.ends_N.max() <= column.data.size
        else:
            values = column.values_N.size
        if column.offsets_B1 is None:
            assert values == rows.rows
        else:
            assert column.offsets_B1.size == rows.rows + 1
            assert column.offsets_B1[0] == 0 and column.offsets_B1[-1] == values
            assert (np.diff(column.offsets_B1) >= 0).all()


def _read(reader: Reader, data: bytes, name: str = "log") -> None:
    path = scratch() / "log"
    path.write_bytes(data)
    try:
        for block in reader.blocks(name, path):
            rows = reader.parse(block)
            check(rows)
            _ENCODER.encode(rows)
    except ClicklineError as error:
        assert str(error)


def _packed(content: bytes, how: int) -> bytes:
    if how == 1:
        return gzip.compress(content, 1, mtime=0)
    if how == 2:
        return gzip.compress(content, 1, mtime=0)[:-5]
    if how == 3:
        return bytes(pa.Codec("zstd").compress(content, asbytes=True))
    return content


def _criteo(data: bytes) -> None:
    choices = Choices(data)
    reader = open_reader("criteo", CRITEO_FIELDS, block_bytes=choices.one_of(_BLOCKS))
    packed = choices.number(4)
    _read(reader, _packed(choices.rest(), packed))


def _csv(data: bytes) -> None:
    choices = Choices(data)
    reader = open_reader(
        "csv",
        _WANTED,
        delimiter=choices.one_of([",", "\t", "|", ";", " "]),
        header=bool(choices.number(2)),
        columns=("label", "C1", "I1", "more"),
        block_bytes=choices.one_of(_BLOCKS),
    )
    packed = choices.number(4)
    _read(reader, _packed(choices.rest(), packed))


def _slots(data: bytes) -> None:
    choices = Choices(data)
    block, modulo, packed = choices.one_of(_BLOCKS), choices.one_of([None, 10]), choices.number(4)
    reader = open_reader(
        "slots",
        (),
        columns=("show", "click", "conversion") if block == _OTHER_LAYOUT else (),
        slots=choices.one_of([(5, 6), (5,), ()]),
        modulo=modulo,
        block_bytes=block,
    )
    _read(reader, _packed(choices.rest(), packed))


def _paddlerec(data: bytes) -> None:
    choices = Choices(data)
    block, modulo, packed = choices.one_of(_BLOCKS), choices.one_of([None, 10]), choices.number(4)
    named = NamedTokens(("conversion", "click"), ("price",), ("1_4",), ("note",), ("sample", "click"))
    reader = open_reader(
        "paddlerec",
        (),
        dense=choices.number(3),
        slots=(5, 1),
        named=named if block == _OTHER_LAYOUT else CLICK_ONLY,
        modulo=modulo,
        block_bytes=block,
    )
    _read(reader, _packed(choices.rest(), packed))


def _tfrecord(data: bytes) -> None:
    """Half of the inputs are a raw file, half the records of a file with correct checksums."""
    choices = Choices(data)
    block = choices.one_of(_BLOCKS)
    reader = open_reader(
        "intel_tfrecord" if block == _OTHER_LAYOUT else "tfrecord", _WANTED, block_bytes=block
    )
    framed, cut = choices.number(2), choices.number(100)
    content = choices.rest()
    if framed:
        content = tfrecord([content[:cut], content[cut:]])
    _read(reader, content)


def _recordio(data: bytes) -> None:
    choices = Choices(data)
    reader = open_reader("recordio", _WANTED, block_bytes=choices.one_of(_BLOCKS))
    how, cut = choices.number(4), choices.number(100)
    content = choices.rest()
    if how == 1:
        content = recordio([content[:cut], content[cut:]], "gzip" if cut % 2 else "none")
    elif how > 1:  # a chunk with a correct checksum and any payload
        head = (1).to_bytes(4, "little") + zlib.crc32(content).to_bytes(4, "little")
        head += (how - 1).to_bytes(4, "little") + len(content).to_bytes(4, "little")
        content = b"\x04\x03\x02\x01" + head + content
    _read(reader, content)


def _parquet(data: bytes) -> None:
    choices = Choices(data)
    reader = open_reader("parquet", _WANTED, block_bytes=choices.one_of(_BLOCKS))
    _read(reader, choices.rest())


def _compressed(data: bytes) -> None:
    """The decompressors: chunks are small for any input, and an error is reported once, at the end."""
    path = scratch() / "log"
    path.write_bytes(data)
    try:
        for count, chunk in enumerate(open_decompressed("log.gz", path)):
            assert 0 < len(chunk) <= 1 << 20
            if count > 64:
                break
    except BrokenStream as broken:
        assert broken.reason


# ── seeds ──────────────────────────────────────────────────────────────────────────────────────

_OPTIONS = [bytes([block, 0, packed, 0]) for block in range(4) for packed in (0, 1)]
_RECORDS = [
    example({"label": [1], "C1": [b"x", b"|y"], "I1": [0.5]}),
    example({"label": [0.0], "C1": [b"a"], "I1": [7, -1]}, packed=False),
    b"",
]


def _text_seeds(text: bytes, options: int) -> list[bytes]:
    plain = [bytes(options) + text, b"\1" + bytes(options - 1) + text]
    return [*plain, *(choice + bytes(max(0, options - 4)) + text for choice in _OPTIONS)]


def _criteo_seeds() -> Sequence[bytes]:
    row = b"1\t" + b"\t".join(b"%d" % n for n in range(13)) + b"\t" + b"\t".join([b"68fd1e64"] * 26)
    header = "\t".join(CRITEO_FIELDS).encode()
    return _text_seeds(row + b"\n" + row.replace(b"5", b"") + b"\r\n\n" + b"1\tx\n", 4) + _text_seeds(
        b"\xef\xbb\xbf" + header + b"\n" + row, 4
    )


def _csv_seeds() -> Sequence[bytes]:
    text = b'label,C1,I1,more\n1,a|b,2.5,x\n0,"a""b\n,", ,\xc3\xa9\n\n"1" ,"x"y,1,2\r\n1,2\n'
    return _text_seeds(text, 8) + [bytes([0, 0, 1, 0, n, 0, 0, 0]) + text for n in range(4)]


def _slots_seeds() -> Sequence[bytes]:
    return _text_seeds(b"1 0 7:5 8:6\n0:1 5:5\r\n3 1  18446744073709551615:5\n1 0 x:5\n", 8)


def _paddlerec_seeds() -> Sequence[bytes]:
    text = b"click:1 dense_feature:0.5 5:7 1:9\nclick:0 dense_feature:1e3 dense_feature:x 5:7\n"
    named = b"7,1,conversion:0,price:0.5,1_4:22,note:x,5:7,1:9\n8,0,5:7\n"
    return [
        *_text_seeds(text, 8),
        bytes([1, 0, 0, 0, 0, 0, 1, 0]) + text,
        bytes([2, 0, 0, 0, 0, 0, 0, 0]) + named,
    ]


def _tfrecord_seeds() -> Sequence[bytes]:
    whole = tfrecord(_RECORDS)
    pairs = [part for at in range(26) for part in (at, 7)]
    intel = tfrecord([example({"label": [1], "numeric_1": [0.5] * 13, "string_1": pairs})])
    return [bytes(6) + whole, bytes([1]) + bytes(5) + whole, bytes([2]) + bytes(5) + intel] + [
        bytes([block, 0, 1, 0, len(_RECORDS[0]), 0]) + b"".join(_RECORDS) for block in range(4)
    ]


def _recordio_seeds() -> Sequence[bytes]:
    payload = b"".join(len(record).to_bytes(4, "little") + record for record in _RECORDS)
    return [
        *(bytes(6) + recordio(_RECORDS, how) for how in ("none", "snappy", "raw snappy", "gzip")),
        bytes(6) + recordio_chunk(_RECORDS, "none", count_last=True),
        b"\0\0\1\0\5\0" + b"".join(_RECORDS),
        b"\0\0\2\0\0\0" + snappy_frames(payload),
        b"\0\0\2\0\0\0" + pa.Codec("snappy").compress(payload, asbytes=True),
        b"\0\0\3\0\0\0" + gzip.compress(payload, mtime=0),
    ]


def _parquet_seeds() -> Sequence[bytes]:
    table = pa.table(
        {
            "label": pa.array([1.0, 0.0, None] * 4, pa.float32()),
            "C1": pa.array(["a", "b", None] * 4).dictionary_encode(),
            "I1": pa.array([[1, 2], [], None] * 4, pa.list_(pa.int64())),
        }
    )
    plain = table.set_column(1, "C1", pa.array(["x" * 30, "é", ""] * 4))
    seeds = []
    for content in (table, plain):
        for compression in ("none", "snappy", "zstd", "gzip"):
            sink = io.BytesIO()
            pq.write_table(content, sink, compression=compression, row_group_size=5)
            seeds.append(bytes(2) + sink.getvalue())
    return seeds


def _compressed_seeds() -> Sequence[bytes]:
    text = b"some text\n" * 20
    once, zstd = gzip.compress(text, mtime=0), pa.Codec("zstd").compress(text, asbytes=True)
    skippable = b"\x50\x2a\x4d\x18\x04\0\0\0abcd"
    return [text, once, once + b"\0\0" + once, once[:-4], zstd, zstd + zstd, skippable + zstd, zstd[:-3]]


TARGETS = {
    "criteo": Target(_criteo, _criteo_seeds),
    "csv": Target(_csv, _csv_seeds),
    "slots": Target(_slots, _slots_seeds),
    "paddlerec": Target(_paddlerec, _paddlerec_seeds),
    "tfrecord": Target(_tfrecord, _tfrecord_seeds),
    "recordio": Target(_recordio, _recordio_seeds),
    "parquet": Target(_parquet, _parquet_seeds),
    "compressed": Target(_compressed, _compressed_seeds),
}
