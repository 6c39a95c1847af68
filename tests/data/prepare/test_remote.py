"""Prepare from and to real stores: S3 over the wire, a cache smaller than the data, no secret left behind."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from clickline.storage.storage import Storage
from servers.s3 import s3_server
from servers.web import web_server

KEY, SECRET = "AKIAPLANTED0KEY", "planted-secret-that-must-not-leak"
CLICKLINE = str(Path(sys.executable).with_name("clickline"))


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3_server() as url:
        yield url


@pytest.fixture
def bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch, criteo_line) -> dict[str, object]:
    """Three hours of gzipped Criteo rows in S3; the options to reach them."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    options = {"s3": {"client_kwargs": {"endpoint_url": endpoint}}}
    import s3fs

    s3fs.S3FileSystem(client_kwargs={"endpoint_url": endpoint}, skip_instance_cache=True).makedirs(
        "logs", exist_ok=True
    )
    storage = Storage(options)
    for hour in range(3):
        text = "".join(criteo_line(row % 2, row * 3 + hour) for row in range(500))
        storage.put(f"s3://logs/20260101/{hour:02d}/part-0.tsv.gz", gzip.compress(text.encode()))
        storage.put(f"s3://logs/20260101/{hour:02d}/donefile", b"")
    return options


HOURS = {"train": "s3://logs/{date}/{hour}/*.gz", "dates": {"from": "20260101/00", "to": "20260101/02"}}


def test_hours_in_s3_are_prepared_and_no_secret_is_left_anywhere(project, bucket, capfd):
    project.configure(HOURS, storage={"options": bucket})
    result = project.prepare()
    assert result.train_rows == 1500
    assert result.dataset.splits["train"].report["hours"] == [20454 * 24, 20454 * 24 + 2]
    assert project.prepare().reused
    for path in project.folder.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert SECRET.encode() not in content, path
            assert KEY.encode() not in content, path
    assert SECRET not in "".join(capfd.readouterr())


@pytest.mark.slow
def test_cache_status_prefetch_and_clear(project, bucket):
    project.configure(HOURS, storage={"options": bucket}, name="ads")

    def cache(*arguments: str) -> str:
        done = subprocess.run(
            [CLICKLINE, "cache", *arguments],
            cwd=project.folder,
            capture_output=True,
            text=True,
            check=False,
            env=dict(os.environ),
        )
        assert done.returncode == 0, done.stderr
        assert SECRET not in done.stdout + done.stderr
        return done.stdout

    header, before = cache("status").splitlines()
    assert header.split("   ")[0].strip() == "NAME"
    wanted = ("FILES", "TOTAL SIZE", "CACHED SIZE", "AVAIL SPACE", "PHASE", "AGE")
    assert [name for name in wanted if name not in header] == []
    assert "NotCached" in before and before.endswith("-") and " 0/3 " in before
    cache("prefetch")
    ready = cache("status").splitlines()[1]
    assert " Ready " in ready and ready.endswith(" s") and " 3/3 " in ready
    (row,) = json.loads(cache("status", "--json"))
    assert (row["files"], row["ready_files"]) == (3, 3)
    assert 0 <= row["age_seconds"] < 600
    cache("clear")
    assert "NotCached" in cache("status").splitlines()[1]


def test_the_cache_may_be_smaller_than_the_data(project, bucket):
    import random

    rng = random.Random(7)
    storage = Storage(bucket)
    for part in range(4):  # text that does not compress, 0.7 MiB a file
        rows = [
            "\t".join(["1"] + [""] * 13 + [f"{rng.getrandbits(64):016x}" for _ in range(26)])
            for _ in range(1500)
        ]
        storage.put(f"s3://logs/big/{part}.tsv", ("\n".join(rows) + "\n").encode())
    cache = {"dir": "cache", "size": "1MiB"}
    project.write(
        "clickline.yaml",
        json.dumps(
            {
                "data": {"train": "s3://logs/big/*.tsv", "shard_size": "256KiB"},
                "cache": cache,
                "storage": {"options": bucket},
            }
        ),
    )
    assert project.prepare().train_rows == 6000
    kept = sum(path.stat().st_size for path in (project.folder / "cache").rglob("*") if path.is_file())
    assert kept < 1.1 * 2**20


@pytest.mark.slow
def test_a_dataset_can_live_in_s3_and_is_the_same_there(project, bucket):
    project.configure(HOURS, storage={"options": bucket})
    local = project.prepare()
    remote = project.prepare("home=s3://logs/home")
    storage = Storage(bucket)
    for shard in remote.dataset.splits["train"].shards:
        here = Path(local.dataset.folder, shard.file).read_bytes()
        assert storage.read(Storage.join(remote.dataset.folder, shard.file)) == here
    assert project.prepare("home=s3://logs/home").reused


@pytest.mark.slow
def test_a_remote_home_with_a_small_cache_and_a_remote_source(project, bucket):
    cache = {"dir": "cache", "size": "1MiB"}
    text = json.dumps(
        {"data": HOURS, "cache": cache, "storage": {"options": bucket}, "home": "s3://logs/small"}
    )
    project.write("clickline.yaml", text)
    assert project.prepare().train_rows == 1500
    assert not list((project.folder / "cache-work").glob("*"))


def test_a_missing_hour_stops_with_exit_4_and_is_named(project, bucket):
    late = {**HOURS, "dates": {"from": "20260101/01", "to": "20260101/04"}}
    project.configure(late, storage={"options": bucket})
    done = subprocess.run(
        [CLICKLINE, "prepare"], cwd=project.folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 4
    assert "20260101/03..04" in done.stderr
    assert "donefile" in done.stderr


@pytest.mark.slow
def test_cache_status_shows_hours_that_are_waited_for(project, bucket):
    late = {**HOURS, "dates": {"from": "20260101/01", "to": "20260101/04"}}
    project.configure(late, storage={"options": bucket})
    done = subprocess.run(
        [CLICKLINE, "cache", "status"], cwd=project.folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert done.stdout.splitlines()[1].split() == ["train", "-", "-", "-", "-", "Waiting", "-"]
    assert "20260101/03..04" in done.stderr


def test_rows_over_http(project, criteo_line):
    with web_server() as web:
        web.files["/logs/a.tsv"] = "".join(criteo_line(row % 2, row) for row in range(100)).encode()
        project.configure({"train": f"{web.url}/logs/a.tsv"})
        assert project.prepare().train_rows == 100
