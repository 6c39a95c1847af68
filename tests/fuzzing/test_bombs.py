"""Small inputs that claim to be large, or become large: read in a process with limited memory."""

from __future__ import annotations

import gzip
import os
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.readers.record_writers import masked, recordio_chunk

GIGABYTES = 2 * 2**30  # of address space, libraries included; the inputs claim or decompress to far more

READ = """
import resource, sys
from pathlib import Path
from clickline.data.readers import open_reader
limit = int(sys.argv[3])
path = Path(sys.argv[2])
reader = open_reader(sys.argv[1], ("label", "C1", "I1"), columns=("label", "C1", "I1"), header=False, slots=(1,), dense=1)
for block in reader.blocks("warm", path.with_name("warm")):
    reader.parse(block)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
rows, reasons = 0, set()
for block in reader.blocks("log", path):
    reasons |= {fault.reason for fault in block.bad}
    if sys.argv[1] != "parquet":
        found = reader.parse(block)
        reasons |= {fault.reason for fault in found.bad}
        rows += found.rows
    else:
        rows += block.payload.num_rows
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(rows, grown * 1024, "|".join(sorted(reasons)))
"""


def read_bounded(tmp_path: Path, layout: str, content: bytes, warm: bytes = b"") -> tuple[int, int, set[str]]:
    """Return the rows, the growth of memory in bytes, and the reasons of bad rows."""
    (tmp_path / "log").write_bytes(content)
    (tmp_path / "warm").write_bytes(warm)
    done = subprocess.run(
        [sys.executable, "-c", READ, layout, tmp_path / "log", str(GIGABYTES)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1", "ARROW_DEFAULT_MEMORY_POOL": "system"},
    )
    assert done.returncode == 0, done.stderr
    rows, grown, reasons = done.stdout.strip("\n").split(" ", 2)
    return int(rows), int(grown), set(reasons.split("|")) - {""}


def gzip_repeated(piece: bytes, times: int) -> bytes:
    """A gzip file that repeats this piece."""
    packer = zlib.compressobj(9, wbits=31)
    return b"".join([*(packer.compress(piece) for _ in range(times)), packer.flush()])


ENDLESS = gzip_repeated(bytes(1 << 20), 250)  # one line of 250 MiB in 250 KiB
TEXT = {
    "criteo": (ENDLESS, b"1\t" + b"\t".join([b"1"] * 39)),
    "csv": (ENDLESS, b"1,a,2\n"),
    "slots": (ENDLESS, b"1 0 5:1\n"),
    "paddlerec": (ENDLESS, b"click:1 dense_feature:0.5 1:7\n"),
}


@pytest.mark.parametrize("layout", ["csv", "slots"])
def test_endless_line_is_refused_and_not_buffered(tmp_path: Path, layout: str) -> None:
    content, warm = TEXT[layout]
    _, grown, reasons = read_bounded(tmp_path, layout, content, warm)
    assert "line too long" in reasons
    assert grown < 150 * 2**20


def test_zstd_bomb_stays_within_the_limit(tmp_path: Path) -> None:
    block = pa.Codec("zstd").compress(bytes(1 << 26), asbytes=True)  # frames may be concatenated
    _, grown, reasons = read_bounded(tmp_path, "csv", block * 4, b"1,a,2\n")
    assert "line too long" in reasons and grown < 150 * 2**20


def test_zstd_window_of_gigabytes_is_refused(tmp_path: Path) -> None:
    magic, descriptor, window = b"\x28\xb5\x2f\xfd", b"\x00", b"\xa8"  # 2**31 bytes
    _, grown, reasons = read_bounded(tmp_path, "csv", magic + descriptor + window + b"\x09\0\0x", b"1,a,2\n")
    assert reasons == {"corrupt zstd"} and grown < 200 * 2**20


SIZES = (2**32 - 1, 2**32, 2**62, 2**64 - 1)


@pytest.mark.parametrize("size", SIZES[1:3])
def test_record_that_claims_gigabytes_is_refused(tmp_path: Path, size: int) -> None:
    length = struct.pack("<Q", size)
    _, grown, reasons = read_bounded(tmp_path, "tfrecord", length + masked(length) + b"x" * 100)
    assert reasons == {"record too large"} and grown < 100 * 2**20


def snappy_claim(size: int) -> bytes:
    """A block that claims this decompressed size."""
    out = bytearray()
    while size >= 0x80:
        out.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([*out, size]) + b"\0x"


@pytest.mark.parametrize(
    "content",
    [
        struct.pack("<5I", 0x01020304, 1, 0, 0, 2**32 - 1) + b"x",
        struct.pack("<5I", 0x01020304, 1, zlib.crc32(snappy_claim(2**32 - 1)), 1, 7)
        + snappy_claim(2**32 - 1),
        recordio_chunk([bytes(1 << 27)], "gzip"),
    ],
    ids=["length", "snappy", "gzip"],
)
def test_chunk_of_gigabytes_is_refused(tmp_path: Path, content: bytes) -> None:
    _, grown, reasons = read_bounded(tmp_path, "recordio", content)
    assert reasons and reasons <= {"record too large", "corrupt chunk"}
    assert grown < 400 * 2**20


def parquet(tmp_path: Path, rows: int, text: str) -> bytes:
    """A text that is once in the file and the value of all rows."""
    column = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array([text]))
    table = pa.table({"label": [0] * rows, "C1": column, "I1": [1.0] * rows})
    pq.write_table(
        table, tmp_path / "p", compression="zstd", store_schema=False, dictionary_pagesize_limit=1 << 28
    )
    return (tmp_path / "p").read_bytes()


