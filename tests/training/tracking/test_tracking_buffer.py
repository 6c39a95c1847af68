"""The buffer: bounded, in order, and the same after a trip through lines of JSON."""

from __future__ import annotations

import json
import math

import pytest

from clickline.training.tracking.buffer import Payload, Point, TrackingBuffer


def point(step: int, **values: float) -> Point:
    return Point(step, 1_000 + step, values or {"loss": 1.0 / (step + 1)})


def steps(payload: Payload) -> list[int]:
    return [each.step for each in payload.points]


def test_the_oldest_points_are_dropped_and_counted() -> None:
    buffer = TrackingBuffer(capacity=3)
    for step in range(10):
        buffer.add_point(point(step))
    assert steps(buffer.take()) == [7, 8, 9]
    assert buffer.dropped == 7


def test_parameters_and_artifacts_are_never_dropped() -> None:
    buffer = TrackingBuffer(capacity=1)
    for number in range(50):
        buffer.add_params({f"p{number}": str(number)})
        buffer.add_artifact(f"/a/{number}")
    taken = buffer.take()
    assert len(taken.params) == len(taken.artifacts) == 50
    assert buffer.dropped == 0


def test_payload_holds_about_the_requested_number_of_values() -> None:
    buffer = TrackingBuffer(capacity=100)
    for step in range(5):
        buffer.add_point(point(step, loss=0.5, auc=0.7))
    buffer.add_artifact("/report")
    first = buffer.take(values=4)
    assert steps(first) == [0, 1]
    assert first.artifacts == []  # files go last
    second = buffer.take(values=100)
    assert steps(second) == [2, 3, 4]
    assert second.artifacts == ["/report"]
    assert not buffer.take(values=100)


def test_payload_that_is_put_back_goes_first() -> None:
    buffer = TrackingBuffer(capacity=100)
    buffer.add_params({"epochs": "1", "dim": "9"})
    buffer.add_point(point(1))
    buffer.add_artifact("/first")
    failed = buffer.take()
    buffer.add_params({"epochs": "2"})
    buffer.add_point(point(2))
    buffer.add_artifact("/second")
    buffer.put_back(failed)
    again = buffer.take()
    assert again.params == {"epochs": "2", "dim": "9"}
    assert steps(again) == [1, 2]
    assert again.artifacts == ["/first", "/second"]


def test_putting_back_drops_the_oldest_too() -> None:
    buffer = TrackingBuffer(capacity=2)
    buffer.add_point(point(1))
    buffer.add_point(point(2))
    failed = buffer.take()
    buffer.add_point(point(3))
    buffer.put_back(failed)
    assert steps(buffer.take()) == [2, 3]
    assert buffer.dropped == 1


def test_lines_are_plain_json_and_read_back_the_same() -> None:
    payload = Payload(
        {"data.train": "日志/*.tsv"},
        [point(3), point(4, loss=math.nan, norm=-math.inf)],
        ["/runs/a b/report.json"],
    )
    text = payload.to_lines()
    for line in text.splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    again = Payload.from_lines(text.splitlines())
    assert again.params == payload.params
    assert again.artifacts == payload.artifacts
    assert again.points[0] == payload.points[0]
    assert math.isnan(again.points[1].values["loss"])
    assert again.points[1].values["norm"] == -math.inf
