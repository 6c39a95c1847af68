"""Criteo and CSV: against simple parsers on any bytes, at any block size; quotes, headers, bad rows."""

from __future__ import annotations

import csv
import gzip
import io
import re
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from whole_file import read

from clickline.data.readers.delimited import CriteoReader, CsvReader
from clickline.errors import DataError
from clickline.records import CRITEO_FIELDS, Block, TextColumn

CRITEO_ROW = b"1\t" + b"\t".join(b"%d" % i for i in range(13)) + b"\t" + b"\t".join([b"ab12"] * 26)

ABC = ("a", "b", "c")


def is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


# --- Criteo ---------------------------------------------------------------------------------------


def criteo_by_hand(text: bytes) -> tuple[list[tuple[int, list[bytes]]], list[tuple[int, str]]]:
    rows, bad = [], []
    for number, line in enumerate(text.split(b"\n"), start=1):
        line = line.removesuffix(b"\r")
        cells = line.split(b"\t")
        if not line:
            continue
        if len(cells) != 40:
            bad.append((number, "wrong column count"))
        elif not is_utf8(line):
            bad.append((number, "bad UTF-8"))
        else:
            rows.append((number, cells))
    return rows, bad


@st.composite
def criteo_texts(draw: st.DrawFn) -> bytes:
    cell = st.one_of(
        st.sampled_from([b"", b"0", b"-1", b"68fd1e64", b'"', b",", b"\0", b"\r", b"\xc3\xa9", b"\xff"]),
        st.binary(max_size=6).map(lambda raw: raw.replace(b"\t", b"").replace(b"\n", b"")),
    )
    row = st.one_of(
        st.lists(cell, min_size=40, max_size=40),
        st.lists(cell, max_size=42),
    ).map(b"\t".join)
    end = st.sampled_from([b"\n", b"\n", b"\r\n", b"\n\n", b"\n\r\n"])
    text = CRITEO_ROW + b"\n" + b"".join(draw(row) + draw(end) for _ in range(draw(st.integers(0, 8))))
    return text if draw(st.booleans()) else text.removesuffix(b"\n")


@given(text=criteo_texts(), block_bytes=st.sampled_from([1, 100, 1000, 8 << 20]))
def test_criteo_reads_what_a_simple_parser_reads(tmp_path: Path, text: bytes, block_bytes: int):
    path = tmp_path / "log.tsv"
    path.write_bytes(text)
    rows, bad = read(CriteoReader(block_bytes=block_bytes), path)
    expected_rows, expected_bad = criteo_by_hand(text)
    assert [(line, list(cells.values())) for line, cells in rows] == expected_rows
    assert [(b.line, b.reason) for b in bad] == expected_bad


@given(text=st.binary(max_size=300))
def test_criteo_reader_accepts_any_bytes(tmp_path: Path, text: bytes):
    path = tmp_path / "log.tsv"
    text = b"\n" + text  # so that no bytes look compressed
    path.write_bytes(text)
    rows, bad = read(CriteoReader(block_bytes=50), path)
    lines = [n for n, line in enumerate(text.split(b"\n"), start=1) if line.removesuffix(b"\r")]
    assert sorted([line for line, _ in rows] + [b.line for b in bad]) == lines


def test_a_bad_row_is_reported_with_its_line_and_text(tmp_path: Path):
    path = tmp_path / "log.tsv"
    short = CRITEO_ROW.rpartition(b"\t")[0]
    path.write_bytes(CRITEO_ROW + b"\n\n" + short + b"\n" + CRITEO_ROW[:-1] + b"\xff\n" + b"y" * 999 + b"\n")
    rows, bad = read(CriteoReader(), path)
    assert [line for line, _ in rows] == [1]
    assert [(b.file, b.line, b.reason) for b in bad] == [
        ("log", 3, "wrong column count"),
        ("log", 4, "bad UTF-8"),
        ("log", 5, "wrong column count"),
    ]
    assert bad[0].detail == "39 columns, 40 expected"
    assert bad[0].text == short.decode()
    assert bad[1].text == CRITEO_ROW[:-1].decode() + "\\xff"
    assert "write the file as UTF-8" in bad[1].detail
    assert bad[2].text == "y" * 200


