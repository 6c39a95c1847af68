"""A small pipeline: write logs, write a config, prepare, read the dataset back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from clickline.config import Config, load_config
from clickline.data.prepare.hour_dataset import PreparedHour, prepare_hour
from clickline.data.prepare.run import PrepareResult, prepare
from clickline.data.sample.generate import SampleOptions, generate
from clickline.features import FeatureSpec
from clickline.progress import Progress

FIRST_HOUR = 20454 * 24  # 2026-01-01T00, where samples begin


class Heard(Progress):
    """A Progress that records its calls."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.rows = 0

    def log(self, message: str) -> None:
        self.said.append(message)

    def advance(self, *, rows: int = 0, size: int = 0) -> None:
        self.rows += rows


class Project:
    """A folder with a clickline.yaml."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.heard = Heard()

    def write(self, name: str, content: str | bytes) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    def configure(self, data: dict[str, Any], **sections: Any) -> Path:
        cache = {"dir": "cache"}
        return self.write("clickline.yaml", yaml.safe_dump({"data": data, "cache": cache, **sections}))

    def prepare(self, *overrides: str) -> PrepareResult:
        self.heard = Heard()
        return prepare(load_config(self.folder / "clickline.yaml", overrides), self.heard)

    def table(self, result: PrepareResult, split: str = "train") -> Any:
        shards = result.dataset.splits[split].shards
        tables = [pq.read_table(Path(result.dataset.folder, shard.file)) for shard in shards]
        return pa.concat_tables(tables)


_FIELDS: dict[str, dict[str, Any]] = {
    "criteo": {"I3": "zscore", "I4": {"transform": "bucket", "buckets": 8}, "I5": "minmax"},
    "csv": {"click": "label", "timestamp": "time", "I1": "zscore", "C1": "slot", "C2": "slot"},
    "slots": {},
    "paddlerec": {"dense_2": "zscore", "dense_4": "ignore"},
}


class Hours:
    """A project whose logs arrive hour by hour."""

    def __init__(self, project: Project, form: str, rows: int = 3000, hours: int = 3, **data: Any) -> None:
        self.project = project
        self.logs: Path = project.folder / "logs"
        options = SampleOptions(form, rows, self.logs, hours=hours, seed=2, cardinality=500)
        generate(options, Progress())
        train = {"train": "logs/{date}/{hour}/part-*", "dates": {"from": "20260101/00"}}
        project.configure(
            {
                "format": form,
                "fields": _FIELDS[form],
                "shard_size": "64KiB",
                "max_bad_ratio": 0.1,
                **train,
                **data,
            }
        )

    def config(self, *overrides: str) -> Config:
        return load_config(self.project.folder / "clickline.yaml", overrides)

    def file(self, hour: int) -> Path:
        (found,) = self.logs.glob(f"20260101/{hour:02d}/part-*")
        return found

    def prepare(self, hour: int, features: FeatureSpec | None, *overrides: str) -> PreparedHour:
        self.project.heard = Heard()
        return prepare_hour(self.config(*overrides), FIRST_HOUR + hour, features, self.project.heard)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


@pytest.fixture
def hourly(project: Project) -> Callable[..., Hours]:
    """Makes hours of logs in a format: `hourly("criteo", rows=3000, hours=3, **data)`."""
    return partial(Hours, project)


@pytest.fixture
def criteo_line() -> Callable[..., str]:
    def line(label: object = 0, row: int = 0, **values: object) -> str:
        cells = {f"I{i}": str((row * i) % 50) for i in range(1, 14)}
        cells |= {f"C{i}": f"{(row * 2654435761 + i) % 97:08x}" for i in range(1, 27)}
        cells |= {name: str(value) for name, value in values.items()}
        return "\t".join([str(label), *cells.values()]) + "\n"

    return line