@pytest.mark.slow
def test_one_large_text_in_all_rows_of_a_parquet_file(tmp_path: Path) -> None:
    """2.5 GiB of text in a file of two kilobytes; all rows at once would not fit."""
    content = parquet(tmp_path, 2500, "x" * 2**20)
    assert len(content) < 2**16
    rows, grown, reasons = read_bounded(tmp_path, "parquet", content, parquet(tmp_path, 10, "x"))
    assert (rows, reasons) == (2500, set())
    assert grown < 2**30


def test_too_large_text_in_a_parquet_file_is_a_bad_row(tmp_path: Path) -> None:
    content = parquet(tmp_path, 3, "x" * (17 << 20))
    rows, _, reasons = read_bounded(tmp_path, "parquet", content, parquet(tmp_path, 10, "x"))
    assert (rows, reasons) == (0, {"corrupt parquet"})


@pytest.mark.parametrize("size", [0x7FFFFFFF, 0xFFFFFFFF])
def test_parquet_footer_that_claims_gigabytes_is_refused(tmp_path: Path, size: int) -> None:
    content = parquet(tmp_path, 10, "x")
    lying = content[:-8] + struct.pack("<I", size) + b"PAR1"
    _, grown, reasons = read_bounded(tmp_path, "parquet", lying, content)
    assert reasons == {"corrupt parquet"} and grown < 200 * 2**20


def test_memory_limit_is_effective(tmp_path: Path) -> None:
    """Otherwise the tests above could not fail."""
    code = (
        f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({GIGABYTES},) * 2); bytearray({GIGABYTES})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "MemoryError" in done.stderr


@pytest.mark.soak
@pytest.mark.parametrize("layout", list(TEXT))
@pytest.mark.parametrize("pack", [gzip.compress, lambda data: pa.Codec("zstd").compress(data, asbytes=True)])
def test_memory_of_every_format_stays_small_over_gigabytes(
    tmp_path: Path, layout: str, pack: Callable[[bytes], bytes]
) -> None:
    piece = pack(bytes(1 << 28))
    _, grown, reasons = read_bounded(tmp_path, layout, piece * 40, TEXT[layout][1])
    assert "line too long" in reasons and grown < 300 * 2**20
