"""One set of rows, four formats: they agree value for value, and each has its exact layout."""

from __future__ import annotations

import csv
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import xxhash

from clickline.data.sample.generate import SampleOptions, generate
from clickline.progress import Progress

ROWS = 2000
PARTS = ("train", "eval")
LOWEST = [0, -3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
SCALES = [20, 603, 100, 50, 64000, 500, 100, 50, 500, 10, 10, 10, 50]


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("formats")
    for name in ("criteo", "slots", "paddlerec", "csv"):
        generate(SampleOptions(format=name, rows=ROWS, out=folder / name, seed=3), Progress())
    return folder


def criteo_rows(samples: Path, part: str) -> list[list[str]]:
    lines = (samples / "criteo" / f"{part}.tsv").read_text().splitlines()
    return [line.split("\t") for line in lines]


def feasign(text: str) -> int:
    return xxhash.xxh64(text.encode(), seed=0).intdigest()


def test_criteo_lines_have_a_label_13_integers_and_26_hex_words(samples: Path) -> None:
    train, evaluated = (criteo_rows(samples, part) for part in PARTS)
    assert (len(train), len(evaluated)) == (1600, 400)
    for row in train + evaluated:
        assert len(row) == 40
        assert row[0] in ("0", "1")
        assert all(value == "" or str(int(value)) == value for value in row[1:14])
        assert all(
            value == "" or (len(value) == 8 and f"{int(value, 16):08x}" == value) for value in row[14:]
        )
    dense = list(zip(*(row[1:14] for row in train), strict=True))
    assert min(int(value) for value in dense[1] if value) == -3
    assert all(int(value) >= 0 for n, column in enumerate(dense) if n != 1 for value in column if value)
    assert any(value == "" for row in train for value in row[1:14])
    assert any(value == "" for row in train for value in row[14:])


@pytest.mark.parametrize("part", PARTS)
def test_slots_lines_hold_the_feasigns_of_the_criteo_texts(samples: Path, part: str) -> None:
    lines = (samples / "slots" / f"{part}.txt").read_text().splitlines()
    missing = 0
    for line, row in zip(lines, criteo_rows(samples, part), strict=True):
        texts = [row[13], *row[14:]]
        assert line.split(" ") == ["1", row[0], *(f"{feasign(text)}:{n}" for n, text in enumerate(texts))]
        missing += line.count(" 17241709254077376921:")
    assert missing > 100
    assert (samples / "slots" / "slot.conf").read_text().split() == [str(n) for n in range(27)]


@pytest.mark.parametrize("part", PARTS)
def test_paddlerec_lines_hold_scaled_numbers_and_feasigns(samples: Path, part: str) -> None:
    lines = (samples / "paddlerec" / f"{part}.txt").read_text().splitlines()
    for line, row in zip(lines, criteo_rows(samples, part), strict=True):
        click, *tokens = line.split(" ")
        assert click == f"click:{row[0]}"
        for n, token in enumerate(tokens[:13]):
            name, _, number = token.partition(":")
            text = row[1 + n]
            expected = (int(text) - LOWEST[n]) / SCALES[n] if text else 0.0
            assert name == "dense_feature"
            assert float(number) == pytest.approx(expected, abs=5.01e-10)
            assert "." in number
            assert number.endswith(".0") or not number.endswith("0")
        slots = [f"{n + 1}:{feasign(text) if text else 0}" for n, text in enumerate(row[14:])]
        assert tokens[13:] == slots
    assert (samples / "paddlerec" / "slot.conf").read_text().split() == [str(n) for n in range(1, 27)]


@pytest.mark.parametrize("part", PARTS)
def test_csv_rows_are_the_criteo_rows_with_names_and_times(samples: Path, part: str) -> None:
    with (samples / "csv" / f"{part}.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    names = [f"I{n}" for n in range(1, 14)] + [f"C{n}" for n in range(1, 27)]
    assert header == ["click", "timestamp", *names]
    assert [[row[0], *row[2:]] for row in rows] == criteo_rows(samples, part)
    times = [int(row[1]) for row in rows]
    assert times == sorted(times)
    day = 1767225600  # 2026-01-01T00 UTC
    bounds = {"train": (day, day + 24 * 3600), "eval": (day + 24 * 3600, day + 30 * 3600)}[part]
    assert times[0] == bounds[0]
    assert bounds[1] - 120 < times[-1] < bounds[1]


@pytest.mark.parametrize("part", PARTS)
def test_every_format_has_a_truth_file_in_log_order(samples: Path, part: str) -> None:
    labels = [int(row[0]) for row in criteo_rows(samples, part)]
    for name in ("criteo", "slots", "paddlerec", "csv"):
        truth = pq.read_table(samples / name / f"{part}.truth.parquet")
        assert truth.column_names == ["p", "label"]
        assert truth["label"].to_pylist() == labels
        assert all(0 < p < 1 for p in truth["p"].to_pylist())


def test_other_numbers_of_fields(tmp_path: Path) -> None:
    generate(SampleOptions(format="slots", rows=50, out=tmp_path / "s", slots=3, dense=4), Progress())
    assert (tmp_path / "s" / "slot.conf").read_text().split() == ["1", "2", "3"]
    for line in (tmp_path / "s" / "train.txt").read_text().splitlines():
        assert [token.partition(":")[2] for token in line.split(" ")[2:]] == ["1", "2", "3"]

    generate(SampleOptions(format="slots", rows=50, out=tmp_path / "w", slots=2, dense=20), Progress())
    assert (tmp_path / "w" / "slot.conf").read_text().split() == ["0", "1", "2"]

    generate(SampleOptions(format="csv", rows=50, out=tmp_path / "c", slots=1, dense=0), Progress())
    assert (tmp_path / "c" / "train.csv").read_text().startswith("click,timestamp,C1\n")

    generate(SampleOptions(format="paddlerec", rows=50, out=tmp_path / "p", slots=300, dense=2), Progress())
    first = (tmp_path / "p" / "train.txt").read_text().splitlines()[0].split(" ")
    assert len(first) == 1 + 2 + 300
    assert first[-1].startswith("300:")