@pytest.mark.parametrize("delimiter", [b"\t", b","])
@pytest.mark.parametrize(
    "header",
    [None, b"label", b"Label", b"clicked", b'"label"'],
    ids=["none", "label", "Label", "clicked", "quoted"],
)
def test_criteo_detects_delimiter_and_header(tmp_path: Path, delimiter: bytes, header: bytes | None):
    path = tmp_path / "log"
    row = CRITEO_ROW.replace(b"\t", delimiter)
    lines = [row, row]
    if header:
        names = [header, *(f"column {i}".encode() for i in range(39))]
        lines.insert(0, delimiter.join(names))
    path.write_bytes(b"\r\n".join(lines))
    rows, bad = read(CriteoReader(), path)
    assert bad == []
    assert [line for line, _ in rows] == ([2, 3] if header else [1, 2])
    assert list(rows[0][1]) == list(CRITEO_FIELDS)
    assert list(rows[0][1].values()) == CRITEO_ROW.split(b"\t")


def test_header_in_another_order_decides_the_columns(tmp_path: Path):
    path = tmp_path / "log"
    names = [*CRITEO_FIELDS[14:], *CRITEO_FIELDS[:14]]
    path.write_text("\t".join(names) + "\n" + "\t".join(f"v_{name}" for name in names) + "\n")
    ((_, cells),), bad = read(CriteoReader(), path)
    assert bad == []
    assert cells == {name: f"v_{name}".encode() for name in CRITEO_FIELDS}


@pytest.mark.parametrize("first", [b"2", b"", b"0.0", b"-1", b"nan", b"oops"])
def test_first_row_with_a_wrong_label_is_not_a_header(tmp_path: Path, first: bytes):
    path = tmp_path / "log"
    path.write_bytes(first + CRITEO_ROW[1:] + b"\n")
    ((_, cells),), _ = read(CriteoReader(), path)
    assert cells["label"] == first


def test_the_real_criteo_rows(real_data: Path):
    rows = positives = 0
    sums = np.zeros(40, np.int64)
    reader = CriteoReader(block_bytes=3_000_000)
    for block in reader.blocks("criteo", real_data / "criteo_137k_train.tsv.gz"):
        raw = reader.parse(block)
        assert not raw.bad
        assert not block.bad
        rows += raw.rows
        for c, name in enumerate(CRITEO_FIELDS):
            column = raw.columns[name]
            assert isinstance(column, TextColumn)
            sums[c] += int((column.ends_N - column.starts_N).sum())
            if name == "label":
                positives += int((column.data[column.starts_N] == ord("1")).sum())
    assert rows == 137_139
    assert round(positives / rows, 4) == 0.2568
    with gzip.open(real_data / "criteo_137k_train.tsv.gz") as lines:
        expected = np.zeros(40, np.int64)
        for line in lines:
            expected += [len(cell) for cell in line.rstrip(b"\n").split(b"\t")]
    assert sums.tolist() == expected.tolist()


def test_the_real_criteo_rows_with_header_and_commas(real_data: Path):
    path = real_data / "criteo_200_header.csv"
    rows, bad = read(CriteoReader(), path)
    assert bad == []
    with path.open(newline="") as lines:
        expected = list(csv.DictReader(lines))
    assert [{k: v.decode() for k, v in cells.items()} for _, cells in rows] == expected
    assert [line for line, _ in rows] == list(range(2, 202))


