"""Remote files are copied once, whole, and never pulled away from under their user."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clickline.errors import CacheFull, StorageError
from clickline.records import SourceFile
from clickline.storage.file_cache import CachePhase, ClearResult, FileCache
from clickline.storage.storage import Storage
from servers.web import Web

from .conftest import Heard, Store

MIB = 2**20


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def cache(directory: Path) -> FileCache:
    return FileCache(directory, 100 * MIB, Storage({}, None))


def _file(web: Web, path: str, content: bytes) -> SourceFile:
    web.files[path] = content
    [file] = Storage({}, None).list(web.url + path)
    return file


def _content(cache: FileCache, file: SourceFile, heard: Heard | None = None) -> bytes:
    with cache.local(file, heard) as path:
        return path.read_bytes()


def _entry(directory: Path) -> Path:
    """The folder of the only copy in the cache."""
    [entry] = (path for path in directory.iterdir() if path.is_dir())
    return entry


# One copy


def test_any_remote_store_is_copied_and_local_files_are_not(store: Store, directory: Path) -> None:
    content = os.urandom(100_000)
    uri = store.storage.join(store.base, "a.gz")
    store.storage.put(uri, content)
    [file] = store.storage.list(uri)
    cache = FileCache(directory, MIB, store.storage)
    with cache.local(file) as path:
        assert path.read_bytes() == content
        assert (str(path) == uri) == store.storage.is_local(uri)
    assert directory.exists() != store.storage.is_local(uri)


def test_a_file_is_downloaded_once_with_progress(web: Web, cache: FileCache, heard: Heard) -> None:
    content = os.urandom(300_000)
    file = _file(web, "/a.gz", content)
    assert _content(cache, file, heard) == content
    assert _content(cache, file, heard) == content
    assert web.gets == ["/a.gz"]
    assert heard.begun == [(f"fetching {web.url}/a.gz", 300_000)]
    assert (heard.advanced, heard.ended, heard.said) == (300_000, 1, [])


def test_another_process_finds_the_copy(web: Web, cache: FileCache, directory: Path) -> None:
    file = _file(web, "/a.gz", b"content")
    _content(cache, file)
    assert _content(FileCache(directory, MIB, Storage({}, None)), file) == b"content"
    assert len(web.gets) == 1


def test_the_manifest_has_the_statistics_and_no_secret(web: Web, cache: FileCache, directory: Path) -> None:
    content = b"content"
    web.files["/a.gz"] = content
    [file] = Storage({}, None).list(f"http://bob:planted@{web.url[7:]}/a.gz?X-Amz-Signature=planted")
    _content(cache, file)
    manifest = json.loads((_entry(directory) / "manifest").read_text())
    created = manifest.pop("created")
    assert manifest == {
        "uri": f"http://***@{web.url[7:]}/a.gz?***",
        "size": len(content),
        "version": hashlib.sha1(content).hexdigest(),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    assert isinstance(created, float)
    for path in directory.rglob("*"):
        assert "planted" not in str(path)
        assert path.is_dir() or b"planted" not in path.read_bytes()


def test_a_corrupt_copy_is_downloaded_again(
    web: Web, cache: FileCache, directory: Path, heard: Heard
) -> None:
    file = _file(web, "/a.gz", b"good")
    _content(cache, file)
    (_entry(directory) / "data").write_bytes(b"evil")  # of the same size
    new_process = FileCache(directory, MIB, Storage({}, None))
    assert _content(new_process, file, heard) == b"good"
    assert heard.said == [f"the cached copy of {web.url}/a.gz is corrupt and is downloaded again"]
    assert len(web.gets) == 2


def test_a_truncated_copy_is_noticed_at_every_use(
    web: Web, cache: FileCache, directory: Path, heard: Heard
) -> None:
    file = _file(web, "/a.gz", b"good")
    _content(cache, file)
    (_entry(directory) / "data").write_bytes(b"go")
    assert _content(cache, file, heard) == b"good"
    assert "corrupt" in heard.said[0]


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"version": 1}'])
def test_a_copy_with_a_damaged_manifest_is_not_used(
    web: Web, cache: FileCache, directory: Path, damage: bytes
) -> None:
    file = _file(web, "/a.gz", b"good")
    _content(cache, file)
    (_entry(directory) / "manifest").write_bytes(damage)
    assert _content(FileCache(directory, MIB, Storage({}, None)), file) == b"good"
    assert len(web.gets) == 2


def test_a_changed_remote_file_is_downloaded_again(web: Web, cache: FileCache, heard: Heard) -> None:
    _content(cache, _file(web, "/a.gz", b"old"))
    assert _content(cache, _file(web, "/a.gz", b"newer"), heard) == b"newer"
    assert heard.said == []  # listed anew: nothing surprising


def test_a_file_that_changed_since_it_was_listed_is_reported(
    web: Web, cache: FileCache, heard: Heard
) -> None:
    listed = _file(web, "/a.gz", b"old")
    web.files["/a.gz"] = b"newer"
    assert _content(cache, listed, heard) == b"newer"
    assert heard.said == [f"{web.url}/a.gz has changed since it was listed; downloading its current content"]
    assert _content(cache, listed, heard) == b"newer"
    assert len(web.gets) == 1


def test_a_file_that_is_gone(web: Web, cache: FileCache) -> None:
    file = _file(web, "/a.gz", b"old")
    del web.files["/a.gz"]
    with pytest.raises(StorageError, match=r"a\.gz: it existed when the input was listed and is gone now"):
        _content(cache, file)


class _Overwritten(Storage):
    """Its file changes after the first bytes have been read."""

    def __init__(self, web: Web) -> None:
        super().__init__({}, None)
        self._web = web

    def stream(self, file: SourceFile, start: int = 0) -> Iterator[bytes]:
        yield from super().stream(file, start)
        self._web.files["/a.gz"] = b"other"


def test_a_file_overwritten_while_it_is_fetched(web: Web, directory: Path) -> None:
    file = _file(web, "/a.gz", b"first")
    with pytest.raises(StorageError, match="overwritten while it was being downloaded"):
        _content(FileCache(directory, MIB, _Overwritten(web)), file)
    assert _content(FileCache(directory, MIB, Storage({}, None)), file) == b"other"


class _FlippedBit(Storage):
    """The network changes a byte."""

    def stream(self, file: SourceFile, start: int = 0) -> Iterator[bytes]:
        for piece in super().stream(file, start):
            yield bytes([piece[0] ^ 1]) + piece[1:]


def test_s3_content_is_compared_with_its_md5(s3: Store, s3_options: Any, directory: Path) -> None:
    s3.storage.put(f"{s3.base}/a", b"content")
    [file] = s3.storage.list(f"{s3.base}/a")
    with pytest.raises(StorageError, match="does not have the checksum that the store announced"):
        _content(FileCache(directory, MIB, _FlippedBit(*s3_options)), file)
    assert _content(FileCache(directory, MIB, s3.storage), file) == b"content"


def test_s3_object_encrypted_with_a_key_has_no_md5(s3: Store, s3_options: Any, directory: Path) -> None:
    filesystem = s3.storage._drivers.open(s3.base)
    filesystem.pipe_file(f"{s3.base}/a", b"content", ServerSideEncryption="aws:kms")
    [file] = s3.storage.list(f"{s3.base}/a")
    # The ETag of such an object is not the MD5 of its content; one changed byte stands in for that.
    assert _content(FileCache(directory, MIB, _FlippedBit(*s3_options)), file) == b"bontent"


def test_s3_upload_in_parts_has_no_md5_and_is_cached_all_the_same(s3: Store, directory: Path) -> None:
    filesystem = s3.storage._drivers.open(s3.base)
    content = os.urandom(6 * MIB)
    with filesystem.open(f"{s3.base}/a", "wb", block_size=5 * MIB) as out:
        out.write(content[: 5 * MIB])
        out.write(content[5 * MIB :])
    [file] = s3.storage.list(f"{s3.base}/a")
    assert "-" in file.version
    assert _content(FileCache(directory, 10 * MIB, s3.storage), file) == content


_USE_WITH_LITTLE_ROOM = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))  # the kernel refuses to let a file grow further
from pathlib import Path
from clickline.errors import StorageError
from clickline.records import SourceFile
from clickline.storage.file_cache import FileCache
from clickline.storage.storage import Storage
try:
    with FileCache(Path(sys.argv[1]), 2**20, Storage({}, None)).local(SourceFile(sys.argv[2], 100_000, sys.argv[3])):
        pass
except StorageError as error:
    sys.stdout.write(str(error))
"""


