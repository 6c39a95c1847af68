"""Compares a plan with actual runs of prepare, train and publish in separate processes.

Times are compared in alternating pairs of plan and run, and the pair that agrees best counts: on a machine with other load,
either of the two may be slowed down by half.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import clickline
from clickline.config import load_config
from clickline.pipeline.planning.plan_result import Plan
from clickline.pipeline.planning.run import plan
from clickline.pipeline.planning.sampling import SAMPLE_BYTES

_PROGRAM = Path(__file__).parent / "train_and_measure.py"


@dataclass(frozen=True)
class Comparison:
    """Ratios planned / actual."""

    rows: float
    ids: float
    admitted: float
    tables: float
    peak: float
    checkpoint: float
    version: float
    learn: float | None
    turns: tuple[float, ...]  # `learn` of each pair, of which the closest counts

    def __str__(self) -> str:
        *ratios, turns = vars(self).values()
        shown = ["-" if value is None else f"{value:.2f}" for value in ratios]
        return " | ".join([*shown, ", ".join(f"{turn:.2f}" for turn in turns) or "-"])


def compare(
    config_file: Path,
    overrides: list[str],
    *,
    prepared: bool = True,
    sample_bytes: int = SAMPLE_BYTES,
    probe: bool = True,
    pairs: int = 1,
) -> Comparison:
    """Plan, run and compare; `prepared`: the (first) plan may use the dataset. Memory and disk are those of the first
    pair; further pairs run only while times disagree."""
    config = load_config(config_file, overrides)
    if prepared:
        clickline.prepare(config)
    planned: list[Plan] = []
    real: list[dict[str, float]] = []
    for turn in range(pairs):
        planned.append(plan(config, sample_bytes=sample_bytes, probe=probe))
        if not turn:
            clickline.prepare(config)
        shutil.rmtree(Path(config.home, "runs"), ignore_errors=True)
        real.append(_train(config_file, overrides))
        if probe and _is_close(_ratio(planned[-1], real[-1])):
            break
    version = clickline.publish(config).version
    first, happened = planned[0], real[0]
    rows = clickline.prepare(config).train_rows
    turns = tuple(_ratio(p, r) for p, r in zip(planned, real, strict=True)) if probe else ()
    return Comparison(
        first.rows.train / rows,
        first.ids.distinct / happened["ids"],
        first.ids.admitted / happened["admitted"],
        first.memory.tables.total / happened["tables"],
        first.memory.peak / happened["peak"],
        first.disk.checkpoint / happened["checkpoint"],
        first.disk.version / version.size,
        min(turns, key=lambda ratio: max(ratio, 1 / ratio), default=None),
        turns,
    )


def _ratio(planned: Plan, real: dict[str, float]) -> float:
    assert planned.time is not None
    return planned.time.learn / real["learn"]


def _is_close(ratio: float) -> bool:
    return 0.8 < ratio < 1.25


def _train(config_file: Path, overrides: list[str]) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, str(_PROGRAM), str(config_file), *overrides],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found
