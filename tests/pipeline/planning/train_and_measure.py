"""Trains in a separate process and prints its cost: a program started by `accuracy.py`.

python train_and_measure.py CONFIG [SECTION.KEY=VALUE …]   one line of JSON: bytes and seconds
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from clickline.config import load_config
from clickline.models.model import Model
from clickline.pipeline.flow import train
from clickline.progress import Progress


class Clock(Progress):
    """Records the duration of each piece of work."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._begun: list[tuple[str, float]] = []
        self._first: float | None = None
        self._rows = self._first_rows = 0

    def begin(self, title: str, **totals: Any) -> None:
        self._begun.append((title, time.perf_counter()))
        self._first, self._rows = None, 0

    def end(self) -> None:
        title, began = self._begun.pop()
        self.seconds[title] = time.perf_counter() - began
        if self._first is not None:  # without the first step, which waits for rows and loads kernels
            self.seconds[f"{title}, steady"] = (
                (time.perf_counter() - self._first) * self._rows / (self._rows - self._first_rows)
            )

    def advance(self, *, rows: int = 0, size: int = 0) -> None:
        if self._first is None:
            self._first, self._first_rows = time.perf_counter(), rows
        self._rows += rows


def main() -> None:
    built: list[Model] = []
    build = Model.build.__func__  # type: ignore[attr-defined]

    def remembered(cls: type[Model], *args: Any, **kwargs: Any) -> Model:
        built.append(build(cls, *args, **kwargs))
        return built[-1]

    Model.build = classmethod(remembered)  # type: ignore[method-assign,assignment]
    clock = Clock()
    result = train(load_config(sys.argv[1], sys.argv[2:]), clock)
    (peak,) = (
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")
    )
    tables = built[0].tables
    sys.stdout.write(
        json.dumps(
            {
                "peak": int(peak.split()[1]) * 1024,
                "tables": tables.memory_bytes,
                "ids": tables.size,
                "admitted": sum(slot.ids for slot in tables.report()),
                "checkpoint": sum(file.stat().st_size for file in result.checkpoint.folder.iterdir()),
                "learn": clock.seconds["train epoch 1, steady"],
            }
        )
    )


if __name__ == "__main__":
    main()
