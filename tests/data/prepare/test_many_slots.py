"""Thousands of columns: time and the size of the manifest grow linearly with their number."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from clickline.artifacts.manifest import MANIFEST
from clickline.config import load_config, resolved
from clickline.data.readers.delimited import CsvReader
from clickline.data.readers.parquet import ParquetReader
from clickline.evaluation.report import report_document as documents
from clickline.features import FeatureSpec, SlotField
from clickline.records import EncodedRows, LabelledRows, SlotIds


def csv_of(columns: int, rows: int) -> str:
    names = ",".join(f"c{number}" for number in range(columns))
    lines = (
        f"{row % 2}," + ",".join(f"value-{(row + number) % 12}" for number in range(columns))
        for row in range(rows)
    )
    return f"click,{names}\n" + "\n".join(lines) + "\n"


def manifest_bytes(project, columns: int) -> int:
    project.write("train.csv", csv_of(columns, 24))
    fields = {"click": "label", **{f"c{number}": "slot" for number in range(columns)}}
    project.configure({"format": "csv", "train": "train.csv", "eval": "train.csv", "fields": fields})
    return Path(project.prepare().dataset.folder, MANIFEST).stat().st_size


def test_manifest_takes_about_a_kilobyte_per_slot(project):
    """Ten frequent values of both splits, and the encoding; the config is not repeated."""
    few, many = manifest_bytes(project, 100), manifest_bytes(project, 300)
    assert (many - few) / 200 < 1200


def seconds(work) -> float:
    """Processor time of this thread, since others may use the machine."""

    def once() -> float:
        began = time.thread_time()
        work()
        return time.thread_time() - began

    return min(once() for _ in range(3))


def read_csv(path: Path, names: list[str]) -> None:
    reader = CsvReader(wanted=names)
    assert sum(reader.parse(block).rows for block in reader.blocks(path.name, path)) == 2


def read_parquet_header(path: Path, names: list[str]) -> None:
    next(ParquetReader(wanted=names).blocks(path.name, path))


@pytest.mark.parametrize("read", [read_csv, read_parquet_header])
def test_finding_columns_takes_linear_time(tmp_path, read):
    def one(columns: int) -> float:
        names = [f"column-{number}" for number in range(columns)]
        path = tmp_path / f"{columns}"
        if read is read_csv:
            path.write_text("\n".join([",".join(names), *[",".join(["1"] * columns)] * 2]) + "\n")
        else:
            pq.write_table(pa.table({name: [1, 2] for name in names}), path)
        return seconds(lambda: read(path, names))

    one(10)  # compiles
    assert one(8000) < 8 * one(2000)


def test_resolved_config_of_thousands_of_fields_loads_again(project):
    fields = {"click": "label", **{f"c{number}": "slot" for number in range(3000)}}
    project.write("train.csv", "click\n")
    path = project.configure({"format": "csv", "train": "train.csv", "fields": fields})
    config = load_config(path)
    text = resolved(config)
    assert len(text) / 3000 < 100, "a config may have 1 MiB"
    assert load_config(project.write("resolved.yaml", text)) == config


def values_scored(fields: int) -> tuple[int, int]:
    """The cost of reporting the importance of many fields: values scored, and fields reported."""
    names = [f"c{number}" for number in range(fields)]
    features = FeatureSpec((), tuple(SlotField(name, name, n) for n, name in enumerate(names)))
    ids_B, ones_B = np.arange(4, dtype=np.uint64), np.ones(4, dtype=np.float32)
    rows = LabelledRows(
        label_B=np.array([0, 1, 0, 1], dtype=np.float32),
        weight_B=ones_B,
        impression_B=ones_B.astype(np.uint32),
        click_B=np.array([0, 1, 0, 1], dtype=np.uint32),
        event_hour_B=np.zeros(4, dtype=np.int32),
        encoded=EncodedRows(4, np.empty((0, 4), np.float32), tuple(SlotIds(ids_B) for _ in names)),
    )
    scored = 0

    def score(block: LabelledRows) -> np.ndarray:
        nonlocal scored
        scored += block.rows * len(block.encoded.slots)
        return np.linspace(0.1, 0.9, block.rows, dtype=np.float32)

    worth, _ = documents.measure_importance(score, rows, features)
    return scored, len(worth)


def test_importance_of_many_fields_is_reported_for_the_first_ones(monkeypatch):
    monkeypatch.setattr(documents, "_MAX_SCORED_FIELDS", 10_000)
    few, all_of_them = values_scored(100)
    assert all_of_them == 100
    many, first = values_scored(400)
    assert first == 25
    assert many < 1.1 * few