def test_rows_without_label_are_bad(real_data: Path):
    reader = CriteoReader(block_bytes=8 << 20)
    (block,) = reader.blocks("unlabelled", real_data / "criteo_18k_unlabelled.tsv.gz")
    raw = reader.parse(block)
    assert raw.rows == 0
    assert sum(b.count for b in raw.bad) == 18_181
    assert {b.reason for b in raw.bad} == {"wrong column count"}
    assert raw.bad[0].detail == "39 columns, 40 expected"


def test_an_all_bad_block_is_counted_exactly_in_little_memory(tmp_path: Path):
    path = tmp_path / "log"
    lines = 2_000_000
    path.write_bytes(b"x\n" * lines)
    reader = CriteoReader(block_bytes=8 << 20)
    (block,) = reader.blocks("log", path)
    tracemalloc.start()
    raw = reader.parse(block)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 2 << 20
    assert peak < 150 << 20
    assert raw.rows == 0
    assert sum(b.count for b in raw.bad) == lines
    assert len(raw.bad) == 1001
    assert raw.bad[-1].line == 1001
    assert (
        raw.bad[-1].detail == f"{lines - 1000:,} more rows of this kind in this part of the file, not listed"
    )


# --- CSV ------------------------------------------------------------------------------------------


def csv_by_hand(
    text: bytes, columns: int, delimiter: bytes = b","
) -> tuple[list[tuple[int, list[bytes]]], list[tuple[int, str]]]:
    """The grammar of `delimited.py`, as regular expressions."""
    d = re.escape(delimiter)
    blank = rb"[ \t]*+".replace(b" " if delimiter == b" " else b"\\t" if delimiter == b"\t" else b"\0", b"")
    quoted = rb'%b"((?>[^"]|"")*+)"%b(?=%b|\r?\n|\r?\Z)' % (blank, blank, d)
    plain = rb'(?!%b")([^%b\n]*+)' % (blank, d)
    value = rb"(?:%b|%b)" % (quoted, plain)
    row = re.compile(d.join([value] * columns) + rb"\r?(?:\n|\Z)")  # a plain value has taken its \r with it
    rows, bad = [], []
    at, number = 0, 1
    while at < len(text):
        line_end = text.find(b"\n", at)
        line_end = len(text) if line_end < 0 else line_end
        line = text[at:line_end].removesuffix(b"\r")
        if not line:
            at, number = line_end + 1, number + 1
            continue
        match = row.match(text, at)
        if match is None:
            bad.append((number, csv_reason(text[at:line_end], value, columns)))
            at, number = line_end + 1, number + 1
            continue
        if is_utf8(match[0]):
            cells = []
            for c in range(columns):
                in_quotes, bare = match[2 * c + 1], match[2 * c + 2]
                if in_quotes is not None:
                    cells.append(in_quotes.replace(b'""', b'"'))
                else:
                    cells.append(bare.removesuffix(b"\r") if c == columns - 1 else bare)
            rows.append((number, cells))
        else:
            bad.append((number, "bad UTF-8"))
        number += match[0].count(b"\n")
        at = match.end()
    return rows, bad


def csv_reason(line: bytes, value: bytes, columns: int) -> str:
    """The error of a bad row, from its first line alone."""
    at, found = 0, 0
    while found <= columns:
        match = re.compile(value).match(line, at)
        if match is None:
            return "wrong column count" if found == columns else "unclosed quote"
        found, at = found + 1, match.end()
        if line[at:] in (b"", b"\r"):
            break
        at += 1
    return "wrong column count"


csv_pieces = st.lists(
    st.sampled_from(
        [
            b"a",
            b"b1",
            b" ",
            b"\t",
            b",",
            b",",
            b";",
            b"\n",
            b"\n",
            b"\r\n",
            b"\r",
            b'"',
            b'"',
            b'""',
            b'",',
            b'"\n',
            b'"x"',
            b'"x,y"',
            b'"x\ny"',
            b'"say ""hi"""',
            b"\0",
            b"\xc3\xa9",
            b"\xff",
            b"NA",
            b"1,2,3\n",
            b"x,y\n",
        ]
    ),
    max_size=40,
).map(b"".join)


