"""The contract every store keeps, and what is special about each."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clickline.errors import StorageError
from clickline.storage.storage import Storage
from servers.web import Web
from servers.webhdfs import NameNode

from .conftest import Store

Filled = Callable[[Store, dict[str, bytes]], None]


# Every store


@pytest.mark.parametrize("content", [b"", b"x", os.urandom(3_000_000)], ids=["empty", "one byte", "3 MB"])
def test_put_then_read(store: Store, content: bytes) -> None:
    uri = store.storage.join(store.base, "deep", "a.tsv")
    store.storage.put(uri, content)
    assert store.storage.read(uri) == content
    [file] = store.storage.list(uri)
    assert (file.uri, file.size) == (uri, len(content))
    assert file == store.storage.describe(uri)


def test_a_put_path_is_uploaded_and_gone(store: Store, tmp_path: Path) -> None:
    made = tmp_path / "made"
    made.write_bytes(b"content")
    uri = store.storage.join(store.base, "a.tsv")
    store.storage.put(uri, made)
    assert store.storage.read(uri) == b"content"
    assert not made.exists()


def test_put_replaces_and_the_version_changes(store: Store) -> None:
    uri = store.storage.join(store.base, "a.tsv")
    store.storage.put(uri, b"old")
    [before] = store.storage.list(uri)
    store.storage.put(uri, b"new")
    [after] = store.storage.list(uri)
    assert store.storage.read(uri) == b"new"
    assert before.version != after.version


def test_the_version_is_the_same_by_name_and_by_glob(store: Store, filled: Filled) -> None:
    filled(store, {"a.tsv": b"content"})
    base = store.base
    assert store.storage.list(f"{base}/a.tsv") == store.storage.list(f"{base}/*.tsv")


def test_stream_starts_anywhere(store: Store) -> None:
    content = os.urandom(9_000_000)  # more than one piece
    uri = store.storage.join(store.base, "a.tsv")
    store.storage.put(uri, content)
    [file] = store.storage.list(uri)
    for start in (0, 1, 8 * 2**20, len(content) - 1, len(content)):
        assert b"".join(store.storage.stream(file, start)) == content[start:]


def test_globs(store: Store, filled: Filled) -> None:
    filled(
        store,
        {
            "a1.tsv": b"",
            "a2.tsv": b"",
            "b1.gz": b"",
            "sub/a3.tsv": b"",
            "sub/deep/a4.tsv": b"",
            "_SUCCESS": b"",
            ".a1.tsv.crc": b"",
            "_temporary/a5.tsv": b"",
        },
    )

    def found(pattern: str) -> list[str]:
        files = store.storage.list(store.storage.join(store.base, pattern))
        return [file.uri.removeprefix(store.base + "/") for file in files]

    assert found("*.tsv") == ["a1.tsv", "a2.tsv"]
    assert found("a?.tsv") == ["a1.tsv", "a2.tsv"]
    assert found("[ab]1.*") == ["a1.tsv", "b1.gz"]
    assert found("*") == ["a1.tsv", "a2.tsv", "b1.gz"]
    assert found("*/a3.tsv") == ["sub/a3.tsv"]
    assert found("**/*.tsv") == ["a1.tsv", "a2.tsv", "sub/a3.tsv", "sub/deep/a4.tsv"]
    assert found("s*/**") == ["sub/a3.tsv", "sub/deep/a4.tsv"]
    assert found("**/deep/*") == ["sub/deep/a4.tsv"]
    assert found("_*") == ["_SUCCESS"]
    assert found(".*") == [".a1.tsv.crc"]
    assert found("_SUCCESS") == ["_SUCCESS"]
    assert found("_temporary/*") == ["_temporary/a5.tsv"]
    assert found("sub") == []
    assert found("*.parquet") == []
    assert found("absent/*") == []
    assert found("a1.tsv/*") == []
    assert store.storage.folders(f"{store.base}/*") == [f"{store.base}/sub"]
    assert store.storage.folders(f"{store.base}/sub") == [f"{store.base}/sub"]
    assert store.storage.folders(f"{store.base}/a1.tsv") == []
    assert store.storage.names(f"{store.base}/sub") == ["a3.tsv", "deep"]
    assert store.storage.names(f"{store.base}/absent") == []


def test_wildcard_characters_in_a_folder_name_are_escaped(store: Store, filled: Filled) -> None:
    filled(store, {"a[1] b*/x.tsv": b"", "a[1] b*/x1.tsv": b"", "a[1] b*/sub/y.tsv": b"", "a1 bb/z.tsv": b""})
    folder = store.storage.join(store.base, "a[1] b*")

    def found(pattern: str) -> list[str]:
        files = store.storage.list(Storage.pattern_in(folder, pattern))
        return [file.uri.removeprefix(folder + "/") for file in files]

    assert found("*.tsv") == ["x.tsv", "x1.tsv"]
    assert found("x?.tsv") == ["x1.tsv"]
    assert found("x.tsv") == ["x.tsv"]
    assert found("**/*.tsv") == ["sub/y.tsv", "x.tsv", "x1.tsv"]
    assert found("s*/y.tsv") == ["sub/y.tsv"]
    assert found("absent.tsv") == []
    assert store.storage.folders(Storage.pattern_in(folder, "sub")) == [f"{folder}/sub"]
    deeper = store.storage.join(store.base, "*", Storage.pattern_in("a[1] b*", "*.tsv"))
    assert store.storage.list(deeper) == []  # a glob in front of an escaped name
    assert len(store.storage.list(store.storage.join(store.base, "*[*]", "sub", "*"))) == 1


def test_a_new_file_is_seen_at_once(store: Store, filled: Filled) -> None:
    assert store.storage.list(f"{store.base}/*") == []
    assert store.storage.describe(f"{store.base}/done") is None
    filled(store, {"done": b""})
    assert len(store.storage.list(f"{store.base}/*")) == 1
    assert store.storage.describe(f"{store.base}/done") is not None


def test_delete_takes_a_file_or_a_folder_and_leaves_the_neighbours(store: Store, filled: Filled) -> None:
    filled(store, {"a": b"1", "sub/b": b"2", "sub/deep/c": b"3", "subtle": b"4"})
    store.storage.delete(f"{store.base}/a")
    store.storage.delete(f"{store.base}/sub")
    store.storage.delete(f"{store.base}/absent")
    assert [file.uri for file in store.storage.list(f"{store.base}/**")] == [f"{store.base}/subtle"]


def test_reading_a_missing_file_or_a_folder_is_an_error(store: Store, filled: Filled) -> None:
    filled(store, {"sub/a": b"1"})
    with pytest.raises(
        StorageError, match=r"absent: there is no such file, folder or bucket\. Check the path"
    ):
        store.storage.read(f"{store.base}/absent")
    with pytest.raises(StorageError, match="sub: this is a folder, a file is needed"):
        store.storage.read(f"{store.base}/sub")


def test_a_file_shorter_than_its_size_is_an_error(store: Store, filled: Filled) -> None:
    filled(store, {"a": b"12345"})
    [file] = store.storage.list(f"{store.base}/a")
    with pytest.raises(
        StorageError, match=r"/a: 5 bytes arrived, 9 were expected.* run again when it is complete"
    ):
        list(store.storage.stream(replace(file, size=9)))


# A torn put is never visible: the child is killed after its write and before its rename (or its upload's end)

_PUT_AND_DIE = """
import os, signal, sys
from pathlib import Path
from clickline.storage.storage import Storage
Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
Storage({}, None).put(sys.argv[1], b"new" * 1_000_000)
"""


def test_local_put_killed_between_write_and_rename(folder: Store) -> None:
    uri = f"{folder.base}/a.tsv"
    folder.storage.put(uri, b"old")
    child = subprocess.run([sys.executable, "-c", _PUT_AND_DIE, uri], check=False)
    assert child.returncode == -signal.SIGKILL
    assert folder.storage.read(uri) == b"old"
    assert [file.uri for file in folder.storage.list(f"{folder.base}/**")] == [uri]
    leftovers = [path for path in Path(folder.base).iterdir() if path.name != "a.tsv"]
    assert len(leftovers) == 1, "the child was killed too early for this test to mean anything"


def test_webhdfs_put_killed_before_its_rename(hdfs: Store, name_node: NameNode) -> None:
    uri = f"{hdfs.base}/a.tsv"
    hdfs.storage.put(uri, b"old")
    name_node.held = "RENAME"
    child = subprocess.Popen([sys.executable, "-c", _PUT_AND_DIE, uri])
    assert name_node.holding.wait(30)
    child.kill()
    child.wait()
    assert any(len(content) == 3_000_000 for content in name_node.files.values()), "all bytes had been sent"
    assert hdfs.storage.read(uri) == b"old"
    assert [file.uri for file in hdfs.storage.list(f"{hdfs.base}/*")] == [uri]


def test_a_failed_local_put_leaves_nothing(folder: Store) -> None:
    Path(folder.base).mkdir()
    (Path(folder.base) / "a.tsv").mkdir()  # a folder is in the way of the rename
    with pytest.raises(StorageError, match=r"a\.tsv: this is a folder"):
        folder.storage.put(f"{folder.base}/a.tsv", b"x")
    assert [path.name for path in Path(folder.base).iterdir()] == ["a.tsv"]


# Local


def test_file_uris_are_local(folder: Store, filled: Filled) -> None:
    filled(folder, {"a.tsv": b"x"})
    [file] = folder.storage.list(f"file://{folder.base}/*.tsv")
    assert file.uri == f"{folder.base}/a.tsv"
    assert Storage.is_local(f"file://{folder.base}")
    assert Storage.is_local("data/a.tsv")
    assert not Storage.is_local("s3://b/a")
    assert folder.storage.read(f"file://{folder.base}/a.tsv") == b"x"


def test_relative_paths_stay_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    storage = Storage({}, None)
    storage.put("data/a.tsv", b"x")
    storage.put("b.tsv", b"x")
    assert [file.uri for file in storage.list("data/*")] == ["data/a.tsv"]
    assert [file.uri for file in storage.list("*.tsv")] == ["b.tsv"]
    assert [file.uri for file in storage.list("**/*.tsv")] == ["b.tsv", "data/a.tsv"]


def test_a_local_file_with_glob_signs_in_its_name_is_found(folder: Store, filled: Filled) -> None:
    filled(folder, {"a[1].tsv": b"x", "a1.tsv": b"y"})
    assert [file.uri for file in folder.storage.list(f"{folder.base}/a[1].tsv")] == [
        f"{folder.base}/a[1].tsv"
    ]


def test_a_file_with_wildcard_characters_is_found_in_such_a_folder(folder: Store, filled: Filled) -> None:
    filled(folder, {"[x]/a[1].tsv": b"x", "[x]/a1.tsv": b"y"})
    pattern = Storage.pattern_in(f"{folder.base}/[x]", "a[1].tsv")
    assert [file.uri for file in folder.storage.list(pattern)] == [f"{folder.base}/[x]/a[1].tsv"]


def test_links_are_followed_but_not_in_circles(folder: Store, filled: Filled) -> None:
    filled(folder, {"real/a.tsv": b"x"})
    (Path(folder.base) / "linked").symlink_to("real")
    (Path(folder.base) / "real" / "loop").symlink_to("..")
    assert [f.uri for f in folder.storage.list(f"{folder.base}/linked/*.tsv")] == [
        f"{folder.base}/linked/a.tsv"
    ]
    assert [f.uri for f in folder.storage.list(f"{folder.base}/**/*.tsv")] == [f"{folder.base}/real/a.tsv"]


def test_a_put_file_has_the_usual_mode(folder: Store) -> None:
    folder.storage.put(f"{folder.base}/a", b"x")
    plain = Path(folder.base) / "plain"
    plain.write_bytes(b"x")
    assert (Path(folder.base) / "a").stat().st_mode == plain.stat().st_mode


def test_a_path_from_another_disk_is_copied(folder: Store) -> None:
    elsewhere = Path("/dev/shm")
    if not elsewhere.is_dir() or elsewhere.stat().st_dev == Path(folder.base).parent.stat().st_dev:
        pytest.skip("there is no second file system here to move a file from")
    made = elsewhere / f"clickline-test-{os.getpid()}"
    made.write_bytes(b"content")
    folder.storage.put(f"{folder.base}/a", made)
    assert folder.storage.read(f"{folder.base}/a") == b"content"
    assert not made.exists()


@pytest.mark.parametrize(
    ("parts", "joined"),
    [
        (("data", "a", "b"), "data/a/b"),
        (("/", "a"), "/a"),
        (("", "a"), "a"),
        (("s3://bucket/", "a"), "s3://bucket/a"),
        (("memory://", "a"), "memory://a"),
    ],
)
def test_join(parts: tuple[str, ...], joined: str) -> None:
    assert Storage.join(*parts) == joined


# HTTP


@pytest.mark.parametrize("ranges", [True, False])
def test_http_files_are_read_from_any_byte(web: Web, ranges: bool) -> None:
    web.ranges = ranges  # python -m http.server, for one, knows no Range
    web.files["/a.tsv"] = content = os.urandom(500_000)
    storage = Storage({}, None)
    [file] = storage.list(f"{web.url}/a.tsv")
    assert (file.size, storage.read(file.uri)) == (len(content), content)
    for start in (1, 123_456, len(content) - 1):
        assert b"".join(storage.stream(file, start)) == content[start:]


def test_http_without_an_etag_still_has_a_version(web: Web) -> None:
    web.etags = False
    web.files["/a.tsv"] = b"123"
    [file] = Storage({}, None).list(f"{web.url}/a.tsv")
    assert file.version == "3 bytes"


def test_http_glob_over_folder_pages(web: Web) -> None:
    web.lists_folders = True
    web.files = {"/logs/a.tsv": b"1", "/logs/b.tsv": b"22", "/logs/c.gz": b"3", "/logs/sub/d.tsv": b"4"}
    storage = Storage({}, None)
    files = storage.list(f"{web.url}/logs/*.tsv")
    assert [(file.uri, file.size) for file in files] == [
        (f"{web.url}/logs/a.tsv", 1),
        (f"{web.url}/logs/b.tsv", 2),
    ]
    assert [file.uri for file in storage.list(f"{web.url}/logs/*/d.tsv")] == [f"{web.url}/logs/sub/d.tsv"]


def test_http_glob_on_a_server_that_lists_nothing(web: Web) -> None:
    web.files = {"/logs/a.tsv": b"1"}
    with pytest.raises(StorageError, match=r"does not list this folder, .* Give the full URL of each file"):
        Storage({}, None).list(f"{web.url}/logs/*.tsv")


def test_http_absent_is_not_the_same_as_dead(web: Web) -> None:
    storage = Storage({}, None)
    assert storage.list(f"{web.url}/absent.tsv") == []
    web.status = 503
    with pytest.raises(StorageError, match="answered with status 503"):
        storage.list(f"{web.url}/absent.tsv")
    web.status = 403
    with pytest.raises(StorageError, match="access was refused"):
        storage.list(f"{web.url}/absent.tsv")
    with pytest.raises(StorageError, match=r"did not answer .* Check the address and the network"):
        storage.list("http://127.0.0.1:1/a.tsv")


def test_http_cut_short(web: Web) -> None:
    web.files["/a.tsv"] = b"x" * 100_000
    web.cut_after = 60_000
    with pytest.raises(StorageError, match=r"a\.tsv: .*(did not answer|were expected)"):
        Storage({}, None).read(f"{web.url}/a.tsv")


def test_http_is_only_read(web: Web) -> None:
    storage = Storage({}, None)
    with pytest.raises(StorageError, match="are read-only"):
        storage.put(f"{web.url}/a", b"x")
    with pytest.raises(StorageError, match="are read-only"):
        storage.delete(f"{web.url}/a")


# WebHDFS


def test_webhdfs_gateway_that_cannot_rename_over(hdfs: Store, name_node: NameNode) -> None:
    name_node.overwrites = False
    hdfs.storage.put(f"{hdfs.base}/a", b"old")
    hdfs.storage.put(f"{hdfs.base}/a", b"new")
    assert hdfs.storage.read(f"{hdfs.base}/a") == b"new"
    assert list(name_node.files) == ["/logs/a"]


def test_webhdfs_error_page_is_not_taken_for_content(hdfs: Store, name_node: NameNode) -> None:
    hdfs.storage.put(f"{hdfs.base}/a", b"x" * 10)
    name_node.failing_reads = True
    with pytest.raises(StorageError, match="answered with status 500"):
        hdfs.storage.read(f"{hdfs.base}/a")


def test_webhdfs_refusal(hdfs: Store, name_node: NameNode) -> None:
    hdfs.storage.put(f"{hdfs.base}/secret/a", b"x")
    name_node.forbidden = "/logs/secret"
    with pytest.raises(StorageError, match=r"access was refused \(PermissionError: Permission denied"):
        hdfs.storage.list(f"{hdfs.base}/**")
    with pytest.raises(StorageError, match="access was refused"):
        hdfs.storage.put(f"{hdfs.base}/secret/b", b"x")


# S3


def test_s3_bucket_that_does_not_exist(s3: Store) -> None:
    assert s3.storage.list("s3://no-such-bucket-here/*") == []
    with pytest.raises(StorageError, match="no such file, folder or bucket"):
        s3.storage.put("s3://no-such-bucket-here/a", b"x")


def test_s3_file_put_by_another_process_is_seen_at_once(s3: Store, s3_options: Any) -> None:
    s3.storage.put(f"{s3.base}/a", b"1")
    assert len(s3.storage.list(f"{s3.base}/*")) == 1
    Storage(*s3_options).put(f"{s3.base}/b", b"1")
    assert len(s3.storage.list(f"{s3.base}/*")) == 2


def test_s3_version_is_the_etag(s3: Store) -> None:
    s3.storage.put(f"{s3.base}/a", b"hello")
    [file] = s3.storage.list(f"{s3.base}/a")
    assert file.version == "5d41402abc4b2a76b9719d911017c592"  # md5 of hello


def test_a_file_that_is_replaced_meanwhile_is_read_whole(tmp_path: Path) -> None:
    """The look and the reading are two steps; a claim that is renewed between them changes its size."""
    storage, place = Storage(), str(tmp_path / "claim.json")
    contents = (b"a" * 100, b"b" * 200)
    storage.put(place, contents[0])
    over = threading.Event()

    def replace() -> None:
        while not over.is_set():
            for content in contents:
                storage.put(place, content)

    writer = threading.Thread(target=replace)
    writer.start()
    try:
        assert {storage.read(place) for _ in range(2000)} <= set(contents)
    finally:
        over.set()
        writer.join()
