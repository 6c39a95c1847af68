from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from reading import numbered, read_all

from clickline.data.readers.parquet import ParquetReader
from clickline.errors import DataError

WANTED = ("label", "c", "x", "l")
ROWS: list[dict[str, list[Any]]] = [
    {
        "label": [i % 2] if i % 3 else [],
        "c": [b"v%d" % i],
        "x": [i / 4],
        "l": [b"t%d" % j for j in range(i % 3)],
    }
    for i in range(120)
]
TABLE = pa.table(
    {
        "label": pa.array([row["label"][0] if row["label"] else None for row in ROWS], pa.int32()),
        "unwanted": pa.array(range(120)),
        "c": pa.array([row["c"][0].decode() for row in ROWS]),
        "x": pa.array([row["x"][0] for row in ROWS]),
        "l": pa.array([[t.decode() for t in row["l"]] for row in ROWS]),
    }
)
EXPECTED = numbered(ROWS)  # type: ignore[arg-type]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "a.parquet"
    pq.write_table(TABLE, path, row_group_size=40, write_page_checksum=True)
    return path


@pytest.mark.parametrize("block_bytes", [1, 100, 1000, 8 << 20])
@pytest.mark.parametrize("row_group_size", [7, 40, 1000])
def test_rows_are_the_same_at_any_block_and_group_size(
    tmp_path: Path, block_bytes: int, row_group_size: int
) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(TABLE, path, row_group_size=row_group_size)
    assert read_all(ParquetReader(WANTED, block_bytes=block_bytes), path) == (EXPECTED, [])


def test_large_row_group_is_split(path: Path) -> None:
    blocks = list(ParquetReader(WANTED).blocks("a", path))
    assert [block.payload.num_rows for block in blocks] == [40, 40, 40]
    assert [block.first_line for block in blocks] == [1, 41, 81]
    small = list(
        ParquetReader(WANTED, block_bytes=sum(block.size for block in blocks) // 12).blocks("a", path)
    )
    assert len(small) >= 9
    assert all(block.payload.num_rows <= 14 for block in small)
    assert all(block.size > 0 for block in small)


def test_a_missing_column_names_the_file_its_columns_and_the_nearest(path: Path) -> None:
    with pytest.raises(DataError) as caught:
        list(ParquetReader(("lable", "c")).blocks("logs/day.parquet", path))
    assert str(caught.value) == (
        "logs/day.parquet has no column 'lable'; its columns are label, unwanted, c, x, l; did you mean 'label'?"
    )


def test_a_type_that_cannot_be_used(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"s": pa.array([{"a": 1}])}), path)
    with pytest.raises(
        DataError, match=r"a.parquet: column 's' has the Arrow type struct<a: int64>; readable are text, "
    ):
        read_all(ParquetReader(("s",)), path)


def test_text_that_is_not_utf8_is_a_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"c": pa.array([b"a", b"\xff", b"b"]).view(pa.string())}), path)
    rows, bad = read_all(ParquetReader(("c",)), path)
    assert rows == {1: {"c": [b"a"]}, 3: {"c": [b"b"]}}
    assert [(row.line, row.reason) for row in bad] == [(2, "bad UTF-8")]


def test_a_damaged_row_group_is_lost_and_the_next_is_read(path: Path) -> None:
    data = bytearray(path.read_bytes())
    start = pq.ParquetFile(path).metadata.row_group(1).column(2).data_page_offset
    data[start + 40] ^= 0xFF
    path.write_bytes(data)
    rows, bad = read_all(ParquetReader(WANTED), path)
    assert rows == {line: row for line, row in EXPECTED.items() if not 41 <= line <= 80}
    assert [(row.line, row.reason, row.count) for row in bad] == [(41, "corrupt parquet", 40)]
    assert bad[0].detail.startswith("row group 1 of 3 ends after 0 rows: ")
    assert bad[0].detail.endswith("; copy or write the file again")


@pytest.mark.parametrize("content", [b"", b"PAR1", b"not parquet at all", b"PAR1" + bytes(100) + b"PAR1"])
def test_a_file_that_is_not_parquet(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(content)
    rows, bad = read_all(ParquetReader(WANTED), path)
    assert not rows
    assert [(row.line, row.reason) for row in bad] == [(1, "corrupt parquet")]
    assert bad[0].detail.endswith("; copy or write the file again")


def test_every_truncation_is_reported(path: Path) -> None:
    data = path.read_bytes()
    for size in range(0, len(data), 7):
        path.write_bytes(data[:size])
        rows, bad = read_all(ParquetReader(WANTED), path)
        assert not rows
        assert [row.reason for row in bad] == ["corrupt parquet"]


def test_a_missing_file_is_an_error_not_a_bad_row(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        list(ParquetReader(WANTED).blocks("a", tmp_path / "a.parquet"))


def flip_every_byte(path: Path) -> None:
    """Pages have checksums, the footer has none: a change there may go unnoticed, but must not crash the process."""
    data = path.read_bytes()
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 1 << at % 8
        path.write_bytes(changed)
        try:
            rows, bad = read_all(ParquetReader(WANTED), path)
        except DataError:
            assert at >= footer
            continue
        assert rows == {line: EXPECTED[line] for line in range(1, 31)} or bad or at >= footer


@pytest.mark.slow
def test_no_changed_byte_crashes_the_process(path: Path) -> None:
    pq.write_table(TABLE.slice(0, 30), path, row_group_size=20, write_page_checksum=True)
    code = "import sys, pathlib, test_parquet_files as t; t.flip_every_byte(pathlib.Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", code, path], cwd=Path(__file__).parent, check=True)


@pytest.mark.slow
def test_memory_does_not_grow_with_a_row_group(tmp_path: Path) -> None:
    """One row group of 2 million rows, about 110 MB of text, read in blocks that are dropped at once."""
    path = tmp_path / "a.parquet"
    batch = pa.table({"c": [f"{i:050}" for i in range(20_000)], "n": range(20_000)})
    pq.write_table(pa.concat_tables([batch] * 100), path, row_group_size=2_000_000, use_dictionary=False)
    code = (
        "import sys, pathlib, resource\n"
        "from clickline.data.readers.parquet import ParquetReader\n"
        "reader = ParquetReader(('c', 'n'))\n"
        "def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before, rows = peak(), 0\n"
        "for block in reader.blocks('a', pathlib.Path(sys.argv[1])): rows += reader.parse(block).rows\n"
        "print(rows, (peak() - before) // 1024)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, path], check=True, capture_output=True, text=True)
    rows, grown = map(int, done.stdout.split())
    assert rows == 2_000_000
    assert grown < 100
