"""Hours that arrive in a real object store, over the wire, and a home in one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from clickline.config import load_config
from clickline.data.prepare.hour_dataset import prepare_hour, prune_hours
from clickline.errors import HourNotReady, StorageError
from clickline.progress import Progress
from clickline.storage.log_files import hour_is_complete
from clickline.storage.storage import Storage
from servers.s3 import s3_server

FIRST = 20454 * 24


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3_server() as url:
        yield url


class Bucket:
    """A project whose hours arrive in S3."""

    def __init__(self, project, name: str, endpoint: str, criteo_line) -> None:
        import s3fs

        client = {"endpoint_url": endpoint}
        s3fs.S3FileSystem(client_kwargs=client, skip_instance_cache=True).makedirs(name, exist_ok=True)
        self.options = {"s3": {"client_kwargs": client}}
        self.storage = Storage(self.options)
        self.uri = f"s3://{name}"
        self.pattern = f"{self.uri}/{{date}}/{{hour}}/*.tsv"
        self.line = criteo_line
        self.project = project
        dates = {"from": "20260101/00"}
        project.configure({"train": self.pattern, "dates": dates}, storage={"options": self.options})

    def arrive(self, hour: int, rows: int = 50, donefile: bool = True) -> None:
        text = "".join(self.line(row % 2, 3 * row + hour) for row in range(rows))
        folder = f"{self.uri}/20260101/{hour:02d}"
        self.storage.put(f"{folder}/part-0.tsv", text.encode())
        if donefile:
            self.storage.put(f"{folder}/donefile", b"")

    def config(self, *overrides: str):
        return load_config(self.project.folder / "clickline.yaml", overrides)

    def prepare(self, hour: int, *overrides: str):
        return prepare_hour(self.config(*overrides), FIRST + hour, None, Progress())


@pytest.fixture
def bucket(project, endpoint, criteo_line, monkeypatch) -> Bucket:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    return Bucket(project, f"logs-{uuid4().hex}", endpoint, criteo_line)


def test_an_hour_is_prepared_when_its_donefile_is_there(bucket):
    bucket.arrive(0, donefile=False)
    with pytest.raises(HourNotReady):
        bucket.prepare(0)
    bucket.arrive(0)
    assert bucket.prepare(0).dataset.splits["train"].rows == 50
    assert bucket.prepare(0).reused
    bucket.arrive(0, rows=60)
    assert bucket.prepare(0).dataset.splits["train"].rows == 60


@pytest.mark.slow
def test_the_same_hour_in_a_home_in_a_store(bucket):
    bucket.arrive(0)
    bucket.arrive(1, rows=0)
    home = f"home={bucket.uri}/home"
    here, there = bucket.prepare(0), bucket.prepare(0, home)
    assert bucket.prepare(0, home).reused
    (shard,) = there.dataset.splits["train"].shards
    stored = bucket.storage.read(Storage.join(there.dataset.folder, shard.file))
    assert stored == Path(here.dataset.folder, shard.file).read_bytes()
    assert sorted(bucket.storage.names(there.dataset.folder)) == [
        "manifest.json",
        "resolved.yaml",
        "train-00000.parquet",
    ]
    assert bucket.prepare(1, home).dataset.splits["train"].rows == 0
    assert not list((bucket.project.folder / "cache-work").glob("*"))
    prune_hours(bucket.config(home), {FIRST + 1})
    assert bucket.storage.names(f"{bucket.uri}/home/hours") == ["20260101-01"]


def test_checking_an_hour_takes_one_or_two_requests(bucket, monkeypatch):
    """However many hours the bucket holds: none of them is listed."""
    for hour in range(3):
        bucket.arrive(hour)
    asked: list[str] = []
    import s3fs

    for name in ("_call_s3", "call_s3"):
        original = getattr(s3fs.S3FileSystem, name, None)
        if original is None:
            continue

        def spy(self, method, *args, _original=original, **options):
            asked.append(f"{method} {options.get('Prefix') or options.get('Key')}")
            return _original(self, method, *args, **options)

        monkeypatch.setattr(s3fs.S3FileSystem, name, spy)
    listed: list[str] = []
    children = Storage._children

    def watched(self, folder):
        listed.append(folder)
        return children(self, folder)

    monkeypatch.setattr(Storage, "_children", watched)
    assert hour_is_complete(bucket.storage, [bucket.pattern], "donefile", FIRST + 2)
    assert not hour_is_complete(bucket.storage, [bucket.pattern], "donefile", FIRST + 3)
    assert listed == []
    assert 2 <= len(asked) <= 4
    assert all("20260101/0" in question for question in asked), asked
    bucket.prepare(2)
    assert {folder.split("/", 3)[3] for folder in listed if "hours" not in folder} == {"20260101/02"}


def test_a_store_that_does_not_answer_is_an_error_and_leaves_nothing(bucket, monkeypatch):
    bucket.arrive(0)
    gone = {
        "s3": {
            "client_kwargs": {"endpoint_url": "http://127.0.0.1:9"},
            "config_kwargs": {"retries": {"max_attempts": 0}},
        }
    }
    storage = Storage(gone)
    with pytest.raises(StorageError):
        hour_is_complete(storage, [bucket.pattern], "donefile", FIRST)

    stream = Storage.stream

    def break_off(self, file, start=0):
        yield next(stream(self, file, start))[:10]
        raise StorageError("the line went dead")

    with monkeypatch.context() as patch:
        patch.setattr(Storage, "stream", break_off)
        with pytest.raises(StorageError, match="went dead"):
            bucket.prepare(0)
    assert not list(bucket.project.folder.glob(".clickline/**/manifest.json"))
    assert bucket.prepare(0).dataset.splits["train"].rows == 50
