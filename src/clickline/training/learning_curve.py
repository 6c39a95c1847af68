"""The learning curve of a run, in a file that other processes can read while it grows.

    <run>/curve.json    {"stride": 2, "step": […], "rows": […], "seconds": […], "loss": […], "auc": […],
                         "rows_per_second": […]}

It stays small: when it is full, every second point is dropped, and from then on only every second one is kept. The
newest is always included.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from clickline.artifacts.manifest import as_json

CurveColumns = dict[str, list[Any]]
"""By column: step, rows, seconds, loss, auc, rows_per_second."""

_COLUMNS = ("step", "rows", "seconds", "loss", "auc", "rows_per_second")
_MAX_POINTS = 500
_WRITE_SECONDS = 1.0


class LearningCurve:
    """Loss and AUC of rows before they were trained on, and the speed of training."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._points: list[tuple[Any, ...]] = []
        self._newest: tuple[Any, ...] | None = None  # not among the kept points
        self._stride = 1
        self._skipped = 0  # points since the last kept one
        self._started_at = time.monotonic()  # of the curve
        self._written_at = 0.0

    def resume_from(self, step: int) -> None:
        """Load the curve of the run so far, without points after `step`, which will be trained again."""
        document = _read(self._path)
        self._points = [point for point in _points(document) if point[0] <= step]
        self._newest, self._skipped = None, 0
        self._stride = document.get("stride", 1)
        seconds = self._points[-1][_COLUMNS.index("seconds")] if self._points else 0.0
        self._started_at = time.monotonic() - seconds

    def add(
        self, step: int, rows: int, loss: float | None, auc: float | None, rows_per_second: float
    ) -> None:
        """Add a point, unless there was no step since the last one."""
        if step <= self._last_step:
            return
        now = time.monotonic()
        point = (step, rows, round(now - self._started_at, 3), loss, auc, round(rows_per_second, 1))
        self._skipped += 1
        if not self._points or self._skipped >= self._stride:
            self._points.append(point)
            self._newest, self._skipped = None, 0
        else:
            self._newest = point
        if len(self._points) >= _MAX_POINTS:
            self._newest = self._points[-1]
            self._points, self._stride = self._points[::2], 2 * self._stride
            self._skipped = self._stride // 2
        if now - self._written_at >= _WRITE_SECONDS:
            self.write()

    def write(self) -> None:
        """Replace the file atomically. Without fsync: that would take longer than a step."""
        self._written_at = time.monotonic()
        hidden = self._path.with_name(f".{self._path.name}.new")
        hidden.write_bytes(as_json({"stride": self._stride, **self.columns()}))
        hidden.replace(self._path)

    @property
    def _last_step(self) -> int:
        newest = self._newest or (self._points[-1] if self._points else (0,))
        return int(newest[0])

    def columns(self) -> CurveColumns:
        points = self._points if self._newest is None else [*self._points, self._newest]
        return {name: [point[place] for point in points] for place, name in enumerate(_COLUMNS)}


def _read(path: Path) -> dict[str, Any]:
    """The stored document; empty if it is missing or damaged."""
    try:
        document = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def _points(document: dict[str, Any]) -> list[tuple[Any, ...]]:
    return list(zip(*(document.get(name, []) for name in _COLUMNS), strict=False))
