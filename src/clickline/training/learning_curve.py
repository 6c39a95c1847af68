"""The learning curve of a run, in a file that others may look at while it grows.

    <run>/curve.json    {"stride": 2, "step": […], "rows": […], "seconds": […], "loss": […], "auc": […],
                         "rows_per_second": […]}

It stays small: when it is full, every second point goes, and from then on only every second one is kept. The newest is
always there.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from clickline.artifacts.manifest import as_json

Learning = dict[str, list[Any]]
"""By column: step, rows, seconds, loss, auc, rows_per_second."""

_COLUMNS = ("step", "rows", "seconds", "loss", "auc", "rows_per_second")
_MOST = 500
_WRITTEN_SECONDS = 1.0


class LearningCurve:
    """Loss and AUC of rows before they were learned, and how fast it went."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._points: list[tuple[Any, ...]] = []
        self._newest: tuple[Any, ...] | None = None  # is not among those that are kept
        self._stride = 1
        self._passed = 0  # points since the last one that was kept
        self._since = time.monotonic()  # when second 0 was
        self._written = 0.0

    def go_on_from(self, step: int) -> None:
        """Take up the curve of the run so far; what was learned after `step` is to be learned again."""
        document = _read(self._path)
        self._points = [point for point in _points(document) if point[0] <= step]
        self._newest, self._passed = None, 0
        self._stride = document.get("stride", 1)
        seconds = self._points[-1][_COLUMNS.index("seconds")] if self._points else 0.0
        self._since = time.monotonic() - seconds

    def add(
        self, step: int, rows: int, loss: float | None, auc: float | None, rows_per_second: float
    ) -> None:
        """One more point; none if nothing was learned since the last one."""
        if step <= self._last_step:
            return
        now = time.monotonic()
        point = (step, rows, round(now - self._since, 3), loss, auc, round(rows_per_second, 1))
        self._passed += 1
        if not self._points or self._passed >= self._stride:
            self._points.append(point)
            self._newest, self._passed = None, 0
        else:
            self._newest = point
        if len(self._points) >= _MOST:
            self._newest = self._points[-1]
            self._points, self._stride = self._points[::2], 2 * self._stride
            self._passed = self._stride // 2
        if now - self._written >= _WRITTEN_SECONDS:
            self.write()

    def write(self) -> None:
        """Put the file in place whole. It is not forced to the disk: that would take longer than a step."""
        self._written = time.monotonic()
        hidden = self._path.with_name(f".{self._path.name}.new")
        hidden.write_bytes(as_json({"stride": self._stride, **self.columns()}))
        hidden.replace(self._path)

    @property
    def _last_step(self) -> int:
        newest = self._newest or (self._points[-1] if self._points else (0,))
        return int(newest[0])

    def columns(self) -> Learning:
        points = self._points if self._newest is None else [*self._points, self._newest]
        return {name: [point[place] for point in points] for place, name in enumerate(_COLUMNS)}


def _read(path: Path) -> dict[str, Any]:
    """What is there; nothing of a file that a power cut spoilt."""
    try:
        document = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def _points(document: dict[str, Any]) -> list[tuple[Any, ...]]:
    return list(zip(*(document.get(name, []) for name in _COLUMNS), strict=False))
