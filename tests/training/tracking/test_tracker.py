"""The trainer's side: nothing waits for mlflow, nothing is lost without a word."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from clickline.training.tracking import MlflowTracker, Tracker, open_tracker
from clickline.training.tracking.buffer import Payload

NOBODY = "http://someone:hunter22@127.0.0.1:9"


def closed_at_once(folder: Path, said: list[str], *, first: int, last: int, capacity: int = 20_000) -> None:
    """A run that is over before mlflow can even be imported."""
    tracker = MlflowTracker(
        NOBODY, "ads", "run", folder=folder, warn=said.append, capacity=capacity, patience=0.0
    )
    tracker.params({"model": {"name": "deepfm", "hidden": [64, 32]}, "data": "s3://me:secret@bucket/x"})
    for step in range(first, last):
        tracker.metrics(step, {"loss": 0.5})
    tracker.artifact(folder / "report.json")
    tracker.close("FINISHED")


def kept(folder: Path) -> Payload:
    return Payload.from_lines((folder / "tracking-unsent.jsonl").read_text().splitlines())


def test_unsent_values_are_saved_and_reported(tmp_path: Path) -> None:
    said: list[str] = []
    closed_at_once(tmp_path, said, first=0, last=5000)
    left = kept(tmp_path)
    assert [point.step for point in left.points] == list(range(5000))
    assert left.params == {
        "model.name": "deepfm",
        "model.hidden": "[64, 32]",
        "data": "s3://***@bucket/x",
    }
    assert left.artifacts == [str(tmp_path / "report.json")]
    (line,) = said
    assert "The metrics of 5,000 steps, 3 parameters and 1 files were not sent" in line
    assert str(tmp_path / "tracking-unsent.jsonl") in line
    assert "when this run is started again" in line
    assert "hunter22" not in line
    assert "http://***@127.0.0.1:9" in line


def test_second_start_sends_what_the_first_left_unsent(tmp_path: Path) -> None:
    closed_at_once(tmp_path, [], first=0, last=10)
    key = (tmp_path / "tracking.json").read_text()
    closed_at_once(tmp_path, [], first=10, last=20)
    assert [point.step for point in kept(tmp_path).points] == list(range(20))
    assert (tmp_path / "tracking.json").read_text() == key  # so it goes on in the same MLflow run


def test_points_beyond_the_capacity_are_dropped_with_a_warning(tmp_path: Path) -> None:
    said: list[str] = []
    closed_at_once(tmp_path, said, first=0, last=1000, capacity=100)
    assert [point.step for point in kept(tmp_path).points] == list(range(900, 1000))
    assert "the metrics of the oldest 900 steps were dropped" in said[0]
    assert "more than the 100 steps that are kept" in said[0]


def test_unreadable_file_of_an_earlier_start_is_moved_aside(tmp_path: Path) -> None:
    (tmp_path / "tracking-unsent.jsonl").write_text('{"step": 1}\n')
    said: list[str] = []
    closed_at_once(tmp_path, said, first=0, last=2)
    assert "cannot be read; they were moved to" in said[0]
    assert (tmp_path / "tracking-unsent.unreadable").read_text() == '{"step": 1}\n'
    assert len(kept(tmp_path).points) == 2


def test_unwritable_folder_turns_tracking_off(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said: list[str] = []
    closed_at_once(tmp_path / "file" / "run", said, first=0, last=2)
    (line,) = said
    assert line.startswith("tracking is off: ")


def test_calls_after_close_are_harmless(tmp_path: Path) -> None:
    said: list[str] = []
    tracker = MlflowTracker(NOBODY, "ads", "run", folder=tmp_path, warn=said.append, patience=0.0)
    tracker.close("FINISHED")
    tracker.metrics(1, {"loss": 0.1})
    tracker.close("FAILED")
    assert len(said) == 1
    assert "The final status FINISHED was not recorded" in said[0]


@pytest.mark.parametrize("absent", ["mlflow", "sqlalchemy"])
def test_without_mlflow_tracking_is_off_with_an_install_hint(
    absent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, absent, None)
    said: list[str] = []
    tracker = open_tracker(None, "ads", "run", home=tmp_path, folder=tmp_path / "run", warn=said.append)
    assert said == ["tracking is off: pip install 'clickline[tracking]'"]
    assert type(tracker) is Tracker
    tracker.params({"a": 1})
    tracker.metrics(1, {"loss": 0.5})
    tracker.artifact(tmp_path)
    tracker.close("FINISHED")
    assert list(tmp_path.iterdir()) == []


def test_our_process_never_imports_mlflow(tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
from clickline.training.tracking import MlflowTracker
tracker = MlflowTracker("http://127.0.0.1:9", "e", "r", folder=Path(sys.argv[1]), warn=lambda line: None, patience=0)
tracker.metrics(1, {"loss": 0.5})
tracker.close("FINISHED")
sys.exit(any(name.partition(".")[0] in {"mlflow", "sqlalchemy"} for name in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
