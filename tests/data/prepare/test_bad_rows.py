"""Bad rows are listed, counted and quarantined; too many of them stop the stage with exit code 4."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from clickline.errors import DataError, StorageError, TooManyBadRows


def quarantine(result) -> list[dict[str, object]]:
    files = sorted(Path(result.dataset.folder, "quarantine").glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_each_bad_row_is_kept_with_file_line_and_reason(project, criteo_line):
    good = [criteo_line(row % 2, row) for row in range(1000)]
    good[10] = "1\ttoo\tfew\n"
    good[20] = criteo_line("x", 1)
    good[30] = criteo_line(1, 1, I4="12,5")
    good[40] = criteo_line(7, 1)
    lines = "".join(good).encode().splitlines(keepends=True)
    lines[50] = lines[50].replace(b"\n", b"\xff\n")
    path = project.write("a.tsv", b"".join(lines))
    project.configure({"train": "a.tsv"})
    result = project.prepare()
    report = result.dataset.splits["train"].report
    assert report["bad"] == {"bad UTF-8": 1, "bad label": 2, "not a number": 1, "wrong column count": 1}
    assert result.train_rows == 995
    rows = {row["line"]: row for row in quarantine(result)}
    assert sorted(rows) == [11, 21, 31, 41, 51]
    assert {row["file"] for row in rows.values()} == {str(path)}
    assert rows[11]["detail"] == "3 columns, 40 expected"
    assert rows[11]["text"] == "1\ttoo\tfew"
    assert rows[21]["detail"].startswith("label is 'x', 0 or 1 expected; for other labels set positive: [")
    assert rows[31]["detail"] == "I4 is '12,5', a number expected"
    assert rows[41]["detail"].startswith("label is '7', 0 or 1 expected")


def test_rows_around_a_bad_one_are_untouched(project, criteo_line):
    good = [criteo_line(row % 2, row) for row in range(50)]
    project.write("a.tsv", "".join(good))
    project.configure({"train": "a.tsv", "max_bad_ratio": 0.5})
    clean = project.table(project.prepare())
    project.write("a.tsv", "".join([*good[:20], criteo_line(0, 1, I1="?"), "bad\n", *good[20:]]))
    assert project.table(project.prepare()).equals(clean)


def test_too_many_bad_rows_stop_with_exit_4_and_name_the_quarantine(project, criteo_line):
    lines = [criteo_line(row % 2, row) if row % 20 else "bad\n" for row in range(1000)]
    project.write("a.tsv", "".join(lines))
    project.configure({"train": "a.tsv"})
    command = [str(Path(sys.executable).with_name("clickline")), "prepare"]
    done = subprocess.run(command, cwd=project.folder, capture_output=True, text=True, check=False)
    assert done.returncode == 4
    assert "50 of 1,000 rows of data.train are bad (5.00%; data.max_bad_ratio allows 1.00%)" in done.stderr
    assert "50 wrong column count" in done.stderr
    assert "quarantine" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(list(project.folder.glob(".clickline/datasets/*/quarantine/*.jsonl"))) == 1
    assert project.prepare("data.max_bad_ratio=0.06").train_rows == 950


def test_the_wrong_format_stops_early(project):
    project.write("a.tsv", "nothing like criteo\n" * 300_000)
    project.configure({"train": "a.tsv", "shard_size": "256KiB"})
    with pytest.raises(TooManyBadRows, match=r"check data\.format"):
        project.prepare()
    assert 100_000 < project.heard.rows < 250_000


def test_many_bad_rows_that_are_allowed_are_all_read(project, criteo_line):
    good, bad = criteo_line(1, 1), "bad\n"
    project.write("a.tsv", (bad * 3 + good * 2) * 50_000)
    project.configure({"train": "a.tsv", "shard_size": "1MiB", "max_bad_ratio": 0.9})
    assert project.prepare().train_rows == 100_000


def test_bad_rows_at_the_start_of_good_data_do_not_stop_the_run(project, criteo_line):
    project.write("a.tsv", "bad\n" * 110_000 + criteo_line(1, 1) * 50_000)
    project.configure({"train": "a.tsv", "shard_size": "256KiB", "max_bad_ratio": 0.8})
    assert project.prepare().train_rows == 50_000


def test_values_that_are_bad_in_every_row_have_a_bounded_report(project, criteo_line):
    project.write("a.tsv", criteo_line(7, 1) * 20_000)
    project.configure({"train": "a.tsv", "max_bad_ratio": 1})
    project.write("a.tsv", criteo_line(7, 1) * 20_000 + criteo_line(1, 1))
    result = project.prepare()
    assert result.dataset.splits["train"].report["bad"] == {"bad label": 20_000}
    rows = quarantine(result)
    assert len(rows) < 10_000
    assert sum(row["count"] for row in rows) == 20_000


def test_a_truncated_gzip_delivers_its_rows_and_is_reported(project, criteo_line):
    text = "".join(criteo_line(row % 2, row) for row in range(20_000)).encode()
    packed = gzip.compress(text)
    project.write("a.tsv.gz", packed[: len(packed) // 2])
    project.configure({"train": "a.tsv.gz", "shard_size": "512KiB"})
    result = project.prepare()
    assert 1000 < result.train_rows < 20_000
    assert result.dataset.splits["train"].report["bad"] == {"truncated gzip": 1}
    (row,) = quarantine(result)
    assert row["line"] == result.train_rows + 1
    assert (
        "data.train: truncated gzip, 1 time(s): the rows after the damage are lost" in project.heard.said[0]
    )


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_no_rows_at_all_is_an_error(project, content):
    project.write("a.tsv", content)
    project.configure({"train": "a.tsv"})
    with pytest.raises(DataError, match=r"data\.train has no rows: .*a\.tsv is empty"):
        project.prepare()


def test_an_empty_file_among_others_is_fine(project, criteo_line):
    for name, content in (
        ("a", ""),
        ("b", criteo_line(1, 1)),
        ("c", ""),
        ("d", criteo_line(0, 2)),
        ("e", ""),
    ):
        project.write(f"{name}.tsv", content)
    project.configure({"train": "*.tsv"})
    assert project.prepare().train_rows == 2


def test_data_with_a_single_label_is_reported(project, criteo_line):
    project.write("a.tsv", criteo_line(0, 1) * 10)
    project.configure({"train": "a.tsv"})
    project.prepare()
    assert any(said.startswith("data.train: no row was clicked.") for said in project.heard.said)


def test_rows_that_are_all_bad_make_no_dataset_even_where_they_are_allowed(project, criteo_line):
    project.write("a.tsv", criteo_line(9, 1) * 3)
    project.configure({"train": "a.tsv", "max_bad_ratio": 1})
    with pytest.raises(
        DataError,
        match=r"has no usable rows in .*a\.tsv: 3 bad label\. The first: line 1 of .*label is .9., 0 or 1 expected",
    ):
        project.prepare()
    assert not (project.folder / ".clickline/datasets/current").exists()


@pytest.mark.parametrize(
    ("name", "layout"), [("slots", "show click feasign:slot"), ("paddlerec", "click:0 dense_feature")]
)
def test_a_source_without_any_slot_is_named_with_the_layout_expected(project, criteo_line, name, layout):
    project.write("a.txt", criteo_line(1, 1) * 3)
    project.configure({"format": name, "train": "a.txt"})
    with pytest.raises(DataError, match=f"no slot was found .*a.txt.*{layout}.*Check data.format"):
        project.prepare()


def test_a_home_that_is_a_file_is_named(project, criteo_line):
    project.write("a.tsv", criteo_line(1, 1))
    project.write("afile", "")
    project.configure({"train": "a.tsv"}, home="afile/home")
    with pytest.raises(StorageError, match=r"Not a directory\. It is part of `home`"):
        project.prepare()


@pytest.mark.parametrize(
    ("value", "detail"),
    [
        (
            "soon",
            "at is 'soon', expected unix time in seconds (like most times in this file) or YYYY-MM-DD HH:MM:SS",
        ),
        ("2026-02-30", "at is '2026-02-30'"),
        ("", "at is ''"),
    ],
)
def test_an_invalid_time_is_reported(project, value, detail):
    project.write("a.csv", f"y,u,at\n1,a,{value}\n0,b,1767225600\n")
    fields = {"y": "label", "u": "slot", "at": "time"}
    project.configure({"format": "csv", "train": "a.csv", "fields": fields, "max_bad_ratio": 0.5})
    (row,) = quarantine(project.prepare())
    assert row["reason"] == "bad time"
    assert row["detail"].startswith(detail)


def test_a_custom_time_format(project):
    project.write("a.csv", "y,u,at\n1,a,14102100\n0,b,14102123\n")
    fields = {"y": "label", "u": "slot", "at": {"kind": "time", "time_format": "%y%m%d%H"}}
    project.configure({"format": "csv", "train": "a.csv", "fields": fields})
    hours = project.table(project.prepare()).column("event_hour").to_pylist()
    assert hours[1] - hours[0] == 23


def test_more_conversions_than_impressions_are_a_bad_label(project):
    project.write("a.txt", "1 1 1 5:7\n1 1 2 5:7\n")
    data = {"format": "slots", "train": "a.txt", "columns": ["show", "click", "conversion"]}
    project.configure(data | {"fields": {"conversion": "label"}, "max_bad_ratio": 1})
    result = project.prepare()
    assert project.table(result).num_rows == 1
    (bad,) = quarantine(result)
    assert bad["reason"] == "bad label"
    assert "show is 1 and conversion 2, show >= 1 and conversion <= show expected" in bad["detail"]
