"""A checkpoint whose tables several processes wrote: whole or not, and the same model as one file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from clickline.artifacts.checkpoint import (
    Checkpoint,
    begin_checkpoint,
    checkpoint_folder,
    finish_checkpoint,
    latest,
    open_checkpoint_folder,
    part_names,
    write_checkpoint,
)
from clickline.artifacts.dataset import Dataset, concat
from clickline.config import Config
from clickline.embedding import SlotShape, Tables, inner_shards, load, save
from clickline.errors import ArtifactError
from clickline.evaluation.run import evaluate
from clickline.models.model import open_checkpoint
from clickline.publishing.run import publish
from clickline.records import LabelledRows, SlotIds
from clickline.storage.storage import Storage

DENSE = {"network/weight": np.arange(3, dtype=np.float32)}


def small_tables() -> Tables:
    tables = Tables([SlotShape("a", 2)])
    inputs_BI, wide_B = np.empty((500, 2), np.float32), np.empty(500, np.float32)
    ids = [SlotIds(np.arange(500, dtype=np.uint64))]
    tables.apply(tables.gather(ids, inputs_BI, wide_B, train=True), inputs_BI, wide_B)
    return tables


def save_parts(whole: Sequence[Path], like: Tables, folder: Path, parts: int) -> dict[str, str]:
    """Write the parts that so many shards would write; the SHA-256 of each."""
    told = {}
    for number, name in enumerate(part_names(parts)):
        one = Tables(
            like.slots, embedding_optimizer=like.embedding_optimizer, wide_optimizer=like.wide_optimizer
        )
        load(one, whole, keep=inner_shards(number, parts))
        told[name] = save(one, folder / name).sha256
    return told


def in_parts(checkpoint: Checkpoint, parts: int, spare: Path) -> Checkpoint:
    """The same checkpoint, at the same place, as so many shards would have written it."""
    tables, dense = open_checkpoint(checkpoint, 1).tables, checkpoint.dense()
    whole = [path.rename(spare / path.name) for path in checkpoint.tables]
    folder = begin_checkpoint(checkpoint.folder.parent, checkpoint.step)
    told = save_parts(whole, tables, folder, parts)
    return finish_checkpoint(
        folder, checkpoint.step, dict(reversed(told.items())), dense, dict(checkpoint.body)
    )


@pytest.fixture
def written(tmp_path: Path) -> Checkpoint:
    """A checkpoint in twelve parts."""
    tables = small_tables()
    save(tables, tmp_path / "whole.bin")
    folder = begin_checkpoint(tmp_path / "run", 7)
    told = save_parts([tmp_path / "whole.bin"], tables, folder, 12)
    return finish_checkpoint(folder, 7, told, DENSE, {"plan": "x"})


def test_a_local_checkpoint_is_one_file_with_the_digest_it_always_had(tmp_path: Path) -> None:
    tables = small_tables()
    made = write_checkpoint(tmp_path, 3, lambda path: save(tables, path), DENSE, {})
    assert made.tables == (tmp_path / "step-000000003" / "tables.bin",)
    assert made.body["tables"] == {"tables.bin": made.body["tables_sha256"]}
    assert made.is_whole()
    manifest = made.folder / "manifest.json"
    document = json.loads(manifest.read_text())
    del document["tables"]  # as an earlier release wrote it
    manifest.write_text(json.dumps(document))
    before = open_checkpoint_folder(made.folder)
    assert before is not None
    assert before.tables == made.tables
    assert before.is_whole()


def test_parts_are_named_in_their_order(written: Checkpoint) -> None:
    found = latest(written.folder.parent)
    assert found is not None
    assert found.tables == written.tables
    assert [path.name for path in found.tables] == [f"tables-{part:02d}-of-12.bin" for part in range(12)]
    loaded = Tables([SlotShape("a", 2)])
    load(loaded, found.tables)
    assert loaded.size == 500
    assert found.is_whole()
    assert found.dense()["network/weight"].tolist() == [0, 1, 2]
    assert found.body["plan"] == "x"


@pytest.mark.parametrize("name", ["tables-00-of-12.bin", "tables-11-of-12.bin", "dense.npz"])
@pytest.mark.parametrize("lost", [True, False])
def test_each_part_must_be_there_as_it_was_written(written: Checkpoint, name: str, lost: bool) -> None:
    path = written.folder / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.unlink()
    if not lost:
        path.write_bytes(content)
    assert not written.is_whole()


def test_a_killed_run_leaves_nothing_behind_in_the_folder(tmp_path: Path) -> None:
    folder = begin_checkpoint(tmp_path, 5)
    (folder / "tables-00-of-02.bin").write_bytes(b"half")
    assert open_checkpoint_folder(folder) is None
    assert latest(tmp_path) is None
    assert begin_checkpoint(tmp_path, 5) == folder == checkpoint_folder(tmp_path, 5)
    assert list(folder.iterdir()) == []


def test_a_part_that_nobody_sees_here_is_no_checkpoint(tmp_path: Path) -> None:
    folder = begin_checkpoint(tmp_path, 5)
    (folder / "tables-00-of-02.bin").write_bytes(b"x")
    told = dict.fromkeys(part_names(2), "0" * 64)
    with pytest.raises(ArtifactError, match=r"no tables-01-of-02\.bin.*all machines share"):
        finish_checkpoint(folder, 5, told, DENSE, {})
    with pytest.raises(ValueError, match=r"2 parts of tables are tables-00-of-02\.bin"):
        finish_checkpoint(folder, 5, {"tables.bin": "", "tables-00-of-02.bin": ""}, DENSE, {})
    assert latest(tmp_path) is None


@pytest.mark.slow
def test_a_checkpoint_in_parts_scores_and_is_published_as_one_file(
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
    assert parts.is_whole()
    assert open_checkpoint(parts, 1).score(rows).tolist() == expected.tolist()
    assert evaluate(config).evaluation.total == measured
    second = publish(config, base=True).version
    assert (first.number, second.number) == (1, 2)
    names = sorted(path.name for path in Path(first.folder).glob("table-*.bin"))
    assert len(names) == 2
    for name in names:
        assert Path(second.folder, name).read_bytes() == Path(first.folder, name).read_bytes()
    assert second.body["slots"] == first.body["slots"]
    assert publish(config, base=True).reused


def _eval_rows(config: Config) -> LabelledRows:
    dataset = Dataset.current(Storage(), config.home)
    shards = dataset.splits["eval"].shards
    return concat(
        [dataset.read(Path(dataset.folder, shards[s].file), [g]) for s, g, _ in dataset.row_groups("eval")]
    )