@given(text=csv_pieces, columns=st.integers(1, 3), delimiter=st.sampled_from([b",", b"\t", b";", b" "]))
def test_csv_matches_a_simple_parser_at_any_block_size(
    tmp_path: Path, text: bytes, columns: int, delimiter: bytes
):
    path = tmp_path / "log.csv"
    text = b"\n" + text  # so that no bytes look compressed
    path.write_bytes(text)
    expected_rows, expected_bad = csv_by_hand(text, columns, delimiter)
    for block_bytes in (1, 7, 30, 8 << 20):
        rows, bad = read(plain_csv(ABC[:columns], delimiter.decode(), block_bytes=block_bytes), path)
        assert [(line, list(cells.values())) for line, cells in rows] == expected_rows
        assert [(b.line, b.reason) for b in bad] == expected_bad


def plain_csv(columns: Sequence[str], delimiter: str = ",", block_bytes: int = 8 << 20) -> CsvReader:
    return CsvReader(
        delimiter=delimiter, header=False, columns=columns, wanted=columns, block_bytes=block_bytes
    )


@given(
    table=st.lists(
        st.lists(st.text(st.sampled_from('ab1 ",\n\ré'), max_size=6), min_size=3, max_size=3), max_size=8
    ),
    block_bytes=st.integers(1, 60),
)
def test_output_of_pythons_csv_writer_is_read_unchanged(
    tmp_path: Path, table: list[list[str]], block_bytes: int
):
    path = tmp_path / "log.csv"
    out = io.StringIO(newline="")
    csv.writer(out, quoting=csv.QUOTE_ALL).writerows(table)
    path.write_bytes(out.getvalue().encode())
    rows, bad = read(plain_csv(ABC, block_bytes=block_bytes), path)
    assert bad == []
    assert [[cell.decode() for cell in cells.values()] for _, cells in rows] == table


def test_blanks_around_values_are_left_to_the_encoder(tmp_path: Path):
    path = tmp_path / "log.csv"
    path.write_bytes(b'a, b ,c\r\n1,\t NA , ?\n"NA"," NA ",NAN\n,,\n')
    reader = CsvReader(wanted=ABC)
    rows, bad = read(reader, path)
    assert bad == []
    assert [list(cells.values()) for _, cells in rows] == [
        [b"1", b"\t NA ", b" ?"],
        [b"NA", b" NA ", b"NAN"],
        [b"", b"", b""],
    ]
    path.write_bytes(b"a,b,c\n1,\t NA , ?\n")  # and without any quote
    ((_, cells),), _ = read(reader, path)
    assert list(cells.values()) == [b"1", b"\t NA ", b" ?"]


def test_wanted_columns_are_found_by_name_in_each_file(tmp_path: Path):
    one, two = tmp_path / "one.csv", tmp_path / "two.csv"
    one.write_bytes(b'\xef\xbb\xbfuser,"click",ad\nu1,1,a1\n')
    two.write_bytes(b"ad;x;click;user\n".replace(b";", b",") + b'a2,"q",0,u2\n')
    reader = CsvReader(wanted=("click", "ad"))
    assert read(reader, one) == ([(2, {"click": b"1", "ad": b"a1"})], [])
    assert read(reader, two) == ([(2, {"click": b"0", "ad": b"a2"})], [])


def test_a_column_that_a_file_lacks_is_named_with_the_nearest(tmp_path: Path):
    path = tmp_path / "log.csv"
    path.write_bytes(b"clicked,user,ad\n1,2,3\n")
    with pytest.raises(DataError) as error:
        list(CsvReader(wanted=("click", "ad")).blocks("s3://logs/day.csv", path))
    assert str(error.value) == (
        "s3://logs/day.csv has no column 'click'; its columns are clicked, user, ad; did you mean 'clicked'? "
        "If the files have no header line, set data.header: false and data.columns"
    )


