"""What was not sent yet: bounded in memory, and as lines of JSON when it must outlive the process."""

from __future__ import annotations

import json
import math
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Point:
    """The metrics of one step. The time is that of the call, so sending a point again makes no second one."""

    step: int
    time_ms: int
    values: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        # JSON has no NaN; float() reads "nan" and "inf".
        values = {name: x if math.isfinite(x) else str(x) for name, x in self.values.items()}
        return {"step": self.step, "time_ms": self.time_ms, "values": values}


@dataclass
class Parcel:
    """What is sent together, in this order: parameters, points, artifacts."""

    params: dict[str, str] = field(default_factory=dict)
    points: list[Point] = field(default_factory=list)
    artifacts: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.params or self.points or self.artifacts)

    def to_lines(self) -> str:
        """One JSON document a line."""
        documents: list[dict[str, Any]] = [{"params": self.params}] if self.params else []
        documents += [point.to_json() for point in self.points]
        documents += [{"artifact": path} for path in self.artifacts]
        return "".join(json.dumps(document, ensure_ascii=False) + "\n" for document in documents)

    @classmethod
    def from_lines(cls, lines: Iterable[str]) -> Parcel:
        """The reverse of `to_lines`. Raises ValueError, KeyError or TypeError for anything else."""
        parcel = cls()
        for document in map(json.loads, lines):
            if "params" in document:
                parcel.params.update(document["params"])
            elif "artifact" in document:
                parcel.artifacts.append(document["artifact"])
            else:
                values = {name: float(x) for name, x in document["values"].items()}
                parcel.points.append(Point(document["step"], document["time_ms"], values))
        return parcel


class Buffer:
    """First in, first out. Holds `capacity` points and drops the oldest beyond; drops nothing else."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.dropped = 0
        self._points: deque[Point] = deque()
        self._params: dict[str, str] = {}
        self._artifacts: list[str] = []
        self._lock = threading.Lock()  # held for a few operations in memory, never while something is sent

    def add_params(self, params: Mapping[str, str]) -> None:
        with self._lock:
            self._params.update(params)

    def add_point(self, point: Point) -> None:
        with self._lock:
            self._points.append(point)
            self._shrink()

    def add_artifact(self, path: str) -> None:
        with self._lock:
            self._artifacts.append(path)

    def take(self, values: int | None = None) -> Parcel:
        """Remove the oldest points, of about `values` values or all, with what goes before and after them."""
        with self._lock:
            params, self._params = self._params, {}
            points: list[Point] = []
            while self._points and (values is None or values > 0):
                points.append(self._points.popleft())
                if values is not None:
                    values -= len(points[-1].values)
            artifacts: list[str] = []
            if not self._points:
                artifacts, self._artifacts = self._artifacts, []
            return Parcel(params, points, artifacts)

    def put_back(self, parcel: Parcel) -> None:
        """Before all that came since."""
        with self._lock:
            self._params = {**parcel.params, **self._params}
            self._points.extendleft(reversed(parcel.points))
            self._artifacts = parcel.artifacts + self._artifacts
            self._shrink()

    def _shrink(self) -> None:
        while len(self._points) > self.capacity:
            self._points.popleft()
            self.dropped += 1
