"""A registry in S3: publish, follow, fetch, roll back and gc over a real socket."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clickline.artifacts.registry import Registry
from clickline.artifacts.version import Version, verify
from clickline.errors import ArtifactError, RegistryMoved, StorageError
from clickline.storage.storage import Storage
from servers.s3 import s3_server
from version_manifests import IMPORT, version_manifest


@pytest.fixture(scope="module")
def options() -> Iterator[dict[str, Any]]:
    with s3_server() as endpoint:
        yield {"s3": {"client_kwargs": {"endpoint_url": endpoint}, "key": "tests", "secret": "test secret"}}


@pytest.fixture
def registry(options: dict[str, Any]) -> Registry:
    storage = Storage(options)
    bucket = f"bucket-{uuid.uuid4().hex[:12]}"
    storage._drivers.open("s3://x").mkdir(bucket)
    return Registry(storage, f"s3://{bucket}/models/registry")


@pytest.fixture
def other(registry: Registry, options: dict[str, Any]) -> Registry:
    """The same registry, opened as by another process."""
    return Registry(Storage(options), registry.uri)


def publish(registry: Registry, scratch: Path, parent: int | None = None, size: int = 1000) -> Version:
    with registry.draft(parent, scratch) as draft:
        (draft.folder / "table.bin").write_bytes(f"{draft.number:>{size}}".encode())
        (draft.folder / "dense.onnx").write_bytes(b"network")
        return draft.commit(version_manifest(parent))


def keys(registry: Registry) -> list[str]:
    files = registry._storage.list(f"{registry.uri}/**")
    return [file.uri.removeprefix(f"{registry.uri}/") for file in files]


@pytest.mark.slow
def test_full_cycle_from_the_first_draft_to_gc(registry: Registry, other: Registry, tmp_path: Path) -> None:
    assert (registry.current(), registry.versions(), registry.moves()) == (None, [], [])
    scratch, copies = tmp_path / "scratch", tmp_path / "copies"
    base = publish(registry, scratch, size=9_000_000)
    delta = publish(registry, scratch, parent=1)
    assert list(scratch.iterdir()) == []
    assert [version.number for version in other.versions()] == [1, 2]
    assert other.version(2) == delta
    assert [version.number for version in other.chain(delta)] == [1, 2]
    other.check(delta)

    first = registry.move(1, "first", after=None)
    second = other.move(2, "second", after=first)
    with pytest.raises(RegistryMoved, match=r"version 2 has been current since .* \(second"):
        registry.move(1, "late", after=first)
    assert registry.current() == second
    assert registry.moves() == [first, second]

    folder = other.fetch(base, copies)
    assert folder.parent == copies
    verify(base, folder)
    assert sorted(path.name for path in folder.iterdir()) == ["dense.onnx", "manifest.json", "table.bin"]
    before = (folder / "table.bin").stat()
    assert registry.fetch(base, copies) == folder
    assert (folder / "table.bin").stat().st_mtime_ns == before.st_mtime_ns, "fetched once"

    third = publish(registry, scratch)
    registry.move(3, "third", after=second)
    assert registry.gc(1) == []
    fourth = registry.move(publish(registry, scratch).number, "fourth", after=registry.current())
    assert registry.gc(1) == [1, 2]
    assert fourth.previous == third.number == 3
    assert keys(registry) == [
        *(f"moves/00000000{n}.json" for n in (1, 2, 3, 4)),
        *(
            f"versions/00000000{n}/{name}"
            for n in (3, 4)
            for name in ("dense.onnx", "manifest.json", "table.bin")
        ),
    ]
    verify(base, folder)  # the copy is independent of the registry
    other.remove_copies(copies, [third])
    assert [path.name for path in copies.iterdir()] == [".lock"]


def test_poll_is_one_request(registry: Registry, tmp_path: Path) -> None:
    publish(registry, tmp_path)
    move = registry.move(1, "first", after=None)
    assert registry.current() == move
    filesystem = registry._storage._drivers.open(registry.uri)
    client = filesystem.s3.meta.events
    calls: list[str] = []
    client.register("before-call.s3", lambda model, **_: calls.append(model.name))
    assert registry.current() == move
    assert calls == ["ListObjectsV2"]


def test_abandoned_draft_leaves_only_its_claim(registry: Registry, tmp_path: Path) -> None:
    real = registry._storage.put

    def fail_at_the_table(uri: str, data: bytes | Path) -> None:
        if uri.endswith("table.bin"):
            raise StorageError("the store did not answer")
        real(uri, data)

    with registry.draft(scratch=tmp_path) as draft:
        (draft.folder / "dense.onnx").write_bytes(b"network")
        (draft.folder / "table.bin").write_bytes(b"rows")
        registry._storage.put = fail_at_the_table  # type: ignore[method-assign]
        with pytest.raises(StorageError, match="did not answer"):
            draft.commit(version_manifest())
    assert keys(registry) == ["drafts/000000001.json"]
    assert list(tmp_path.iterdir()) == []
    del registry._storage.put
    assert publish(registry, tmp_path).number == 2
    assert registry.gc(1) == []
    assert [key for key in keys(registry) if key.startswith("drafts")] == []


def test_incomplete_upload_is_not_a_version(registry: Registry, tmp_path: Path) -> None:
    with registry.draft(scratch=tmp_path) as draft:
        (draft.folder / "dense.onnx").write_bytes(b"network")
        (draft.folder / "table.bin").write_bytes(b"rows")
        real = registry._storage.put

        def lose(uri: str, data: bytes | Path) -> None:
            if not uri.endswith("table.bin"):
                real(uri, data)

        registry._storage.put = lose  # type: ignore[method-assign]
        with pytest.raises(
            ArtifactError, match=r"the upload of version 1 is incomplete: .*table\.bin is missing"
        ):
            draft.commit(version_manifest())
    assert registry.versions() == []


@pytest.mark.parametrize(
    ("content", "state"), [(b"rowz", "is damaged"), (b"row", "is damaged"), (None, "is missing")]
)
def test_damaged_file_is_not_fetched(
    registry: Registry, tmp_path: Path, content: bytes | None, state: str
) -> None:
    with registry.draft(scratch=tmp_path / "scratch") as draft:
        (draft.folder / "table.bin").write_bytes(b"rows")
        version = draft.commit(version_manifest())
    place = f"{version.folder}/table.bin"
    registry._storage.delete(place) if content is None else registry._storage.put(place, content)
    copies = tmp_path / "copies"
    with pytest.raises(ArtifactError, match=rf"versions/000000001/table\.bin {state}"):
        registry.fetch(version, copies)
    assert [path.name for path in copies.iterdir()] == [".lock"]
    registry._storage.put(place, b"rows")
    verify(version, registry.fetch(version, copies))


def test_copies_of_two_registries_are_kept_apart(
    registry: Registry, options: dict[str, Any], tmp_path: Path
) -> None:
    ours = publish(registry, tmp_path / "scratch", size=10)
    theirs_registry = Registry(Storage(options), f"{registry.uri}-other")
    theirs = publish(theirs_registry, tmp_path / "scratch", size=20)
    assert ours.number == theirs.number
    for one, version in ((registry, ours), (theirs_registry, theirs)):
        verify(version, one.fetch(version, tmp_path / "copies"))


def test_threads_that_fetch_the_same_version_download_it_once(
    registry: Registry, other: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = publish(registry, tmp_path / "scratch", size=1_000_000)
    downloads: list[str] = []
    real = Storage.stream

    def counted(self: Storage, file: Any, start: int = 0) -> Iterator[bytes]:
        downloads.append(file.uri)
        return real(self, file, start)

    monkeypatch.setattr(Storage, "stream", counted)
    folders: list[Path] = []
    threads = [
        threading.Thread(target=lambda one=one: folders.append(one.fetch(version, tmp_path / "copies")))
        for one in (registry, other, registry, other)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(folders) == 4
    assert len(set(folders)) == 1
    assert len(downloads) == 2, "one for each file"


# Killed

_CHILD = (
    IMPORT
    + """
