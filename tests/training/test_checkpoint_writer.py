"""Checkpoints are written in the background and on schedule, also after one that failed."""

from __future__ import annotations

from pathlib import Path
from threading import Event

import pytest
from training_doubles import Heard

from clickline.artifacts.checkpoint import Checkpoint, CheckpointManifest
from clickline.config.sections import TrainSection
from clickline.progress import Progress
from clickline.training.checkpoint_writer import CheckpointWriter
from clickline.training.cluster.job import StateLost


def written() -> Checkpoint:
    manifest = CheckpointManifest({}, {}, None, -1, step=1, dense_sha256="", tables={}, tables_sha256="")
    return Checkpoint(Path("step"), manifest)


def settings(steps: int | None, every: str = "1h") -> TrainSection:
    return TrainSection.model_validate({"checkpoint_steps": steps, "checkpoint_every": every})


def test_checkpoint_is_due_at_each_multiple_of_the_steps() -> None:
    with CheckpointWriter(settings(10), Progress()) as writer:
        assert [writer.due(step) for step in (9, 10, 13)] == [False, True, True]
        writer.begin(13, written)
        writer.wait()
        assert [writer.due(step) for step in (14, 19, 20)] == [False, False, True]


def test_no_checkpoint_is_due_while_one_is_written() -> None:
    release = Event()

    def slow() -> Checkpoint:
        release.wait(60)
        return written()

    with CheckpointWriter(settings(1), Progress()) as writer:
        writer.begin(1, slow)
        assert not writer.due(2)
        release.set()
        writer.wait()
        assert writer.due(2)


def test_error_of_a_checkpoint_is_raised() -> None:
    def fail() -> Checkpoint:
        raise OSError(28, "no space left")

    with CheckpointWriter(settings(None), Progress()) as writer:
        writer.begin(1, fail)
        with pytest.raises(OSError, match="no space left"):
            writer.wait()


def test_checkpoint_lost_with_an_embedding_server_is_reported_once_and_the_next_is_on_schedule() -> None:
    ended = Event()

    def lose() -> Checkpoint:
        ended.set()
        raise StateLost("an embedding server was lost while it wrote its snapshot")

    progress = Heard()
    writer = CheckpointWriter(settings(10), progress)
    with writer:
        writer.begin(40, lose)
        writer._pool.shutdown()  # it has ended
        assert [writer.due(step) for step in (900, 901, 909, 910)] == [False, False, False, True]
    assert ended.is_set()
    [line] = progress.said
    assert line.startswith("the checkpoint of step 40 was not written: an embedding server was lost while")
