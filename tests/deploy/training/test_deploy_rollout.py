"""The last step of a workflow waits for the existing predictors, and for nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import clickline
from clickline.config import Config, load_config
from clickline.deploy.rollout_wait import await_rollout, read_published_version, write_published_version
from clickline.errors import ClicklineError
from clickline.progress import Progress
from servers.serving import QuietHandler, served


class RecordedProgress(Progress):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def log(self, message: str) -> None:
        self.lines.append(message)


@contextmanager
def predictor(*versions: int) -> Iterator[int]:
    """A predictor that serves these versions one after the other, and then keeps the last."""
    left = list(versions)

    class Answers(QuietHandler):
        def do_GET(self) -> None:
            assert self.path == "/v1/models/clickline"
            now = left.pop(0) if len(left) > 1 else left[0]
            state = {"version": str(now), "state": "AVAILABLE"}
            self.answer(200, json.dumps({"model_version_status": [state]}).encode())

    with served(Answers) as port:
        yield port


def _at(project: Path, port: int) -> Config:
    return load_config(project / "clickline.yaml", [f"serve.http_port={port}"])


@pytest.mark.slow
def test_await_rollout_returns_once_every_predictor_serves_the_current_version(
    project: Path, config: Config
) -> None:
    with pytest.raises(ClicklineError, match="no current version"):
        await_rollout(config, Progress(), host="127.0.0.1")
    clickline.publish(config)
    with predictor(0, 1) as port:
        result = RecordedProgress()
        assert await_rollout(_at(project, port), result, host="127.0.0.1", seconds=60) == 1
        assert result.lines == [f"waiting for version 1: 127.0.0.1:{port}: serves 0"]
    with (
        predictor(0) as port,
        pytest.raises(ClicklineError, match="1 of 1 predictor without version 1"),
    ):
        await_rollout(_at(project, port), Progress(), host="127.0.0.1", seconds=0)
    with pytest.raises(ClicklineError, match="no response"):
        await_rollout(_at(project, 1), Progress(), host="127.0.0.1", seconds=0)
    assert await_rollout(config, Progress(), host="nobody.invalid") == 0
    place = project / "termination-log"
    write_published_version(config, place)
    assert not place.exists()  # not in a pod
    place.touch()
    write_published_version(config, place)
    assert read_published_version(place.read_text()) == 1


@pytest.mark.parametrize("message", ["", "version", "version 3 is bad", "Traceback"])
def test_other_termination_messages_are_not_read_as_a_version(message: str) -> None:
    assert read_published_version(message) is None
