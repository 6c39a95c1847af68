"""Storage.create: of several callers one wins, and what it wrote is seen whole."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from clickline.errors import StorageError
from clickline.storage.storage import Storage
from servers.web import Web
from servers.webhdfs import NameNode

from .conftest import Store


def test_the_first_wins_and_its_bytes_stay(store: Store) -> None:
    uri = store.storage.join(store.base, "deep", "1.json")
    assert store.storage.create(uri, b"first") is True
    assert store.storage.create(uri, b"second") is False
    assert store.storage.read(uri) == b"first"
    assert store.storage.names(store.storage.join(store.base, "deep")) == ["1.json"], "nothing else is left"
    store.storage.delete(uri)
    assert store.storage.create(uri, b"third") is True
    assert store.storage.read(uri) == b"third"


def test_what_put_wrote_is_not_created_again(store: Store) -> None:
    uri = store.storage.join(store.base, "1.json")
    store.storage.put(uri, b"")
    assert store.storage.create(uri, b"later") is False
    assert store.storage.read(uri) == b""


@pytest.mark.parametrize("kind", ["folder", "memory"])
def test_threads_that_create_the_same_name(request: pytest.FixtureRequest, kind: str) -> None:
    store: Store = request.getfixturevalue(kind)
    wins: list[tuple[int, int]] = []
    ready = threading.Barrier(8)

    def race(racer: int) -> None:
        for name in range(40):
            ready.wait(30)
            if store.storage.create(f"{store.base}/{name}", f"{racer}".encode()):
                wins.append((name, racer))

    racers = [threading.Thread(target=race, args=(racer,)) for racer in range(8)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join(60)
    assert sorted(name for name, _ in wins) == list(range(40))
    for name, winner in wins:
        assert store.storage.read(f"{store.base}/{name}") == f"{winner}".encode()


# Killed in the middle: the child dies with its bytes written and the name not yet made

_CREATE_AND_DIE = """
import os, signal, sys
from pathlib import Path
from clickline.storage.storage import Storage
Path.hardlink_to = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
Storage().create(sys.argv[1], b"new" * 1000)
"""


def test_local_create_killed_before_its_link(folder: Store) -> None:
    uri = f"{folder.base}/1.json"
    child = subprocess.run([sys.executable, "-c", _CREATE_AND_DIE, uri], check=False, timeout=60)
    assert child.returncode == -signal.SIGKILL
    assert folder.storage.describe(uri) is None
    [left] = Path(folder.base).iterdir()
    assert left.stat().st_size == 3000, "the child was killed too early for this test to mean anything"
    assert folder.storage.list(f"{folder.base}/*") == []
    assert folder.storage.create(uri, b"mine") is True


def test_webhdfs_create_killed_before_its_rename(hdfs: Store, name_node: NameNode) -> None:
    uri = f"{hdfs.base}/1.json"
    name_node.held = "RENAME"
    child = subprocess.Popen([sys.executable, "-c", _CREATE_AND_DIE, uri])
    try:
        assert name_node.holding.wait(30)
    finally:
        child.kill()
        child.wait()
    assert any(len(content) == 3000 for content in name_node.files.values()), "all bytes had been sent"
    assert hdfs.storage.describe(uri) is None
    assert hdfs.storage.list(f"{hdfs.base}/*") == []


# Disks and stores that cannot


def test_a_disk_without_hard_links_is_a_clear_error(folder: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(Path, "hardlink_to", no_links)
    with pytest.raises(
        StorageError,
        match=r"1\.json: .* only if none exists, but this disk has no hard links\. Use another",
    ):
        folder.storage.create(f"{folder.base}/1.json", b"x")
    assert list(Path(folder.base).iterdir()) == []


def test_a_link_whose_answer_was_lost_counts(folder: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS sends the request again and is told that the name exists, which it does by the first one."""
    link = Path.hardlink_to

    def twice(self: Path, target: Path) -> None:
        link(self, target)
        link(self, target)

    monkeypatch.setattr(Path, "hardlink_to", twice)
    assert folder.storage.create(f"{folder.base}/1.json", b"x") is True
    assert folder.storage.create(f"{folder.base}/1.json", b"y") is False


def test_a_folder_that_may_not_be_written(folder: Store) -> None:
    Path(folder.base).mkdir()
    Path(folder.base).chmod(0o500)
    try:
        if os.access(folder.base, os.W_OK):
            pytest.skip("this user may write everywhere")
        with pytest.raises(StorageError, match="access was refused"):
            folder.storage.create(f"{folder.base}/1.json", b"x")
    finally:
        Path(folder.base).chmod(0o700)


def test_http_creates_nothing(web: Web) -> None:
    with pytest.raises(StorageError, match="are read-only"):
        Storage().create(f"{web.url}/a", b"x")


def test_hdfs_names_the_way_that_works() -> None:
    with pytest.raises(
        StorageError, match=r"hdfs:// does not support that\. Use webhdfs:// for the same cluster"
    ):
        Storage().create("hdfs://name-node/a", b"x")


def test_webhdfs_create_keeps_the_first_also_at_a_gateway(hdfs: Store, name_node: NameNode) -> None:
    name_node.overwrites = False
    assert hdfs.storage.create(f"{hdfs.base}/1.json", b"1") is True
    assert hdfs.storage.create(f"{hdfs.base}/1.json", b"2") is False
    assert name_node.files == {"/logs/1.json": b"1"}


# S3


def test_s3_that_words_its_refusal_differently(s3: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only Amazon names the condition that failed; s3fs takes the answer of others for a bad argument."""
    uri = f"{s3.base}/1.json"
    assert s3.storage.create(uri, b"1") is True
    filesystem = s3.storage._drivers.open(uri)

    def refuse(*_: Any, **__: Any) -> None:
        cause = RuntimeError()
        cause.response = {"Error": {"Code": "PreconditionFailed"}}  # type: ignore[attr-defined]
        raise OSError(errno.EINVAL, "At least one of the pre-conditions did not hold") from cause

    monkeypatch.setattr(filesystem, "pipe_file", refuse)
    assert s3.storage.create(uri, b"2") is False


def test_s3_that_asks_to_try_again(s3: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = f"{s3.base}/1.json"
    filesystem = s3.storage._drivers.open(uri)
    real, asked = filesystem.pipe_file, []

    def busy_twice(*arguments: Any, **options: Any) -> Any:
        asked.append(arguments)
        if len(asked) > 2:
            return real(*arguments, **options)
        cause = RuntimeError()
        cause.response = {"Error": {"Code": "ConditionalRequestConflict"}}  # type: ignore[attr-defined]
        raise OSError(errno.EIO, "a conflicting operation is in progress") from cause

    monkeypatch.setattr(filesystem, "pipe_file", busy_twice)
    assert s3.storage.create(uri, b"1") is True
    assert s3.storage.read(uri) == b"1"


def test_s3_that_ignores_the_condition_is_detected(s3_options: Any, s3: Store) -> None:
    storage = Storage(*s3_options)
    filesystem = storage._drivers.open(s3.base)
    real = filesystem.pipe_file
    filesystem.pipe_file = lambda uri, data, mode: real(uri, data)
    with pytest.raises(StorageError, match=r"ignores If-None-Match and overwrites\. Use a store with"):
        storage.create(f"{s3.base}/1.json", b"1")


def test_s3_bucket_that_is_missing(s3: Store) -> None:
    with pytest.raises(StorageError, match="no such file, folder or bucket"):
        s3.storage.create("s3://no-such-bucket-here/1.json", b"x")
