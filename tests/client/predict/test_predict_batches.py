"""Rows of logs in batches: each once and in order, independent of the blocks of the files."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from clickline.artifacts.from_config import storage_of
from clickline.client.columnar import SpanColumn, as_table
from clickline.client.predict.log_batches import Batch, read_batches
from clickline.config import Config, load_config
from clickline.data.input_blocks import Inputs
from clickline.data.labelled_reader import LabelledLogs, LabelledReader
from clickline.data.readers import open_reader
from clickline.data.schema import build_schema
from clickline.errors import DataError, TooManyBadRows
from clickline.features import FeatureSpec, SlotField
from clickline.progress import Progress
from clickline.storage.file_cache import FileCache
from clickline.storage.log_files import resolve_files

CSV = """
data:
  format: csv
  train: rows.csv
  max_bad_ratio: {max_bad_ratio}
  fields: {{clicked: label, price: none, user: slot, tags: {{kind: slot, separator: "|"}}, w: weight}}
cache: {{dir: cache}}
"""


def logs_of(folder: Path, config: Config, pattern: str, features: FeatureSpec | None = None) -> LabelledLogs:
    storage = storage_of(config)
    files = resolve_files(storage, [str(folder / pattern)], None, None, 0, Progress())
    schema = build_schema(config.data)
    if features is not None:
        schema = replace(schema, features=features)
    reader = open_reader(str(config.data.format), schema.columns, block_bytes=4096)
    inputs = Inputs(files, reader, FileCache(folder / "cache", 1 << 30, storage), storage)
    labelled = LabelledReader(reader, schema.features, schema.targets, time.time())
    return LabelledLogs(inputs, labelled, config.data.max_bad_ratio)


def write_csv(
    folder: Path, rows: int, max_bad_ratio: float = 0.01, bad: tuple[str, ...] = ()
) -> LabelledLogs:
    lines = [f"{n % 2},{n / 4},user-{n},a|b{n % 3},{n % 5}" for n in range(rows)]
    for at, line in enumerate(bad):
        lines.insert(7 * (at + 1), line)
    (folder / "rows.csv").write_text("\n".join(["clicked,price,user,tags,w", *lines]) + "\n")
    (folder / "clickline.yaml").write_text(CSV.format(max_bad_ratio=max_bad_ratio))
    return logs_of(folder, load_config(folder / "clickline.yaml"), "rows.csv")


def users(batch: Batch) -> list[str]:
    column = as_table(batch.columns).columns["user"]
    assert isinstance(column, SpanColumn)
    spans = zip(column.starts_N.tolist(), column.ends_N.tolist(), strict=True)
    return [column.data[start:end].tobytes().decode() for start, end in spans]


@pytest.mark.parametrize("size", [1, 7, 64, 333, 999, 1000, 5000])
def test_each_row_once_and_in_order(tmp_path: Path, size: int) -> None:
    """Blocks have 4 KiB, so batches are within a block, span two, and span multi."""
    logs = write_csv(tmp_path, 1000)
    batches = list(read_batches(logs, size, endless=False, progress=Progress()))
    assert [batch.rows for batch in batches] == [size] * (1000 // size) + [1000 % size] * (1000 % size > 0)
    assert [user for batch in batches for user in users(batch)] == [f"user-{n}" for n in range(1000)]
    assert np.concatenate([batch.label_B for batch in batches]).tolist() == [n % 2 for n in range(1000)]
    assert np.concatenate([batch.weight_B for batch in batches]).tolist() == [n % 5 for n in range(1000)]
    assert logs.rows == 1000 and not logs.bad


@pytest.mark.parametrize("size", [64, 300, 2500])
def test_endless_batches_repeat_the_rows(tmp_path: Path, size: int) -> None:
    logs = write_csv(tmp_path, 1000)
    batches = list(islice(read_batches(logs, size, endless=True, progress=Progress()), 12))
    assert {batch.rows for batch in batches} == {size}
    found = [user for batch in batches for user in users(batch)]
    assert found == [f"user-{n % 1000}" for n in range(12 * size)]


def test_rows_that_training_skips_are_skipped(tmp_path: Path) -> None:
    bad = ("1,oops,user-x,a,1", "2,1.5,user-y,a,1", "1,1.5,user-z,a,-3", "1,2")
    logs = write_csv(tmp_path, 1000, max_bad_ratio=0.1, bad=bad)
    batches = list(read_batches(logs, 64, endless=False, progress=Progress()))
    assert [user for batch in batches for user in users(batch)] == [f"user-{n}" for n in range(1000)]
    assert dict(logs.bad) == {
        "not a number": 1,
        "bad label": 1,
        "bad weight": 1,
        "wrong column count": 1,
    }


def test_bad_rows_are_counted_once_for_repeated_files(tmp_path: Path) -> None:
    logs = write_csv(tmp_path, 100, max_bad_ratio=0.1, bad=("1,oops,user-x,a,1",))
    assert len(list(islice(read_batches(logs, 50, endless=True, progress=Progress()), 20))) == 20
    assert (logs.rows, dict(logs.bad)) == (100, {"not a number": 1})


def test_too_many_bad_rows_are_refused(tmp_path: Path) -> None:
    logs = write_csv(tmp_path, 100, bad=("1,oops,user-x,a,1", "1,1.0", "x,1,u,a,1"))
    with pytest.raises(TooManyBadRows, match=r"3 of 103 rows of .*rows.csv are bad .*price is 'oops'"):
        list(read_batches(logs, 50, endless=False, progress=Progress()))


def test_file_without_rows_is_refused(tmp_path: Path) -> None:
    logs = write_csv(tmp_path, 0)
    for endless in (False, True):
        with pytest.raises(DataError, match=r"rows.csv has no rows"):
            list(read_batches(logs, 50, endless=endless, progress=Progress()))


def test_multi_valued_and_numeric_columns(tmp_path: Path) -> None:
    """Parquet lists, nullable integers and floats, split and joined across row groups."""
    rows = 500
    tags = [[f"t{k}" for k in range(n % 4)] for n in range(rows)]
    ids = [None if n % 7 == 0 else n for n in range(rows)]
    table = pa.table(
        {"label": [n % 2 for n in range(rows)], "x": [n / 8 for n in range(rows)], "id": ids, "tags": tags}
    )
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=64)
    fields = "{label: label, x: none, id: slot, tags: {kind: slot, multi: true}}"
    (tmp_path / "clickline.yaml").write_text(
        f"data: {{format: parquet, train: rows.parquet, fields: {fields}}}\ncache: {{dir: cache}}\n"
    )
    logs = logs_of(tmp_path, load_config(tmp_path / "clickline.yaml"), "rows.parquet")
    batches = list(read_batches(logs, 150, endless=False, progress=Progress()))
    assert [batch.rows for batch in batches] == [150, 150, 150, 50]
    found_tags, found_ids, found_x = [], [], []
    for batch in batches:
        x, one, multi = (batch.columns[name] for name in ("x", "id", "tags"))
        assert not isinstance(x, SpanColumn) and multi.offsets_B1 is not None
        found_x += x.values_N.tolist()
        found_ids += np.where(one.missing_N, -1, one.values_N.astype(np.int64)).tolist()
        values = [
            multi.data[start:end].tobytes().decode()
            for start, end in zip(multi.starts_N.tolist(), multi.ends_N.tolist(), strict=True)
        ]
        bounds = multi.offsets_B1.tolist()
        found_tags += [values[a:b] for a, b in pairwise(bounds)]
    assert found_x == [n / 8 for n in range(rows)]
    assert found_ids == [-1 if one is None else one for one in ids]
    assert found_tags == tags


def test_only_columns_of_the_servers_model_are_sent(tmp_path: Path) -> None:
    """A column that the server's model does not have is not sent."""
    write_csv(tmp_path, 10)
    features = FeatureSpec((), (SlotField("user", "user", 1),))
    logs = logs_of(tmp_path, load_config(tmp_path / "clickline.yaml"), "rows.csv", features)
    (batch,) = read_batches(logs, 64, endless=False, progress=Progress())
    assert list(batch.columns) == ["user"]