def test_no_room_while_downloading(web: Web, cache: FileCache, directory: Path) -> None:
    file = _file(web, "/a.gz", b"x" * 100_000)
    command = [sys.executable, "-c", _USE_WITH_LITTLE_ROOM, str(directory), file.uri, file.version]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    entry = _entry(directory)
    assert done.stdout.startswith(
        f"{entry}: the disk is full, or allows no larger file (OSError: File too large)"
    )
    assert "Free some space" in done.stdout
    assert {path.name for path in entry.iterdir()} == {"lock", "plan"}
    assert _content(cache, file) == b"x" * 100_000


def test_too_little_disk_space_is_reported_before_the_download(
    web: Web, cache: FileCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = _file(web, "/a.gz", b"x" * 100_000)
    monkeypatch.setattr(FileCache, "_free_on_disk", lambda _: 50_000)
    with pytest.raises(StorageError, match=r"48\.8 KiB are free and .* needs 97\.7 KiB more\. .* cache\.dir"):
        _content(cache, file)
    assert web.gets == []


def test_a_cache_directory_that_cannot_be_created(web: Web, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    file = _file(web, "/a.gz", b"x")
    with pytest.raises(StorageError, match=r"file/cache"):
        _content(FileCache(tmp_path / "file" / "cache", MIB, Storage({}, None)), file)


# Several processes

_USE = """
import sys
from pathlib import Path
from clickline.records import SourceFile
from clickline.storage.file_cache import FileCache
from clickline.storage.storage import Storage
directory, capacity, uri, size, version = sys.argv[1:]
with FileCache(Path(directory), int(capacity), Storage({}, None)).local(SourceFile(uri, int(size), version)) as path:
    print(len(path.read_bytes()), flush=True)
    sys.stdin.read()  # in use until the parent closes the pipe
"""


class User:
    """A process that has a file in use."""

    def __init__(self, directory: Path, file: SourceFile, capacity: int = 100 * MIB) -> None:
        what = [str(directory), str(capacity), file.uri, str(file.size), file.version]
        self.process = subprocess.Popen(
            [sys.executable, "-c", _USE, *what], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def size(self) -> int:
        """How many bytes the file has for it; waits until it has the file."""
        assert self.process.stdout is not None
        return int(self.process.stdout.readline())

    def leave(self) -> None:
        self.process.communicate(timeout=60)


Users = Callable[..., User]


@pytest.fixture
def user() -> Iterator[Users]:
    users: list[User] = []

    def start(*what: Any) -> User:
        users.append(User(*what))
        return users[-1]

    yield start
    for each in users:
        if each.process.poll() is None:
            each.process.kill()
            each.leave()


def test_two_processes_fetch_one_file_once(web: Web, directory: Path, user: Users) -> None:
    file = _file(web, "/a.gz", os.urandom(200_000))
    web.stop_after = 50_000
    first = user(directory, file)
    assert web.stopped.wait(60)  # the first holds the lock and has part of the file
    second = user(directory, file)
    web.go_on.set()
    assert first.size() == second.size() == 200_000
    assert web.gets == ["/a.gz"]
    assert web.bytes_sent == 200_000


def test_kill_9_in_the_middle_then_resume(
    web: Web, cache: FileCache, directory: Path, heard: Heard, user: Users
) -> None:
    content = os.urandom(5_000_000)
    file = _file(web, "/a.gz", content)
    web.stop_after = 4_000_000
    killed = user(directory, file)
    assert web.stopped.wait(60)
    part_grown = _wait_for_part(directory, 3_000_000)
    killed.process.kill()
    killed.leave()
    assert killed.process.returncode == -signal.SIGKILL
    web.stop_after = None
    web.bytes_sent = 0
    assert cache.status([file]).phase == CachePhase.PARTIAL
    assert cache.status([file]).cached_bytes >= part_grown
    assert _content(cache, file, heard) == content
    assert web.bytes_sent <= len(content) - part_grown
    assert heard.advanced == len(content)


def _wait_for_part(directory: Path, size: int) -> int:
    """How much of the part the child has written, once it is at least `size`."""
    while True:
        grown = sum(path.stat().st_size for path in directory.glob("*/part"))
        if grown >= size:
            return grown
        os.sched_yield()


class _CutsTheConnection(Heard):
    """Lets the server, which has stopped in the middle, close the connection once some bytes have been kept."""

    def __init__(self, web: Web) -> None:
        super().__init__()
        self._web = web
        web.stop_after, web.cut_after = 300_000, 0

    def advance(self, *, rows: int = 0, size: int = 0) -> None:
        super().advance(rows=rows, size=size)
        if self.advanced:
            self._web.go_on.set()


def _fetch_in_vain(web: Web, cache: FileCache, file: SourceFile) -> None:
    with pytest.raises(StorageError, match=r"did not answer|were expected"):
        _content(cache, file, _CutsTheConnection(web))
    web.stop_after = web.cut_after = None
    web.bytes_sent = 0


@pytest.mark.parametrize("ranges", [True, False])
def test_a_broken_connection_is_resumed(web: Web, cache: FileCache, ranges: bool) -> None:
    web.ranges = ranges
    content = os.urandom(500_000)
    file = _file(web, "/a.gz", content)
    _fetch_in_vain(web, cache, file)
    assert _content(cache, file) == content
    assert (web.bytes_sent < len(content)) == ranges


def test_a_partial_download_of_an_older_version_is_discarded(web: Web, cache: FileCache) -> None:
    _fetch_in_vain(web, cache, _file(web, "/a.gz", b"a" * 500_000))
    assert _content(cache, _file(web, "/a.gz", b"b" * 500_000)) == b"b" * 500_000


@pytest.mark.parametrize("kind", ["s3", "hdfs", "memory"])
def test_resume_from_any_store(request: pytest.FixtureRequest, kind: str, directory: Path) -> None:
    store: Store = request.getfixturevalue(kind)
    content = os.urandom(100_000)
    store.storage.put(f"{store.base}/a", content)
    [file] = store.storage.list(f"{store.base}/a")
    cache = FileCache(directory, MIB, store.storage)
    _content(cache, file)
    entry = _entry(directory)
    manifest: dict[str, Any] = json.loads((entry / "manifest").read_text())
    (entry / "manifest").unlink()
    (entry / "data").unlink()
    (entry / "part").write_bytes(content[:40_000])
    (entry / "plan").write_text(json.dumps({name: manifest[name] for name in ("uri", "version", "size")}))
    heard = Heard()
    assert _content(cache, file, heard) == content
    assert heard.advanced == len(content)


# Room


def test_least_recently_used_copies_are_evicted(web: Web, directory: Path) -> None:
    cache = FileCache(directory, 250_000, Storage({}, None))
    old, middle, new = (_file(web, f"/{name}.gz", os.urandom(100_000)) for name in ("a", "b", "c"))
    for age, file in ((300, old), (200, middle)):
        _content(cache, file)
        newest = max(directory.glob("*/manifest"), key=lambda path: path.stat().st_mtime)
        os.utime(newest, (newest.stat().st_mtime - age,) * 2)
    _content(cache, old)  # used again: now `middle` is the oldest
    _content(cache, new)
    phases = [cache.status([file]).phase for file in (old, middle, new)]
    assert phases == [CachePhase.READY, CachePhase.NOT_CACHED, CachePhase.READY]
    assert sum(path.stat().st_size for path in directory.glob("*/data")) <= 250_000
    assert len([path for path in directory.iterdir() if path.is_dir()]) == 2


def test_a_copy_in_use_by_another_process_is_not_evicted(web: Web, directory: Path, user: Users) -> None:
    used = _file(web, "/used.gz", os.urandom(100_000))
    other = _file(web, "/other.gz", os.urandom(100_000))
    cache = FileCache(directory, 150_000, Storage({}, None))
    using = user(directory, used, 150_000)
    assert using.size() == 100_000
    with pytest.raises(
        CacheFull, match=r"there is no room for .*in use by running processes\. Raise cache\.size"
    ):
        _content(cache, other)
    assert cache.clear() == ClearResult(files=0, size=0, in_use=1)
    assert cache.status([used]).phase == CachePhase.READY
    using.leave()
    assert _content(cache, other) == web.files["/other.gz"]
    assert cache.status([used]).phase == CachePhase.NOT_CACHED


def test_a_copy_in_use_by_this_process_is_not_evicted(web: Web, directory: Path) -> None:
    used = _file(web, "/used.gz", os.urandom(100_000))
    other = _file(web, "/other.gz", os.urandom(100_000))
    cache = FileCache(directory, 150_000, Storage({}, None))
    with cache.local(used) as path:
        with pytest.raises(CacheFull, match="in use by running processes"):
            _content(cache, other)
        assert path.read_bytes() == web.files["/used.gz"]
    assert _content(cache, other) == web.files["/other.gz"]


def test_a_download_in_progress_counts_as_used_space(web: Web, directory: Path, user: Users) -> None:
    first = _file(web, "/a.gz", os.urandom(100_000))
    second = _file(web, "/b.gz", os.urandom(100_000))
    web.stop_after = 10_000
    fetching = user(directory, first, 150_000)
    assert web.stopped.wait(60)
    cache = FileCache(directory, 150_000, Storage({}, None))
    assert cache.status([first]).phase == CachePhase.SYNCING
    with pytest.raises(CacheFull, match="in use by running processes"):
        _content(cache, second)
    web.go_on.set()
    assert fetching.size() == 100_000


def test_a_file_larger_than_the_cache(web: Web, directory: Path) -> None:
    file = _file(web, "/a.gz", b"x" * 3 * MIB)
    with pytest.raises(CacheFull) as caught:
        _content(FileCache(directory, 2 * MIB, Storage({}, None)), file)
    assert str(caught.value) == (
        f"{web.url}/a.gz is 3.0 MiB and the cache may hold 2.0 MiB. Raise cache.size, or split the file."
    )
    assert web.gets == []


def test_other_files_in_the_cache_folder_are_left_alone(web: Web, directory: Path) -> None:
    cache = FileCache(directory, 150_000, Storage({}, None))
    others = [directory / "work" / "3f2a" / "data", directory / ("a" * 31) / "data", directory / "notes.txt"]
    for other in others:
        other.parent.mkdir(parents=True, exist_ok=True)
        other.write_bytes(b"x" * 100_000)
    first, second = (_file(web, f"/{name}.gz", os.urandom(100_000)) for name in "ab")
    assert cache.status([first]).available_bytes == 150_000
    assert _content(cache, first) == web.files["/a.gz"]
    assert _content(cache, second) == web.files["/b.gz"]  # evicts the first, and nothing else
    assert cache.clear() == ClearResult(files=1, size=100_000, in_use=0)
    assert [other.stat().st_size for other in others] == [100_000] * 3


# status, warm, clear


def test_status_prefetch_clear(web: Web, cache: FileCache, directory: Path, tmp_path: Path) -> None:
    files = [_file(web, f"/{name}.gz", b"x" * 1000) for name in "abc"]
    before = cache.status(files)
    assert (before.files, before.total_bytes, before.cached_bytes) == (3, 3000, 0)
    assert before.phase == CachePhase.NOT_CACHED
    assert before.available_bytes == 100 * MIB

    _content(cache, files[0])
    some = cache.status(files)
    assert (before.ready_files, before.since, some.ready_files) == (0, None, 1)
    assert some.since is not None and abs(time.time() - some.since) < 60
    assert (some.cached_bytes, some.available_bytes, some.phase) == (
        1000,
        100 * MIB - 1000,
        CachePhase.PARTIAL,
    )

    cache.prefetch(files)
    cache.prefetch(files)
    after = cache.status(files)
    assert (after.cached_bytes, after.ready_files, after.phase) == (3000, 3, CachePhase.READY)
    assert len(web.gets) == 3

    assert cache.clear(files[:1]) == ClearResult(files=1, size=1000, in_use=0)
    assert cache.status(files).phase == CachePhase.PARTIAL
    assert cache.clear(files[:1]) == ClearResult(files=0, size=0, in_use=0)
    assert cache.clear() == ClearResult(files=2, size=2000, in_use=0)
    assert list(directory.glob("*/*")) == []


def test_status_of_local_files(cache: FileCache, folder: Store, directory: Path) -> None:
    folder.storage.put(f"{folder.base}/a", b"1234")
    files = folder.storage.list(f"{folder.base}/a")
    status = cache.status(files)
    assert (status.files, status.total_bytes, status.cached_bytes, status.phase) == (
        1,
        4,
        0,
        CachePhase.LOCAL,
    )
    assert str(status.phase) == "Local"
    cache.prefetch(files)
    assert cache.clear() == ClearResult(0, 0, 0)


def test_prefetch_refuses_files_larger_than_the_cache(web: Web, directory: Path) -> None:
    files = [_file(web, f"/{name}.gz", b"x" * 1000) for name in "abc"]
    with pytest.raises(
        CacheFull, match=r"the 3 files have 2\.9 KiB in total and the cache may hold 2\.0 KiB.*cache\.size"
    ):
        FileCache(directory, 2048, Storage({}, None)).prefetch(files)
    assert web.gets == []
