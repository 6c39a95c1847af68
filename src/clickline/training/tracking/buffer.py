"""Values that are not sent yet: bounded in memory, and stored as JSON lines when they must outlive the process."""

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
    """The metrics of one step. The time is that of the call, so sending a point again adds no duplicate."""

    step: int
    time_ms: int
    values: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        # JSON has no NaN; float() reads "nan" and "inf".
        values = {name: x if math.isfinite(x) else str(x) for name, x in self.values.items()}
        return {"step": self.step, "time_ms": self.time_ms, "values": values}


@dataclass
class Payload:
    """Values that are sent together, in this order: parameters, points, artifacts."""

    params: dict[str, str] = field(default_factory=dict)
    points: list[Point] = field(default_factory=list)
    artifacts: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.params or self.points or self.artifacts)

    def to_lines(self) -> str:
        """One JSON document per line."""
        documents: list[dict[str, Any]] = [{"params": self.params}] if self.params else []
        documents += [point.to_json() for point in self.points]
        documents += [{"artifact": path} for path in self.artifacts]
        return "".join(json.dumps(document, ensure_ascii=False) + "\n" for document in documents)

    @classmethod
    def from_lines(cls, lines: Iterable[str]) -> Payload:
        """The reverse of `to_lines`. Raises ValueError, KeyError or TypeError for anything else."""
        payload = cls()
        for document in map(json.loads, lines):
            if "params" in document:
                payload.params.update(document["params"])
            elif "artifact" in document:
                payload.artifacts.append(document["artifact"])
            else:
                values = {name: float(x) for name, x in document["values"].items()}
                payload.points.append(Point(document["step"], document["time_ms"], values))
        return payload


class TrackingBuffer:
    """A FIFO of values to send. Holds up to `capacity` points, then drops the oldest; never drops anything else."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.dropped = 0
        self._points: deque[Point] = deque()
        self._params: dict[str, str] = {}
        self._artifacts: list[str] = []
        self._lock = threading.Lock()  # held for a few operations in memory, never while sending

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

    def take(self, values: int | None = None) -> Payload:
        """Remove the oldest points, with about `values` values or all, and the parameters and artifacts around them."""
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
            return Payload(params, points, artifacts)

    def put_back(self, payload: Payload) -> None:
        """Return a payload to the front of the buffer."""
        with self._lock:
            self._params = {**payload.params, **self._params}
            self._points.extendleft(reversed(payload.points))
            self._artifacts = payload.artifacts + self._artifacts
            self._shrink()

    def _shrink(self) -> None:
        while len(self._points) > self.capacity:
            self._points.popleft()
            self.dropped += 1
