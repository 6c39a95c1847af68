"""A snapshot in parts: from any number of shards into any other, or into one, with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parted import Parted, batch_of, learn_locally

from clickline.embedding import (
    Admission,
    SlotShape,
    Tables,
    freeze,
    inner_shards,
    load,
    save,
    snapshot_digest,
)
from clickline.embedding.snapshot import SnapshotReader
from clickline.errors import ArtifactError

SLOTS = (SlotShape("a", 4), SlotShape("b", 2, "max"), SlotShape("c", 4, "mean"))


def tables() -> Tables:
    return Tables(SLOTS, seed=5, admission=Admission(shows=3), init_scale=0.5)


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Path]]:
    """One content, as one file (1) and as the parts that some numbers of shards write."""
    folder = tmp_path_factory.mktemp("parts")
    local, fars = tables(), {shards: Parted([tables() for _ in range(shards)]) for shards in (2, 3, 7, 64)}
    rng = np.random.default_rng(1)
    for _ in range(4):
        batch = batch_of(rng, SLOTS, 80, 200, multi=(1, 2))
        learn_locally(local, batch)
        for far in fars.values():
            far.learn(batch)
    save(local, folder / "tables.bin")
    written = {1: [folder / "tables.bin"]}
    for shards, far in fars.items():
        written[shards] = [folder / f"{number}-of-{shards}.bin" for number in range(shards)]
        for shard, path in zip(far.shards, written[shards], strict=True):
            save(shard.tables, path)
    return written


@pytest.mark.parametrize("shards", [1, 2, 3, 7, 64])
def test_parts_load_into_local_tables_as_one_file_does(
    learned: dict[int, list[Path]], shards: int, tmp_path: Path
) -> None:
    loaded = tables()
    digest = load(loaded, learned[shards])
    assert digest == snapshot_digest(learned[shards]) == SnapshotReader(learned[shards]).digest
    save(loaded, tmp_path / "again.bin")
    assert (tmp_path / "again.bin").read_bytes() == learned[1][0].read_bytes()
    freeze(loaded, since=0).write(tmp_path / "delta.bin")
    assert SnapshotReader(tmp_path / "delta.bin").header["base"] == digest


@pytest.mark.parametrize("before", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("after", [1, 2, 5, pytest.param(64, marks=pytest.mark.slow)])
def test_parts_load_into_any_other_number_of_shards(
    learned: dict[int, list[Path]], before: int, after: int, tmp_path: Path
) -> None:
    paths = []
    for number in range(after):
        one = tables()
        load(one, learned[before], keep=inner_shards(number, after))
        for t, table in enumerate(one.parts):
            strangers = set(range(64)) - set(inner_shards(number, after))
            assert not table.ids_HS[list(strangers)].any(), t
        paths.append(tmp_path / f"{number}.bin")
        save(one, paths[-1])
    whole = tables()
    load(whole, paths)
    save(whole, tmp_path / "whole.bin")
    assert (tmp_path / "whole.bin").read_bytes() == learned[1][0].read_bytes()


@pytest.mark.parametrize("shards", [1, 2, 7, 64])
def test_the_reader_sees_one_snapshot_in_order(learned: dict[int, list[Path]], shards: int) -> None:
    one, many = SnapshotReader(learned[1]), SnapshotReader(learned[shards])
    assert one.header == many.header
    for t in range(2):
        expected, found = (np.concatenate(list(reader.rows(t))) for reader in (one, many))
        assert found.tobytes() == expected.tobytes()
        mixed = found["id"].astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        assert (np.diff(mixed) > 0).all()
        assert many.tables[t].defaults_S.tobytes() == one.tables[t].defaults_S.tobytes()
        assert np.abs(one.tables[t].defaults_S["vector"]).max() > 0  # and not what tables begin with


def test_a_shard_reads_only_the_parts_it_needs(learned: dict[int, list[Path]], tmp_path: Path) -> None:
    paths = list(learned[7])
    paths[0] = tmp_path / "gone.bin"
    load(tables(), paths, keep=inner_shards(6, 7))
    with pytest.raises(ArtifactError, match="cannot be read"):
        load(tables(), paths, keep=inner_shards(0, 7))
    with pytest.raises(ArtifactError, match="cannot be read"):
        load(tables(), paths)


@pytest.mark.parametrize("change", ["swapped", "short", "torn", "foreign", "delta"])
def test_parts_that_are_not_one_snapshot_are_refused_before_a_row_is_touched(
    learned: dict[int, list[Path]], change: str, tmp_path: Path
) -> None:
    paths: list[Path] = list(learned[3])
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
        save(other, tmp_path / "base.bin")
        paths[2] = tmp_path / "other.bin"
        save(other, paths[2], since=None if change == "foreign" else 1)
    words: dict[str, Any] = {
        "swapped": "not in their order", "short": "not all given", "torn": "torn", "foreign": "slots|same", "delta": "delta|same"
    }  # fmt: skip
    into = tables()
    with pytest.raises(ArtifactError, match=words[change]):
        load(into, paths)
    if change in ("torn", "foreign", "delta"):
        assert into.size == 0
    with pytest.raises(ArtifactError, match=words[change]):
        SnapshotReader(paths)


def test_parts_are_loaded_only_into_new_tables(learned: dict[int, list[Path]]) -> None:
    loaded = tables()
    load(loaded, learned[2])
    with pytest.raises(ValueError, match="new tables"):
        load(loaded, learned[2])
