"""A checkpoint whose tables were written by several processes: complete or not, and equal to one in a single file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from clickline.artifacts.checkpoint import (
    Checkpoint,
    CheckpointState,
    begin_checkpoint,
    checkpoint_folder,
    finish_checkpoint,
    latest_checkpoint,
    open_checkpoint_folder,
    part_names,
    write_checkpoint,
)
from clickline.artifacts.dataset import Dataset, concat_rows
from clickline.config import Config
from clickline.embedding import SlotShape, Tables, inner_shards, load_snapshot, save_snapshot
from clickline.errors import ArtifactError
from clickline.evaluation.run import evaluate
from clickline.models.model import open_checkpoint
from clickline.publishing.run import publish
from clickline.records import LabelledRows, SlotIds
from clickline.storage.storage import Storage

STATE = CheckpointState({}, {"network": "x"}, None, -1)
DENSE = {"network/weight": np.arange(3, dtype=np.float32)}


def small_tables() -> Tables:
    tables = Tables([SlotShape("a", 2)])
    inputs_BI, wide_B = np.empty((500, 2), np.float32), np.empty(500, np.float32)
    ids = [SlotIds(np.arange(500, dtype=np.uint64))]
    tables.apply(tables.gather(ids, inputs_BI, wide_B, train=True), inputs_BI, wide_B)
    return tables


def save_parts(whole: Sequence[Path], like: Tables, folder: Path, parts: int) -> dict[str, str]:
    """Write the parts as this number of embedding servers would; returns the SHA-256 of each."""
    checksums = {}
    for number, name in enumerate(part_names(parts)):
        one = Tables(
            like.slots, embedding_optimizer=like.embedding_optimizer, wide_optimizer=like.wide_optimizer
        )
        load_snapshot(one, whole, keep=inner_shards(number, parts))
        checksums[name] = save_snapshot(one, folder / name).sha256
    return checksums


def in_parts(checkpoint: Checkpoint, parts: int, spare: Path) -> Checkpoint:
    """The same checkpoint in the same folder, as this number of embedding servers would have written it."""
    tables, dense = open_checkpoint(checkpoint, 1).tables, checkpoint.dense()
    whole = [path.rename(spare / path.name) for path in checkpoint.tables]
    folder = begin_checkpoint(checkpoint.folder.parent, checkpoint.step)
    checksums = save_parts(whole, tables, folder, parts)
    return finish_checkpoint(
        folder, checkpoint.step, dict(reversed(checksums.items())), dense, _state(checkpoint)
    )


def _state(checkpoint: Checkpoint) -> CheckpointState:
    return CheckpointState(
        **{field.name: getattr(checkpoint.manifest, field.name) for field in fields(CheckpointState)}
    )


@pytest.fixture
def written(tmp_path: Path) -> Checkpoint:
    """A checkpoint in twelve parts."""
    tables = small_tables()
    save_snapshot(tables, tmp_path / "whole.bin")
    folder = begin_checkpoint(tmp_path / "run", 7)
    checksums = save_parts([tmp_path / "whole.bin"], tables, folder, 12)
    return finish_checkpoint(folder, 7, checksums, DENSE, STATE)


def test_local_checkpoint_is_one_file(tmp_path: Path) -> None:
    tables = small_tables()
    checkpoint = write_checkpoint(tmp_path, 3, lambda path: save_snapshot(tables, path), DENSE, STATE)
    assert checkpoint.tables == (tmp_path / "step-000000003" / "tables.bin",)
    assert checkpoint.manifest.tables == {"tables.bin": checkpoint.manifest.tables_sha256}
    assert checkpoint.is_intact()
    assert open_checkpoint_folder(checkpoint.folder) == checkpoint


def test_parts_are_named_in_order(written: Checkpoint) -> None:
    found = latest_checkpoint(written.folder.parent)
    assert found is not None
    assert found.tables == written.tables
    assert [path.name for path in found.tables] == [f"tables-{part:02d}-of-12.bin" for part in range(12)]
    loaded = Tables([SlotShape("a", 2)])
    load_snapshot(loaded, found.tables)
    assert loaded.size == 500
    assert found.is_intact()
    assert found.dense()["network/weight"].tolist() == [0, 1, 2]
    assert found.manifest.plan == {"network": "x"}


@pytest.mark.parametrize("name", ["tables-00-of-12.bin", "tables-11-of-12.bin", "dense.npz"])
@pytest.mark.parametrize("lost", [True, False])
def test_missing_or_changed_part_is_detected(written: Checkpoint, name: str, lost: bool) -> None:
    path = written.folder / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.unlink()
    if not lost:
        path.write_bytes(content)
    assert not written.is_intact()


def test_checkpoint_folder_of_a_killed_run_is_emptied(tmp_path: Path) -> None:
    folder = begin_checkpoint(tmp_path, 5)
    (folder / "tables-00-of-02.bin").write_bytes(b"half")
    assert open_checkpoint_folder(folder) is None
    assert latest_checkpoint(tmp_path) is None
    assert begin_checkpoint(tmp_path, 5) == folder == checkpoint_folder(tmp_path, 5)
    assert list(folder.iterdir()) == []


def test_checkpoint_with_a_missing_part_is_refused(tmp_path: Path) -> None:
    folder = begin_checkpoint(tmp_path, 5)
    (folder / "tables-00-of-02.bin").write_bytes(b"x")
    checksums = dict.fromkeys(part_names(2), "0" * 64)
    with pytest.raises(ArtifactError, match=r"no tables-01-of-02\.bin.*all machines share"):
        finish_checkpoint(folder, 5, checksums, DENSE, STATE)
    with pytest.raises(ValueError, match=r"2 table parts are named tables-00-of-02\.bin"):
        finish_checkpoint(folder, 5, {"tables.bin": "", "tables-00-of-02.bin": ""}, DENSE, STATE)
    assert latest_checkpoint(tmp_path) is None


@pytest.mark.slow
def test_checkpoint_in_parts_scores_and_publishes_like_one_file(
    config: Config, checkpoint: Path, tmp_path: Path
) -> None:
    one_file = open_checkpoint_folder(checkpoint)
    assert one_file is not None
    rows = _eval_rows(config)
    expected = open_checkpoint(one_file, 1).score(rows)
    first = publish(config, base=True).version
    measured = evaluate(config).evaluation.total
    parts = in_parts(one_file, 3, tmp_path)
    assert len(parts.tables) == 3
    assert parts.is_intact()
    assert open_checkpoint(parts, 1).score(rows).tolist() == expected.tolist()
    assert evaluate(config).evaluation.total == measured
    second = publish(config, base=True).version
    assert (first.number, second.number) == (1, 2)
    names = sorted(path.name for path in Path(first.folder).glob("table-*.bin"))
    assert len(names) == 2
    for name in names:
        assert Path(second.folder, name).read_bytes() == Path(first.folder, name).read_bytes()
    assert second.manifest.slots == first.manifest.slots
    assert publish(config, base=True).reused


def _eval_rows(config: Config) -> LabelledRows:
    dataset = Dataset.current(Storage(), config.home)
    shards = dataset.splits["eval"].shards
    return concat_rows(
        [dataset.read(Path(dataset.folder, shards[s].file), [g]) for s, g, _ in dataset.row_groups("eval")]
    )
