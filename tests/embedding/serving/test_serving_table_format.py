"""Files of serving tables: rows are read as written, and damage is reported, never followed."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from table_model import blocks_of, fp32_row, packed_rows, random_content, write_content

from clickline.embedding.serving import PartShape, RowBlock, ServingTable, shards_of, write_shards
from clickline.embedding.serving.packed_rows import mix_ids, pack, unpack
from clickline.errors import ArtifactError

PARTS = [PartShape(5, True), PartShape(1, False)]


@pytest.mark.parametrize("shards", [1, 2, 3, 64, 1000])
def test_every_id_is_in_its_shard_and_only_there(shards: int, tmp_path: Path) -> None:
    content = random_content(np.random.default_rng(shards), PARTS, 500)
    content[0][0] = content[0][2**64 - 1] = (1.0, (1.0,) * 5)
    files = write_shards(tmp_path, PARTS, "fp32", shards, blocks_of(PARTS, content))
    assert [file.name for file in files] == [f"table-{i:05d}-of-{shards:05d}.bin" for i in range(shards)]
    assert sum(file.rows for file in files) == 1002 and not any(file.tombstones for file in files)
    for file in files:
        data = (tmp_path / file.name).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (file.size, file.sha256)
    some = sorted({0, shards // 2, shards - 1})
    with ServingTable.open([tmp_path]) as full, ServingTable.open([tmp_path], shards=some) as part:
        assert (full.rows, full.parts, full.precision) == (1002, tuple(PARTS), "fp32")
        for p, shape in enumerate(PARTS):
            ids = list(content[p])
            rows = [fp32_row(shape, weights) for weights in content[p].values() if weights]
            assert packed_rows(full, p, ids) == rows
            shard_N = np.empty(len(ids), np.int64)
            shards_of(np.array(ids, np.uint64), shards, shard_N)
            assert shard_N.tolist() == [(id * 0x9E3779B97F4A7C15 % 2**64) * shards >> 64 for id in ids]
            expected = [row if shard in some else None for row, shard in zip(rows, shard_N, strict=True)]
            assert packed_rows(part, p, ids) == expected
            absent = [id + 1 for id in ids[:-1] if id + 1 not in content[p]]
            assert packed_rows(full, p, absent) == [None] * len(absent)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
def test_empty_tables(precision: str, tmp_path: Path) -> None:
    for name, parts in (("rows", PARTS), ("parts", [])):
        folder = write_content(tmp_path / name, parts, [{} for _ in parts], 2, precision)
        with ServingTable.open([folder, folder, folder]) as tables:
            assert tables.rows == 0
            for part in range(len(parts)):
                assert packed_rows(tables, part, [0, 1, 2**64 - 1]) == [None] * 3
                assert packed_rows(tables, part, []) == []


def test_ids_that_all_fall_into_one_bucket_are_found(tmp_path: Path) -> None:
    """Ids with consecutive mix(id), which no bucket separates."""
    inverse = pow(0x9E3779B97F4A7C15, -1, 2**64)
    first = 7 << 60
    content = [{(first + n) * inverse % 2**64: (float(n), (1.0,) * 5) for n in range(3000)}]
    write_content(tmp_path / "t", PARTS[:1], content, 3)
    with ServingTable.open([tmp_path / "t"]) as tables:
        rows = packed_rows(tables, 0, list(content[0]))
        assert rows == [fp32_row(PARTS[0], weights) for weights in content[0].values()]
        assert packed_rows(tables, 0, [(first - 1) * inverse % 2**64, (first + 3000) * inverse % 2**64]) == [
            None,
            None,
        ]


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
def test_packing_unpacked_rows_gives_the_same_bytes(precision) -> None:  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(0)
    for dim in (1, 2, 9, 16):
        rows = 4000
        vector = (rng.normal(size=(rows, dim)) * np.exp(rng.uniform(-90, 80, (rows, 1)))).astype(np.float32)
        vector[rng.random((rows, dim)) < 0.1] = 0
        vector[:3] = [[0.0], [-0.0], [3e38]]
        block = RowBlock(0, np.arange(rows, dtype=np.uint64), None, vector, rng.random(rows) < 0.1)
        packed = pack(block, PartShape(dim, False), precision)
        back = unpack(0, packed)
        assert np.array_equal(back.tombstone_N, block.tombstone_N)
        assert pack(back, PartShape(dim, False), precision).tobytes() == packed.tobytes()


def block(ids: list[int], part: int = 0, value: float = 1.0) -> RowBlock:
    shape, size = PARTS[part], len(ids)
    wide = np.full(size, value, np.float32) if shape.wide else None
    return RowBlock(
        part,
        np.array(ids, np.uint64),
        wide,
        np.full((size, shape.dim), value, np.float32),
        np.zeros(size, bool),
    )


def in_order(count: int) -> list[int]:
    ids = np.arange(count, dtype=np.uint64)
    return ids[np.argsort(mix_ids(ids))].tolist()


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize(
    "blocks",
    [
        [block(in_order(9)[::-1])],
        [block(in_order(9)[:5]), block(in_order(9)[4:])],
        [block(in_order(9)[5:]), block(in_order(9)[:5])],
        [block([1], 1), block([1], 0)],
        [block([3, 3])],
        [
            block([1], 1),
            RowBlock(
                2, *(getattr(block([1]), name) for name in ("ids_N", "wide_N", "vector_ND", "tombstone_N"))
            ),
        ],
    ],
    ids=["falling", "twice", "blocks", "parts", "same", "no such part"],
)
def test_rows_out_of_order_are_rejected(blocks: list[RowBlock], shards: int, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"order|came after"):
        write_shards(tmp_path, PARTS, "fp32", shards, blocks)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_rejected(value: float, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"id 5 .* not finite"):
        write_shards(tmp_path, PARTS, "fp32", 1, [block([5], 0, value)])
    with pytest.raises(ArtifactError, match=r"id 5 .* not finite"):
        write_shards(tmp_path, PARTS, "int8", 1, [block([5], 1, value)])


def table(folder: Path) -> tuple[Path, bytes]:
    write_content(folder, PARTS, random_content(np.random.default_rng(0), PARTS, 100))
    (path,) = folder.iterdir()
    return path, path.read_bytes()


def test_a_truncated_file_is_rejected_at_any_length(tmp_path: Path) -> None:
    path, content_bytes = table(tmp_path / "t")
    for size in [
        *range(0, 130),
        *range(130, len(content_bytes), 97),
        *range(len(content_bytes) - 400, len(content_bytes)),
    ]:
        path.write_bytes(content_bytes[:size])
        with pytest.raises(ArtifactError, match=r"truncated|cannot be opened|footer|size"):
            ServingTable.open([path.parent])
    path.write_bytes(content_bytes + bytes(64))
    with pytest.raises(ArtifactError, match="truncated"):
        ServingTable.open([path.parent])


def test_every_flipped_bit_of_the_footer_is_detected(tmp_path: Path) -> None:
    path, content_bytes = table(tmp_path / "t")
    (length,) = np.frombuffer(content_bytes[-24:-16], "<u8")
    begin = len(content_bytes) - 24 - int(length)
    for at in [
        *range(12),
        *range(begin, len(content_bytes) - 12),
        *range(len(content_bytes) - 8, len(content_bytes)),
    ]:
        damaged = bytearray(content_bytes)
        damaged[at] ^= 1 << (at % 8)
        path.write_bytes(damaged)
        with pytest.raises(ArtifactError):
            ServingTable.open([path.parent])


def with_footer(content_bytes: bytes, change) -> bytes:  # type: ignore[no-untyped-def]
    """The file with a changed footer and a valid checksum."""
    (length,) = np.frombuffer(content_bytes[-24:-16], "<u8")
    begin = len(content_bytes) - 24 - int(length)
    footer = json.loads(content_bytes[begin:-24])
    footer = change(footer) or footer
    text = json.dumps(footer).encode()
    trailer = np.array([len(text)], "<u8").tobytes() + np.array([zlib.crc32(text), 0], "<u4").tobytes()
    return content_bytes[:begin] + text + trailer + content_bytes[-8:]


def set_section(key: str, value: object):  # type: ignore[no-untyped-def]
    return lambda footer: footer["sections"][0].update({key: value})


@pytest.mark.parametrize(
    "change",
    [
        *(set_section(key, value) for key in ("rows", "rows_at", "directory_at", "buckets", "end", "tombstones") for value in (-1, 0, 1, 99, 101, 2**40, 2**63, "1", None)),
        lambda footer: footer["sections"].pop(),
        lambda footer: footer.update(sections=[]),
        lambda footer: footer.update(parts=[{"dim": 2**40, "wide": True}] * 2),
        lambda footer: footer["parts"][0].update(dim=0),
        lambda footer: footer["parts"][1].update(dim=3),
        lambda footer: footer.update(precision="fp16"),
        lambda footer: footer.update(precision="fp8"),
        lambda footer: footer.update(precision=["fp32"]),
        lambda footer: footer.update(shard=1),
        lambda footer: footer.update(shards=0),
        lambda footer: footer.update(shards=2),
        lambda footer: footer.pop("content"),
        lambda footer: [],
        lambda footer: ["a list"],
    ],
)  # fmt: skip
def test_an_inconsistent_footer_is_rejected(change, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path, content_bytes = table(tmp_path / "t")
    changed = with_footer(content_bytes, change)
    path.write_bytes(changed)
    if json.loads(changed[-24 - int(np.frombuffer(changed[-24:-16], "<u8")[0]) : -24]) == json.loads(
        content_bytes[-24 - int(np.frombuffer(content_bytes[-24:-16], "<u8")[0]) : -24]
    ):
        ServingTable.open([path.parent]).close()  # the original value
        return
    with pytest.raises(ArtifactError, match=r"footer|size|expected shard"):
        ServingTable.open([path.parent])


def test_another_format_and_another_file_are_rejected(tmp_path: Path) -> None:
    path, content_bytes = table(tmp_path / "t")
    path.write_bytes(content_bytes[:8] + b"\7" + content_bytes[9:])
    with pytest.raises(ArtifactError, match="format 7; this release reads 1"):
        ServingTable.open([path.parent])
    path.write_bytes(b"PAR1" + content_bytes[4:])
    with pytest.raises(ArtifactError, match="is not a serving table"):
        ServingTable.open([path.parent])
    path.unlink()
    with pytest.raises(ArtifactError, match="has no table"):
        ServingTable.open([path.parent])
    path.write_bytes(content_bytes)
    path.rename(path.with_name("table-00001-of-00002.bin"))
    with pytest.raises(ArtifactError, match=r"table-00000-of-00002\.bin cannot be opened"):
        ServingTable.open([path.parent])
    with pytest.raises(ArtifactError, match="expected shard 1"):
        ServingTable.open([path.parent], shards=[1])
    with pytest.raises(ValueError, match=r"has 0 … 1"):
        ServingTable.open([path.parent], shards=[2])


WILD = """
import sys
import numpy as np
from pathlib import Path
from clickline.embedding.serving import ServingTable
tables = ServingTable.open([Path(sys.argv[1])])
ids = np.random.default_rng(0).integers(0, 2**64, 20_000, dtype=np.uint64)
for part in (0, 1):
    tables.find(part, ids, np.empty((ids.size, tables.row_bytes(part)), np.uint8), np.empty(ids.size, bool))