@pytest.mark.parametrize(("header", "mark"), [(b"click;ad;city", "';'"), (b"click\tad\tcity", r"'\\t'")])
def test_another_delimiter_is_suggested(tmp_path: Path, header: bytes, mark: str):
    path = tmp_path / "log.csv"
    path.write_bytes(header + b"\n")
    with pytest.raises(DataError, match=f"If columns are separated by {mark}, set data.delimiter to it"):
        list(CsvReader(wanted=("click", "ad")).blocks("log", path))


def test_binary_data_is_reported_without_control_characters(tmp_path: Path):
    path = tmp_path / "log.csv"
    path.write_bytes(b"PAR1\x1b[31m,x\n")
    with pytest.raises(DataError) as error:
        list(CsvReader(wanted=("click",)).blocks("log", path))
    assert r"its columns are 'PAR1\x1b[31m', x;" in str(error.value)


def test_a_column_that_the_config_does_not_list_is_named(tmp_path: Path):
    path = tmp_path / "log.csv"
    path.write_bytes(b"1,2\n")
    reader = CsvReader(header=False, columns=("click", "ad"), wanted=("click", "user"))
    with pytest.raises(
        DataError,
        match=r"^log has no column 'user'; its columns are click, ad; name one of them.* to the file$",
    ):
        list(reader.blocks("log", path))


def test_a_column_wanted_twice_is_delivered_once(tmp_path: Path):
    path = tmp_path / "log.csv"
    path.write_bytes(b"click,ad\n1,x\n")
    assert read(CsvReader(wanted=("ad", "click", "ad")), path) == (
        [(2, {"ad": b"x", "click": b"1"})],
        [],
    )


def test_a_column_named_twice_is_refused(tmp_path: Path):
    path = tmp_path / "log.csv"
    path.write_bytes(b"click,ad,ad\n1,2,3\n")
    with pytest.raises(DataError, match="log has 2 columns named 'ad'; rename all but one"):
        list(CsvReader(wanted=("click", "ad")).blocks("log", path))


@pytest.mark.parametrize("content", [b"", b"\n\n", b"a,b,c\n", b"a,b,c"])
def test_a_csv_without_rows(tmp_path: Path, content: bytes):
    path = tmp_path / "log.csv"
    path.write_bytes(content)
    assert read(CsvReader(wanted=ABC), path) == ([], [])


def test_a_csv_that_breaks_before_its_first_line_end(tmp_path: Path):
    path = tmp_path / "log.csv.gz"
    path.write_bytes(gzip.compress(b"a,b,c\n", 0)[:14])
    rows, bad = read(CsvReader(wanted=ABC), path)
    assert rows == []
    assert [(b.line, b.reason) for b in bad] == [(1, "truncated gzip")]


def test_rows_with_line_ends_in_quotes_keep_their_line_numbers(tmp_path: Path):
    path = tmp_path / "log.csv"
    path.write_bytes(b'"1\n\n2",x,y\nlone\n3,"4\r\n5",6\n7,8,9\n')
    rows, bad = read(plain_csv(ABC), path)
    assert rows == [
        (1, {"a": b"1\n\n2", "b": b"x", "c": b"y"}),
        (5, {"a": b"3", "b": b"4\r\n5", "c": b"6"}),
        (7, {"a": b"7", "b": b"8", "c": b"9"}),
    ]
    assert [(b.line, b.reason, b.detail, b.text) for b in bad] == [
        (4, "wrong column count", "1 columns, 3 expected", "lone")
    ]


def test_more_columns_than_expected(tmp_path: Path):
    path = tmp_path / "log.csv"
    path.write_bytes(b"1,2,3,4,5\n")
    _, (bad,) = read(plain_csv(ABC), path)
    assert bad.detail == "5 columns, 3 expected"
    path.write_bytes(b'1,2,"3",4,5\n')
    _, (bad,) = read(plain_csv(ABC), path)
    assert bad.detail == "more than 3 columns, 3 expected"


