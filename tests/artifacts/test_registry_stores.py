"""The registry in other stores: memory, and Hadoop over WebHDFS."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from clickline.artifacts.registry import Registry
from clickline.artifacts.version import verify
from clickline.errors import RegistryMoved, StorageError
from clickline.storage.storage import Storage
from servers.webhdfs import webhdfs_server
from version_manifests import version_manifest


@pytest.fixture(params=["memory", "webhdfs"])
def place(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "memory":
        yield f"memory://{uuid.uuid4().hex}/registry"
        return
    with webhdfs_server() as node:
        yield f"{node.uri}/models/registry"


def test_publish_move_fetch_and_gc(place: str, tmp_path: Path) -> None:
    registry = Registry(Storage(), place)
    now = None
    for _ in range(4):
        with registry.draft(scratch=tmp_path / "scratch") as draft:
            (draft.folder / "table.bin").write_bytes(b"rows")
            version = draft.commit(version_manifest())
        now = registry.move(version.number, "publish", after=now)
    with registry.draft(scratch=tmp_path / "scratch"):
        pass
    with pytest.raises(RegistryMoved):
        registry.move(1, "late", after=None)
    assert registry.gc(1) == [1, 2]
    assert [one.number for one in registry.versions()] == [3, 4]
    assert [move.version for move in registry.moves()] == [1, 2, 3, 4]
    registry.check(version)
    verify(version, registry.fetch(version, tmp_path / "copies"))
    assert registry.draft(scratch=tmp_path / "scratch").number == 6


def test_web_server_cannot_be_a_registry(tmp_path: Path) -> None:
    registry = Registry(Storage(), "http://127.0.0.1:1/registry")
    with pytest.raises(StorageError):
        registry.draft(scratch=tmp_path)
    assert list(tmp_path.iterdir()) == []
