"""Which versions a lookup server keeps open, and which files it copies."""

from __future__ import annotations

import time
import uuid
from pathlib import Path

import numpy as np
import pytest
from fleet import constant_blocks, ids_of_part, opened, publish, random_blocks, random_delta, registry_in

from clickline.artifacts import version as version_module
from clickline.artifacts.registry import Registry
from clickline.artifacts.version import Verifier
from clickline.errors import ArtifactError, StorageError
from clickline.serving.json_log import JsonLog
from clickline.serving.lookup import lookup_versions as versions_module
from clickline.serving.lookup.lookup_versions import ShardFiles, ShardFollower, ShardVersions
from clickline.storage.storage import Storage


def make_follower(
    registry: Registry, folder: Path, shard: int = 0
) -> tuple[ShardFollower, ShardVersions, ShardFiles]:
    files = ShardFiles(registry, shard, folder / "copies", Verifier())
    versions = ShardVersions(shard)
    return ShardFollower(files, versions, 1.0, JsonLog("lookup")), versions, files


def test_current_and_previous_versions_are_open(tmp_path, monkeypatch):
    monkeypatch.setattr(versions_module, "_IDLE_SECONDS", 0.0)
    registry = registry_in(tmp_path)
    follower, versions, _ = make_follower(registry, tmp_path)
    follower.poll_once()
    assert not versions.open and versions.current is None
    for number in range(1, 5):
        assert publish(registry, constant_blocks(number)) == number
        follower.poll_once()
        assert sorted(versions.open) == sorted({max(1, number - 1), number})
    registry.move(2, "back", after=registry.current())
    follower.poll_once()
    assert sorted(versions.open) == [1, 2]  # version 1 was current before version 2
    again, versions, _ = make_follower(registry, tmp_path)
    again.poll_once()
    assert sorted(versions.open) == [1, 2]  # also right after a restart


def test_old_version_stays_open_while_it_is_used(tmp_path):
    registry = registry_in(tmp_path)
    follower, versions, _ = make_follower(registry, tmp_path)
    for number in range(1, 4):
        publish(registry, constant_blocks(number))
        follower.poll_once()
    assert sorted(versions.open) == [1, 2, 3]
    versions.open[1].last_used = time.monotonic() - 2 * versions_module._IDLE_SECONDS
    follower.poll_once()
    assert sorted(versions.open) == [2, 3]


def test_old_versions_are_limited(tmp_path):
    registry = registry_in(tmp_path)
    follower, versions, _ = make_follower(registry, tmp_path)
    for number in range(1, 9):
        publish(registry, constant_blocks(number))
        follower.poll_once()
    assert sorted(versions.open) == [5, 6, 7, 8]


def test_only_one_shard_of_a_remote_registry_is_copied(tmp_path):
    registry = Registry(Storage(), f"memory://lookup-{uuid.uuid4().hex}/registry")
    base = publish(registry, random_blocks(1), shards=3)
    number = publish(registry, random_delta(2), shards=3, parent=base)
    follower, versions, _ = make_follower(registry, tmp_path, shard=2)
    follower.poll_once()
    copied = sorted(path.name for path in (tmp_path / "copies").glob("*/table-*"))
    assert copied == ["table-00002-of-00003.bin"] * 2
    assert sorted(versions.open) == [base, number]
    local = registry_in(tmp_path)
    base = publish(local, random_blocks(1), shards=3)
    tables = opened(local, publish(local, random_delta(2), shards=3, parent=base), [2])
    ids_N = ids_of_part(0)
    found = []
    for one in (tables, versions.open[number].tables):
        rows_NW, found_N = np.zeros((ids_N.size, 40), np.uint8), np.zeros(ids_N.size, np.bool_)
        assert 0 < one.find(0, ids_N, rows_NW, found_N) < ids_N.size
        found.append((rows_NW, found_N))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    np.testing.assert_array_equal(found[0][1], found[1][1])


def test_copies_of_dropped_versions_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(versions_module, "_IDLE_SECONDS", 0.0)
    registry = Registry(Storage(), f"memory://lookup-{uuid.uuid4().hex}/registry")
    follower, _, _ = make_follower(registry, tmp_path)
    base = publish(registry, random_blocks(1))
    delta = publish(registry, random_delta(2), parent=base)
    for number in (3, 4):
        publish(registry, constant_blocks(number))
        follower.poll_once()
    copies = sorted(
        path.name[:9] for path in (tmp_path / "copies").iterdir() if path.is_dir() and path.name[0] != "."
    )
    assert [int(name) for name in copies] == [3, 4]
    registry.move(delta, "back", after=registry.current())
    follower.poll_once()
    follower.poll_once()
    copies = sorted(
        path.name[:9] for path in (tmp_path / "copies").iterdir() if path.is_dir() and path.name[0] != "."
    )
    assert [int(name) for name in copies] == [base, delta]


def test_files_are_verified_once(tmp_path, monkeypatch):
    read: list[int] = []
    real = version_module.verify
    monkeypatch.setattr(
        version_module,
        "verify",
        lambda version, folder: (read.append(version.number), real(version, folder)),
    )
    registry = registry_in(tmp_path)
    follower, _, _ = make_follower(registry, tmp_path)
    base = publish(registry, random_blocks(1))
    follower.poll_once()
    delta = publish(registry, random_delta(2), parent=base)
    follower.poll_once()
    assert read == [base, delta]


def test_shard_that_the_version_does_not_have_is_refused(tmp_path):
    registry = registry_in(tmp_path)
    publish(registry, random_blocks(1), shards=2)
    follower, versions, files = make_follower(registry, tmp_path, shard=2)
    with pytest.raises(ArtifactError, match="there is no shard 2: version 1 has 2, numbered 0 … 1"):
        files.check_shard()
    follower.poll_once()
    assert not versions.open and "there is no shard 2" in versions.refused[1]


def test_an_unreachable_registry_changes_nothing(tmp_path, monkeypatch):
    registry = registry_in(tmp_path)
    number = publish(registry, random_blocks(1))
    follower, versions, _ = make_follower(registry, tmp_path)
    follower.poll_once()

    def fail() -> None:
        raise StorageError("no route to the store")

    monkeypatch.setattr(registry, "current", fail)
    follower.poll_once()
    assert follower.unreachable and sorted(versions.open) == [number]
    monkeypatch.undo()
    follower.poll_once()
    assert not follower.unreachable


def test_registry_that_became_empty_is_reported(tmp_path, capfd):
    """This looks like a disk that is no longer mounted."""
    registry = registry_in(tmp_path)
    follower, versions, _ = make_follower(registry, tmp_path)
    follower.poll_once()
    assert not follower.unreachable
    number = publish(registry, random_blocks(1))
    follower.poll_once()
    Path(registry.uri).rename(tmp_path / "elsewhere")
    follower.poll_once()
    assert follower.unreachable and sorted(versions.open) == [number]
    assert "it had versions before, and is now empty or missing" in capfd.readouterr().err
    (tmp_path / "elsewhere").rename(registry.uri)
    follower.poll_once()
    assert not follower.unreachable