def test_a_quote_that_is_never_closed_costs_one_line_of_a_large_file(tmp_path: Path):
    path = tmp_path / "log.csv"
    good = b"1,22222222,333333333333333333333\n" * 1_000_000  # twice as long as the longest row
    path.write_bytes(b'1,"2,3\n' + good)
    rows = 0
    bad = []
    reader = plain_csv(ABC)
    for block in reader.blocks("log", path):
        raw = reader.parse(block)
        rows += raw.rows
        bad += [*block.bad, *raw.bad]
    assert rows == 1_000_000
    assert [(b.line, b.reason, b.text) for b in bad] == [(1, "unclosed quote", '1,"2,3')]


def test_many_unclosed_quotes_take_linear_time(tmp_path: Path):
    path = tmp_path / "log.csv"
    lines = 100_000
    path.write_bytes(b'a","\n' * lines)  # each line closes the quote of the one before and opens another
    rows, bad = 0, 0
    reader = plain_csv(ABC)
    for block in reader.blocks("log", path):
        raw = reader.parse(block)
        rows += raw.rows
        bad += sum(b.count for b in raw.bad)
    assert rows + bad == lines  # in time: without a limit on columns this takes minutes


def test_parse_does_not_change_the_block(tmp_path: Path):
    path = tmp_path / "log.csv"
    path.write_bytes(b'"a ""b""",2,3\n')
    reader = plain_csv(ABC)
    (block,) = reader.blocks("log", path)
    before = block.payload.data.copy()
    first, second = reader.parse(block), reader.parse(block)
    assert np.array_equal(block.payload.data, before)
    for raw in (first, second):
        column = raw.columns["a"]
        assert isinstance(column, TextColumn)
        assert column.data[column.starts_N[0] : column.ends_N[0]].tobytes() == b'a "b"'


def test_spans_are_contiguous_per_column(tmp_path: Path):
    path = tmp_path / "log.tsv"
    path.write_bytes((CRITEO_ROW + b"\n") * 100)
    (block,) = CriteoReader().blocks("log", path)
    assert isinstance(block, Block)
    for column in CriteoReader().parse(block).columns.values():
        assert isinstance(column, TextColumn)
        assert column.starts_N.flags.c_contiguous
        assert column.starts_N.dtype == np.int64


@pytest.mark.parametrize(
    ("name", "header", "columns", "count"),
    [("adult_train.csv.gz", False, 15, 32_561), ("adult_test.csv.gz", False, 15, 16_281)],
)
def test_the_real_adult_rows(real_data: Path, name: str, header: bool, columns: int, count: int):
    names = [f"c{i}" for i in range(columns)]
    rows, bad = read(CsvReader(header=header, columns=names, wanted=names), real_data / name)
    assert bad == []
    assert len(rows) == count
    with gzip.open(real_data / name, "rt", newline="") as lines:
        for (_, cells), expected in zip(
            rows, (row for row in csv.reader(lines, skipinitialspace=True) if row), strict=True
        ):
            assert [cell.decode().lstrip(" ") for cell in cells.values()] == expected


def test_the_real_open_bandit_rows(real_data: Path):
    wanted = ("click", "item_id", "user_feature_0", "user-item_affinity_79")
    rows, bad = read(CsvReader(wanted=wanted, block_bytes=500_000), real_data / "openbandit_10k.csv.gz")
    assert bad == []
    with gzip.open(real_data / "openbandit_10k.csv.gz", "rt", newline="") as lines:
        expected = [{name: row[name].encode() for name in wanted} for row in csv.DictReader(lines)]
    assert [cells for _, cells in rows] == expected
    assert len(rows) == 10_000