import json, os, signal, sys
from pathlib import Path
from clickline.artifacts import version as version_module
from clickline.artifacts.registry import Registry
from clickline.storage.storage import Storage

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

options, place, scratch, moment = json.loads(sys.argv[1]), *sys.argv[2:]
registry = Registry(Storage(options), place)
if moment == "in the middle of a download":
    real = Storage.stream
    def half(self, file, start=0):
        pieces = real(self, file, start)
        if file.uri.endswith("table.bin"):
            yield next(pieces)
            die()
        yield from pieces
    Storage.stream = half
    registry.fetch(registry.version(1), Path(scratch))
draft = registry.draft(scratch=Path(scratch))
(draft.folder / "table.bin").write_bytes(b"new")
(draft.folder / "dense.onnx").write_bytes(b"network")
if moment == "between two uploads":
    put = Storage.put
    Storage.put = lambda self, uri, data: die() if uri.endswith("table.bin") else put(self, uri, data)
if moment == "before the manifest":
    version_module.manifest_bytes = die
draft.commit(version_manifest())
raise SystemExit("not killed")
"""
)


def kill(registry: Registry, options: dict[str, Any], scratch: Path, moment: str) -> None:
    arguments = [json.dumps(options), registry.uri, str(scratch), moment]
    child = subprocess.run(
        [sys.executable, "-c", _CHILD, *arguments], check=False, timeout=60, capture_output=True
    )
    assert child.returncode == -signal.SIGKILL, child.stderr.decode()


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["between two uploads", "before the manifest"])
def test_publisher_killed_while_uploading(
    registry: Registry, options: dict[str, Any], tmp_path: Path, moment: str
) -> None:
    scratch = tmp_path / "scratch"
    publish(registry, scratch)
    kill(registry, options, scratch, moment)
    assert "versions/000000002/dense.onnx" in keys(registry), (
        "killed too early for this test to prove anything"
    )
    assert [version.number for version in registry.versions()] == [1]
    assert len(list(scratch.iterdir())) == 1
    assert registry.gc(1) == []
    assert list(scratch.iterdir()) == []
    assert not [key for key in keys(registry) if "000000002/" in key]
    assert publish(registry, scratch).number == 3


@pytest.mark.slow
def test_server_killed_while_fetching(registry: Registry, options: dict[str, Any], tmp_path: Path) -> None:
    version = publish(registry, tmp_path / "scratch", size=9_000_000)
    copies = tmp_path / "copies"
    kill(registry, options, copies, "in the middle of a download")
    left = [path for path in copies.iterdir() if path.is_dir()]
    assert len(left) == 1
    assert left[0].name.startswith(".000000001-")
    verify(version, registry.fetch(version, copies))
    registry.remove_copies(copies, [version])
    assert len([path for path in copies.iterdir() if path.is_dir()]) == 1


def test_forged_claim_cannot_make_gc_remove_other_folders(registry: Registry, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    with registry.draft(scratch=tmp_path):
        place = f"{registry.uri}/drafts/000000001.json"
        claim = json.loads(registry._storage.read(place))
    forged = {**claim, "scratch": str(precious), "process": "999999999 1", "since": time.time()}
    registry._storage.put(place, json.dumps(forged).encode())
    assert registry.garbage(1).drafts == (1,)
    registry.gc(1)
    assert precious.is_dir()