print("done")
"""


def test_a_random_directory_never_leads_outside_the_rows(tmp_path: Path) -> None:
    """The caller verifies the file's checksum; with a damaged directory lookups may miss, but never crash."""
    path, content_bytes = table(tmp_path / "t")
    (length,) = np.frombuffer(content_bytes[-24:-16], "<u8")
    footer = json.loads(content_bytes[-24 - int(length) : -24])
    for fill in (b"\xff", None):
        damaged = bytearray(content_bytes)
        for section in footer["sections"]:
            size = section["end"] - section["directory_at"]
            noise = np.random.default_rng(1).bytes(size)
            damaged[section["directory_at"] : section["end"]] = fill * size if fill else noise
        path.write_bytes(damaged)
        done = subprocess.run(
            [sys.executable, "-c", WILD, str(path.parent)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def many(rows: int, dim: int) -> Iterator[RowBlock]:
    """Generate rows in order: mix(id) grows in equal steps."""
    inverse, step = np.uint64(pow(0x9E3779B97F4A7C15, -1, 2**64)), np.uint64(2**64 // rows)
    for first in range(0, rows, 1 << 14):
        mixed_N = np.arange(first, min(rows, first + (1 << 14)), dtype=np.uint64) * step
        size = mixed_N.size
        yield RowBlock(
            0,
            mixed_N * inverse,
            np.ones(size, np.float32),
            np.ones((size, dim), np.float32),
            np.zeros(size, bool),
        )


def test_memory_for_writing_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    peaks = []
    for rows in (500_000, 2_000_000):
        tracemalloc.start()
        write_shards(tmp_path, [PartShape(9, True)], "fp32", 3, many(rows, 9))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0] + (1 << 20)
    assert peaks[1] < 32 << 20


@pytest.mark.slow
def test_a_file_of_one_gibibyte_opens_instantly(tmp_path: Path) -> None:
    (file,) = write_shards(tmp_path, [PartShape(60, True)], "fp32", 1, many(4_200_000, 60))
    assert file.size > 1 << 30
    small = write_content(tmp_path / "small", PARTS[:1], [{1: (1.0, (1.0,) * 5)}])
    with ServingTable.open([small]) as tables:
        packed_rows(tables, 0, [1])  # loads the kernel
    began = time.perf_counter()
    with ServingTable.open([tmp_path]) as tables:
        ids_N = next(many(4_200_000, 60)).ids_N
        found_N = np.empty(ids_N.size, bool)
        assert (
            tables.find(0, ids_N, np.empty((ids_N.size, tables.row_bytes(0)), np.uint8), found_N)
            == ids_N.size
        )
    assert time.perf_counter() - began < 1
    (tmp_path / file.name).unlink()
