"""Snapshots in parts: from any number of shards into any other number, with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sharded_world import ShardedTables, batch_of, train_locally

from clickline.embedding import (
    Admission,
    SlotShape,
    Tables,
    begin_snapshot,
    inner_shards,
    load_snapshot,
    save_snapshot,
    snapshot_digest,
)
from clickline.embedding.snapshot import SnapshotReader
from clickline.errors import ArtifactError

SLOTS = (SlotShape("a", 4), SlotShape("b", 2, "max"), SlotShape("c", 4, "mean"))


def tables() -> Tables:
    return Tables(SLOTS, seed=5, admission=Admission(min_impressions=3), init_scale=0.5)


@pytest.fixture(scope="module")
def snapshots(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Path]]:
    """The same content as one file (1) and as the parts that several numbers of shards write."""
    folder = tmp_path_factory.mktemp("parts")
    local, sharded_by_count = (
        tables(),
        {shards: ShardedTables([tables() for _ in range(shards)]) for shards in (2, 3, 7, 64)},
    )
    rng = np.random.default_rng(1)
    for _ in range(4):
        batch = batch_of(rng, SLOTS, 80, 200, multi=(1, 2))
        train_locally(local, batch)
        for sharded in sharded_by_count.values():
            sharded.train(batch)
    save_snapshot(local, folder / "tables.bin")
    written = {1: [folder / "tables.bin"]}
    for shards, sharded in sharded_by_count.items():
        written[shards] = [folder / f"{number}-of-{shards}.bin" for number in range(shards)]
        for shard, path in zip(sharded.shards, written[shards], strict=True):
            save_snapshot(shard.tables, path)
    return written


@pytest.mark.parametrize("shards", [1, 2, 3, 7, 64])
def test_parts_load_into_local_tables_like_one_file(
    snapshots: dict[int, list[Path]], shards: int, tmp_path: Path
) -> None:
    loaded = tables()
    digest = load_snapshot(loaded, snapshots[shards])
    assert digest == snapshot_digest(snapshots[shards]) == SnapshotReader(snapshots[shards]).digest
    save_snapshot(loaded, tmp_path / "again.bin")
    assert (tmp_path / "again.bin").read_bytes() == snapshots[1][0].read_bytes()
    begin_snapshot(loaded, since=0).write(tmp_path / "delta.bin")
    assert SnapshotReader(tmp_path / "delta.bin").header["base"] == digest


@pytest.mark.parametrize("before", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("after", [1, 2, 5, pytest.param(64, marks=pytest.mark.slow)])
def test_parts_load_into_any_other_number_of_shards(
    snapshots: dict[int, list[Path]], before: int, after: int, tmp_path: Path
) -> None:
    paths = []
    for number in range(after):
        one = tables()
        load_snapshot(one, snapshots[before], keep=inner_shards(number, after))
        for t, table in enumerate(one.parts):
            strangers = set(range(64)) - set(inner_shards(number, after))
            assert not table.ids_HS[list(strangers)].any(), t
        paths.append(tmp_path / f"{number}.bin")
        save_snapshot(one, paths[-1])
    merged = tables()
    load_snapshot(merged, paths)
    save_snapshot(merged, tmp_path / "merged.bin")
    assert (tmp_path / "merged.bin").read_bytes() == snapshots[1][0].read_bytes()


@pytest.mark.parametrize("shards", [1, 2, 7, 64])
def test_the_reader_reads_parts_as_one_snapshot_in_order(
    snapshots: dict[int, list[Path]], shards: int
) -> None:
    one, many = SnapshotReader(snapshots[1]), SnapshotReader(snapshots[shards])
    assert one.header == many.header
    for t in range(2):
        expected, actual = (np.concatenate(list(reader.rows(t))) for reader in (one, many))
        assert actual.tobytes() == expected.tobytes()
        mixed = actual["id"].astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        assert (np.diff(mixed) > 0).all()
        assert many.tables[t].defaults_S.tobytes() == one.tables[t].defaults_S.tobytes()
        assert np.abs(one.tables[t].defaults_S["vector"]).max() > 0  # not the initial values


def test_a_shard_reads_only_the_parts_it_needs(snapshots: dict[int, list[Path]], tmp_path: Path) -> None:
    paths = list(snapshots[7])
    paths[0] = tmp_path / "missing.bin"
    load_snapshot(tables(), paths, keep=inner_shards(6, 7))
    with pytest.raises(ArtifactError, match="cannot be read"):
        load_snapshot(tables(), paths, keep=inner_shards(0, 7))
    with pytest.raises(ArtifactError, match="cannot be read"):
        load_snapshot(tables(), paths)


@pytest.mark.parametrize("change", ["swapped", "short", "torn", "foreign", "delta"])
def test_parts_of_different_snapshots_are_rejected_before_a_row_changes(
    snapshots: dict[int, list[Path]], change: str, tmp_path: Path
) -> None:
    paths: list[Path] = list(snapshots[3])
    if change == "swapped":
        paths[1:] = paths[:0:-1]
    elif change == "short":
        paths.pop()
    elif change == "torn":
        content = bytearray(paths[2].read_bytes())
        content[-100] ^= 1
        paths[2] = tmp_path / "torn.bin"
        paths[2].write_bytes(content)
    else:
        other = Tables([SlotShape("other", 4)]) if change == "foreign" else tables()
        save_snapshot(other, tmp_path / "base.bin")
        paths[2] = tmp_path / "other.bin"
        save_snapshot(other, paths[2], since=None if change == "foreign" else 1)
    messages: dict[str, Any] = {
        "swapped": "out of order", "short": "are missing", "torn": "damaged", "foreign": "slots|same", "delta": "delta|same"
    }  # fmt: skip
    into = tables()
    with pytest.raises(ArtifactError, match=messages[change]):
        load_snapshot(into, paths)
    if change in ("torn", "foreign", "delta"):
        assert into.size == 0
    with pytest.raises(ArtifactError, match=messages[change]):
        SnapshotReader(paths)


def test_parts_load_only_into_new_tables(snapshots: dict[int, list[Path]]) -> None:
    loaded = tables()
    load_snapshot(loaded, snapshots[2])
    with pytest.raises(ValueError, match="new tables"):
        load_snapshot(loaded, snapshots[2])
