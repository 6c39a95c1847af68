"""A small project with hourly csv logs that arrive when a test releases them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from clickline.artifacts.checkpoint import latest_checkpoint
from clickline.artifacts.from_config import registry_of
from clickline.config import Config, load_config
from clickline.data.sample.generate import SampleOptions, generate
from clickline.pipeline.follow import follow
from clickline.progress import Progress

YAML = """
name: ads
data:
  format: csv
  train: arrived/{{date}}/{{hour}}/*.csv
  dates: {{from: 20260101}}
  fields: {{click: label, timestamp: time, I1: log1p, I2: minmax, C1: slot, C2: slot, C3: slot, C4: slot}}
model: {{embedding_dim: 4, hidden: [16]}}
train: {{batch_size: 128}}
tracking: {{enabled: false}}
publish: {{sample_rows: 32}}
follow: {{poll_interval: 0.05, missing_after: 1}}
cache: {{dir: cache}}
home: {home}
"""


def make_hours(folder: Path, hours: int, rows: int) -> None:
    """Generate synthetic hours in `folder`/coming."""
    options = SampleOptions(
        "csv", hours * rows, folder / "coming", hours=hours, slots=4, dense=2, cardinality=10_000
    )
    generate(options, Progress())


class Stop(Exception):
    """The test has seen enough."""


class Watcher(Progress):
    """Records log messages and stops when a given hour is waited for."""

    def __init__(self, stop_at: str) -> None:
        self.said: list[str] = []
        self.facts: list[Mapping[str, Any]] = []
        self._stop_at = stop_at

    def log(self, message: str) -> None:
        self.said.append(message)

    def stage(self, name: str, state: str, facts: Mapping[str, Any] | None = None) -> None:
        if name == "follow" and facts is not None:
            self.facts.append(dict(facts))
            if facts["state"] == "waiting" and facts.get("hour", "") >= self._stop_at:
                raise Stop


class HourWorld:
    """A project whose hours have not arrived yet."""

    def __init__(self, folder: Path, made: Path, home: Path | None = None) -> None:
        """`home`: a home on another disk."""
        self.folder = folder
        self._made = made
        self.file = folder / "clickline.yaml"
        self.home = home or folder / "home"
        folder.mkdir(parents=True, exist_ok=True)
        if not self.file.exists():
            self.file.write_text(YAML.format(home=self.home))

    def arrive(self, *hours: int, day: str = "20260101") -> None:
        """Let hours of a day arrive, the donefile last."""
        for hour in hours:
            target = self.hour(hour, day)
            shutil.copytree(
                self._made / "coming" / day / f"{hour:02d}", target, ignore=lambda *_: ["donefile"]
            )
            (target / "donefile").touch()

    def hour(self, hour: int, day: str = "20260101") -> Path:
        return self.folder / "arrived" / day / f"{hour:02d}"

    def log(self, hour: int) -> Path:
        return self.hour(hour) / "part-00000.csv"

    def config(self, *overrides: str) -> Config:
        return load_config(self.file, overrides)

    def follow(self, stop_at: int, *overrides: str, **options: Any) -> Watcher:
        """Follow until hour `stop_at` is waited for."""
        watcher = Watcher(f"20260101/{stop_at:02d}")
        with suppress(Stop):
            follow(self.config(*overrides), watcher, **options)
        return watcher

    def start(self, stop_at: int, before: str = "", *overrides: str) -> subprocess.Popen[bytes]:
        """Follow in a separate process, which runs the code `before` first."""
        code = (
            "import sys; sys.path.insert(0, sys.argv[1])\n"
            "from pathlib import Path\n"
            "from hour_world import HourWorld\n"
            f"{before}\n"
            "HourWorld(Path(sys.argv[2]), Path()).follow(int(sys.argv[3]), *sys.argv[4:])\n"
        )
        return subprocess.Popen(
            [
                sys.executable,
                "-c",
                code,
                str(Path(__file__).parent),
                str(self.folder),
                str(stop_at),
                *overrides,
            ]
        )

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted((self.home / "follow/hours").glob("*.json"))]

    def checkpoint(self) -> dict[str, Any]:
        """The manifest of the newest checkpoint."""
        newest = sorted((self.home / "runs/follow").glob("step-*/manifest.json"))[-1]
        found: dict[str, Any] = json.loads(newest.read_text())
        return found

    def versions(self) -> list[Any]:
        return registry_of(self.config()).versions()


def same_model(one: HourWorld, other: HourWorld) -> None:
    """Assert that tables, network, optimizers and trained hours are bit-identical."""
    found = [latest_checkpoint(world.home / "runs/follow") for world in (one, other)]
    assert found[0] is not None and found[1] is not None
    hours = [(one.hourly.steps, one.hourly.trained_hours) for one in (found[0].manifest, found[1].manifest)]
    assert hours[0] == hours[1]
    for key in ("tables_sha256", "newest_hour", "plan", "features", "calibration"):
        assert getattr(found[0].manifest, key) == getattr(found[1].manifest, key), key
    arrays = [checkpoint.dense() for checkpoint in found if checkpoint is not None]
    assert arrays[0].keys() == arrays[1].keys()
    for name, array in arrays[0].items():
        assert np.array_equal(array, arrays[1][name]), name


def kill(process: subprocess.Popen[bytes]) -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.wait(30)
