"""Serving table files: whatever they contain, a lookup reads only mapped bytes, and damage is reported."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from table_model import blocks_of, random_content

from clickline.embedding.jagged_ids import to_jagged
from clickline.embedding.serving import GatherBatch, PartShape, ServingTable, gather_plan, write_shards
from clickline.errors import ClicklineError
from clickline.records import SlotIds
from fuzz.target import Choices, Target, mutated, scratch

_PARTS = [PartShape(3, True), PartShape(1, False)]
_TRAILER = struct.Struct("<QI4x8s")
_PLAN = gather_plan(_PARTS, [(0, 0, "sum", 0.0, [0.0] * 3), (1, 3, "mean", 0.0, [0.0])])


@cache
def _whole(precision: str) -> tuple[bytes, dict[str, Any]]:
    """The bytes before the footer, and the footer."""
    folder = scratch() / f"whole-{precision}"
    folder.mkdir()
    content = random_content(np.random.default_rng(1), _PARTS, 40)
    content[0][7] = None
    content[0] = dict.fromkeys(range(20), (0.5, (1.0, 2.0, 3.0))) | content[0]
    (file,) = write_shards(folder, _PARTS, precision, 1, blocks_of(_PARTS, content))  # type: ignore[arg-type]
    data = (folder / file.name).read_bytes()
    size = _TRAILER.unpack(data[-_TRAILER.size :])[0]
    start = len(data) - _TRAILER.size - size
    return data[:start], json.loads(data[start : start + size])


def _file(choices: Choices) -> bytes:
    body, footer = _whole(choices.one_of(["fp32", "fp16", "int8"]))
    if choices.number(2):  # bits of the rows and of the directory
        changed = bytearray(body)
        for _ in range(choices.number(8)):
            at = choices.number(len(changed))
            changed[at : at + 4] = choices.one_of(
                [b"\xff\xff\xff\xff", b"\0\0\0\0", b"\1\0\0\x80", b"\x40\0\0\0"]
            )
        body = bytes(changed[: len(body)])
    if choices.number(2):
        footer = mutated(footer, choices)
    text = json.dumps(footer).encode("utf-8", "surrogatepass")
    if choices.number(8) == 1:
        text = choices.rest()
    length = choices.one_of([len(text), len(text), len(text), 2**32, 2**63, 0, len(text) - 1])
    checksum = zlib.crc32(text)
    return body + text + _TRAILER.pack(length, checksum, b"CLKFROZE")


def _serving_table(data: bytes) -> None:
    choices = Choices(data)
    folders = [scratch() / name for name in ("base", "first", "second")][: 1 + choices.number(3)]
    for folder in folders:
        folder.mkdir(exist_ok=True)
        raw = choices.number(8) == 1
        content = choices.rest() if raw else _file(choices)
        (folder / "table-00000-of-00001.bin").write_bytes(content)
    try:
        with ServingTable.open(folders) as tables:
            assert 0 <= tables.rows < 10_000
            ids_N = np.arange(64, dtype=np.uint64)
            for part in range(len(tables.parts)):
                rows_NW = np.empty((64, tables.row_bytes(part)), dtype=np.uint8)
                assert 0 <= tables.find(part, ids_N, rows_NW, np.empty(64, dtype=np.bool_)) <= 64
            if tables.parts == tuple(_PARTS):
                bags = to_jagged([SlotIds(ids_N), SlotIds(ids_N)], 64)
                outputs = np.empty((64, 4), dtype=np.float32), np.empty(64, dtype=np.float32)
                tables.gather(GatherBatch(_PLAN, bags, *outputs, np.zeros(2, dtype=np.int64)))
    except ClicklineError as error:
        assert str(error)


def _seeds() -> Sequence[bytes]:
    random = np.random.default_rng(0)
    body, footer = _whole("fp32")
    text = json.dumps(footer).encode()
    whole = body + text + _TRAILER.pack(len(text), zlib.crc32(text), b"CLKFROZE")
    return [
        bytes(16),
        b"\0\0\1\0" + whole,
        *(random.integers(0, 9, 60, dtype=np.uint8).tobytes() for _ in range(40)),
        *(np.repeat(random.integers(0, 9, 30, dtype=np.uint8), [1, 1] * 15).tobytes() for _ in range(20)),
    ]


TARGETS = {"serving-table": Target(_serving_table, _seeds)}
