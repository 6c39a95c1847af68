"""TFRecord files as Intel's preprocess_csv_tfrecords.py writes them: columns in the order of their names as text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from record_writers import example, tfrecord
from whole_file import read

from clickline.config import load_config
from clickline.data.prepare.run import prepare
from clickline.data.readers.intel_tfrecord import IntelTFRecordReader
from clickline.progress import Progress

NUMBERS = sorted(f"I{n}" for n in range(1, 14))
CATEGORIES = sorted(f"C{n}" for n in range(1, 27))


def record(label: int, numbers: Sequence[float], buckets: Sequence[int]) -> bytes:
    """One row; `numbers` are I1 … I13, `buckets` C1 … C26."""
    number = {f"I{n}": value for n, value in enumerate(numbers, 1)}
    bucket = {f"C{n}": value for n, value in enumerate(buckets, 1)}
    pairs = [part for at, name in enumerate(CATEGORIES) for part in (at, bucket[name])]
    return example({"label": [label], "numeric_1": [float(number[n]) for n in NUMBERS], "string_1": pairs})


def test_columns_get_their_names_back(tmp_path: Path):
    path = tmp_path / "train_processed_data.tfrecords"
    rows = [(1, [n / 16 for n in range(13)], list(range(26))), (0, [0.5] * 13, [999 - n for n in range(26)])]
    path.write_bytes(tfrecord([record(*row) for row in rows]))
    found, bad = read(IntelTFRecordReader(), path)
    assert bad == []
    for (line, values), (label, numbers, buckets) in zip(found, rows, strict=True):
        assert line in (1, 2)
        assert values["label"] == label
        assert [values[f"I{n}"] for n in range(1, 14)] == pytest.approx(numbers)
        assert [values[f"C{n}"] for n in range(1, 27)] == buckets


def test_other_records_are_bad_rows(tmp_path: Path):
    path = tmp_path / "eval_processed_data.tfrecords"
    good = record(0, [0.0] * 13, [7] * 26)
    short = example({"label": [0], "numeric_1": [0.5, 0.5], "string_1": list(range(52))})
    mixed_up = example({"label": [0], "numeric_1": [0.5] * 13, "string_1": list(range(52))})
    path.write_bytes(tfrecord([short, good, mixed_up, example({"label": [1]})]))
    found, bad = read(IntelTFRecordReader(), path)
    assert [line for line, _ in found] == [2]
    assert [(one.line, one.reason) for one in bad] == [(n, "wrong column count") for n in (1, 3, 4)]
    assert "numeric_1 must hold 13 floats" in bad[0].detail


def test_a_file_of_other_examples_has_no_rows(tmp_path: Path):
    path = tmp_path / "other.tfrecords"
    path.write_bytes(tfrecord([example({"label": [0], "I1": [0.5], "C1": [b"a"]})]))
    found, bad = read(IntelTFRecordReader(), path)
    assert found == []
    assert len(bad) == 1


def test_blocks_of_any_size_hold_the_same_rows(tmp_path: Path):
    random = np.random.default_rng(7)
    path = tmp_path / "train_processed_data.tfrecords"
    rows = [
        (int(random.integers(2)), random.random(13).tolist(), random.integers(0, 1000, 26).tolist())
        for _ in range(50)
    ]
    path.write_bytes(tfrecord([record(*row) for row in rows]))
    assert read(IntelTFRecordReader(block_bytes=900), path) == read(IntelTFRecordReader(), path)


def test_a_dataset_has_the_ids_and_numbers_of_the_same_criteo_row(tmp_path: Path):
    numbers, buckets = [n / 64 for n in range(13)], [100 + n for n in range(26)]
    (tmp_path / "train_processed_data.tfrecords").write_bytes(tfrecord([record(1, numbers, buckets)]))
    (tmp_path / "train.tsv").write_text("\t".join(map(str, [1, *numbers, *buckets])) + "\n")
    tables = []
    for data in (
        "{format: intel_tfrecord, train: train_processed_data.tfrecords}",
        "{format: criteo, train: train.tsv, fields: {I*: none}}",
    ):
        (tmp_path / "clickline.yaml").write_text(f"data: {data}\ncache: {{dir: cache}}\n")
        dataset = prepare(load_config(tmp_path / "clickline.yaml"), Progress()).dataset
        tables.append(pq.read_table(Path(dataset.folder, dataset.splits["train"].shards[0].file)))
    assert tables[0].to_pydict() == tables[1].to_pydict()
    assert {"label", "I13", "C26"} <= set(tables[0].column_names)
