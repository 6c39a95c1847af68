"""The learning curve stays small, is whole whenever somebody looks, and forgets what is learned again."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from clickline.config import load_config
from clickline.pipeline.flow import train
from clickline.training.learning_curve import LearningCurve

COLUMNS = ["step", "rows", "seconds", "loss", "auc", "rows_per_second"]


def drawn(path: Path, points: int) -> LearningCurve:
    curve = LearningCurve(path)
    for step in range(1, points + 1):
        curve.add(step, 10 * step, 1 / step, None, 5.0)
    return curve


@pytest.mark.parametrize("points", [1, 2, 499, 500, 501, 750, 1000, 12_345])
def test_many_points_are_thinned_evenly_and_include_the_newest(tmp_path, points):
    columns = drawn(tmp_path / "curve.json", points).columns()
    assert list(columns) == COLUMNS
    steps = columns["step"]
    assert min(points, 250) <= len(steps) <= 500
    assert (steps[0], steps[-1]) == (1, points)
    gaps = [after - before for before, after in pairwise(steps)]
    assert len(set(gaps[:-1])) <= 1
    assert not gaps or 0 < gaps[-1] <= max(gaps)
    assert columns["rows"] == [10 * step for step in steps]
    assert columns["loss"] == [1 / step for step in steps]


def test_file_is_not_written_for_every_point(tmp_path):
    path = tmp_path / "curve.json"
    curve = drawn(path, 1)
    assert json.loads(path.read_text())["step"] == [1]
    curve.add(2, 20, 0.5, 0.6, 5.0)
    assert json.loads(path.read_text())["step"] == [1]
    curve.write()
    assert json.loads(path.read_text())["step"] == [1, 2]
    assert [one.name for one in tmp_path.iterdir()] == ["curve.json"]


def test_resuming_drops_points_after_the_checkpoint(tmp_path):
    path = tmp_path / "curve.json"
    drawn(path, 2000).write()
    curve = LearningCurve(path)
    curve.resume_from(1000)
    before = curve.columns()
    assert before["step"][-1] <= 1000 < before["step"][-1] + 8
    for step in range(1001, 3001):
        curve.add(step, 10 * step, 0.1, 0.7, 5.0)
    columns = curve.columns()
    assert columns["step"][-1] == 3000
    assert len(columns["step"]) <= 500
    assert all(a < b for a, b in pairwise(columns["step"]))
    assert all(a <= b for a, b in pairwise(columns["seconds"]))
    gaps = [after - before for before, after in pairwise(columns["step"])]
    assert max(gaps) <= 3 * min(gaps[:-1])  # as even after it as before


def test_step_is_not_added_twice(tmp_path):
    curve = drawn(tmp_path / "curve.json", 3)
    curve.add(3, 30, 0.3, 0.7, 1.0)
    curve.add(0, 0, None, None, 0.0)
    assert curve.columns()["step"] == [1, 2, 3]


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"step": [1]}'])
def test_damaged_file_is_an_empty_curve(tmp_path, content):
    path = tmp_path / "curve.json"
    path.write_bytes(content)
    curve = LearningCurve(path)
    curve.resume_from(10)
    assert curve.columns() == {name: [] for name in COLUMNS}


def test_resumed_run_extends_the_curve(project):
    constant = ["train.schedule={kind: constant}", "train.embedding.schedule={kind: constant}"]
    first = train(load_config(project / "clickline.yaml", constant))
    path = first.checkpoint.folder.parent / "curve.json"
    drawing = json.loads(path.read_text())
    assert drawing["step"][-1] == first.checkpoint.step
    assert drawing["rows"][-1] == 16_000 == first.checkpoint.manifest.run.trained_rows
    for name, value in zip(COLUMNS, (first.checkpoint.step + 1, 99_999, 9e9, 9.0, 0.9, 9.0), strict=True):
        drawing[name].append(value)  # as a run that was killed after its checkpoint leaves it
    path.write_text(json.dumps(drawing))
    more = train(load_config(project / "clickline.yaml", [*constant, "train.epochs=2"]))
    learning = json.loads(more.report.read_text())["learning"]
    assert learning == {name: json.loads(path.read_text())[name] for name in COLUMNS}
    assert 16_000 in learning["rows"]
    assert 99_999 not in learning["rows"]
    assert (learning["step"][-1], learning["rows"][-1]) == (more.checkpoint.step, 32_000)
    assert more.checkpoint.manifest.run.trained_rows == 32_000
    assert all(a < b for a, b in pairwise(learning["step"]))
    assert all(a <= b for a, b in pairwise(learning["seconds"]))
    assert max(learning["seconds"]) < 600
    assert all(0 < loss < 2 for loss in learning["loss"])
    assert all(speed > 0 for speed in learning["rows_per_second"])
