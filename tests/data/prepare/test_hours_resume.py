"""An hour is complete or built again: after a kill at any moment, on a full disk, with damaged files."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from clickline.artifacts.dataset import Dataset
from clickline.data.prepare import dataset_builder, shard_builder
from clickline.data.prepare.hour_dataset import prune_hours
from clickline.errors import ArtifactError, StorageError
from clickline.storage.atomic import temporary_name
from clickline.storage.storage import Storage

FIRST = 20454 * 24
SCRIPT = """
import sys
from clickline.config import load_config
from clickline.progress import Progress
from clickline.data.prepare.hour_dataset import prepare_hour
prepare_hour(load_config("clickline.yaml"), int(sys.argv[1]), None, Progress())
"""


def content(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def hours_folder(project) -> Path:
    return project.folder / ".clickline" / "hours"


def spoil(file: Path, rows: int = 1) -> None:
    lines = file.read_text().splitlines(keepends=True)
    for row in range(rows):
        lines[10 * row + 7] = "only\ttwo\n"
    file.write_text("".join(lines))


# ── kill -9 ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_killed_at_many_moments_an_hour_equals_an_uninterrupted_run(project, hourly):
    hours = hourly("criteo", rows=20_000, hours=1)
    spoil(hours.file(0))
    hours.prepare(0, None)
    undisturbed = content(hours_folder(project))
    assert any("quarantine" in name for name in undisturbed)
    shutil.rmtree(hours_folder(project))
    kills = 0
    for wanted in (0, 1, 4, 8, 14, 20):
        with subprocess.Popen([sys.executable, "-c", SCRIPT, str(FIRST)], cwd=project.folder) as process:
            deadline = time.monotonic() + 60
            while process.poll() is None and time.monotonic() < deadline:
                if len(list(hours_folder(project).glob("*/work/*.json"))) >= wanted:
                    process.kill()
                    kills += 1
                    break
                time.sleep(0.002)
            process.kill()
    assert kills >= 4
    assert hours.prepare(0, None).dataset.splits["train"].rows == 19_999
    assert content(hours_folder(project)) == undisturbed


class Killed(BaseException):
    """Simulates the end of the process: no clean-up after errors may catch it."""


@pytest.mark.parametrize("moment", ["begun", "resolved.yaml", "manifest.json", "work", "lock"])
def test_run_killed_at_a_chosen_moment_resumes(project, hourly, monkeypatch, moment):
    """Wherever the run is killed, the next run resumes with what is left."""
    hours = hourly("criteo")
    spoil(hours.file(0))
    hours.prepare(0, None)
    undisturbed = content(hours_folder(project))
    hours.prepare(0, None, "data.shard_size=128KiB")  # something else is there

    with monkeypatch.context() as patch:
        put, delete = Storage.put, Storage.delete

        def put_or_end(self, uri, data):
            put(self, uri, data)
            if uri.endswith(f"/{moment}"):
                raise Killed

        def end_or_delete(self, uri):
            if uri.endswith(f"/{moment}"):
                raise Killed
            delete(self, uri)

        patch.setattr(Storage, "put", put_or_end)
        patch.setattr(Storage, "delete", end_or_delete)
        if moment == "lock":
            patch.setattr(dataset_builder, "write_owner", lambda *_: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            hours.prepare(0, None)
    again = hours.prepare(0, None)
    assert again.reused == (moment == "work")
    assert content(hours_folder(project)) == undisturbed


def test_work_begun_for_another_identity_is_not_resumed(project, hourly, monkeypatch):
    hours = hourly("criteo")
    spoil(hours.file(0))
    with monkeypatch.context() as patch:
        patch.setattr(
            dataset_builder,
            "finish_dataset",
            lambda *args: (_ for _ in ()).throw(StorageError("the disk went away")),
        )
        with pytest.raises(StorageError, match="went away"):
            hours.prepare(0, None)
    folder = hours_folder(project) / "20260101-00"
    before = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.parquet")}
    assert before
    (folder / temporary_name("manifest.json")).write_bytes(b"half")

    text = hours.file(0).read_text().splitlines(keepends=True)
    hours.file(0).write_text("".join(text[8:]))  # without the bad row, all rows in other shards
    changed = hours.prepare(0, None)
    assert changed.dataset.splits["train"].rows == 992
    assert not (folder / "quarantine").exists()
    assert not list(folder.glob(".*"))
    for name, written in before.items():
        assert (folder / name).stat().st_mtime_ns != written


def test_finished_shards_of_the_same_hour_are_kept(project, hourly, monkeypatch):
    hours = hourly("criteo")
    with monkeypatch.context() as patch:
        patch.setattr(
            dataset_builder, "finish_dataset", lambda *args: (_ for _ in ()).throw(StorageError("no"))
        )
        with pytest.raises(StorageError):
            hours.prepare(0, None)
    made = {path: path.stat().st_mtime_ns for path in hours_folder(project).rglob("*.parquet")}
    assert not hours.prepare(0, None).reused
    assert {path: path.stat().st_mtime_ns for path in made} == made


@pytest.mark.parametrize("damage", ["shard gone", "shard cut", "manifest torn", "other release"])
def test_a_damaged_hour_is_built_again(project, hourly, damage):
    hours = hourly("criteo")
    found = hours.prepare(0, None)
    undisturbed = content(hours_folder(project))
    shard = Path(found.dataset.folder, found.dataset.splits["train"].shards[1].file)
    manifest = Path(found.dataset.folder, "manifest.json")
    if damage == "shard gone":
        shard.unlink()
    elif damage == "shard cut":
        shard.write_bytes(shard.read_bytes()[:-1])
    elif damage == "manifest torn":
        manifest.write_bytes(manifest.read_bytes()[:100])
    else:
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 0}))
    assert not hours.prepare(0, None).reused
    assert content(hours_folder(project)) == undisturbed


def test_two_processes_do_not_build_the_same_hour(project, hourly, monkeypatch):
    hours = hourly("criteo")
    make = shard_builder.ShardBuilder.build
    errors: list[ArtifactError] = []

    def look(self, group):
        with pytest.raises(ArtifactError, match="another `clickline prepare`") as caught:
            hours.prepare(0, None)
        errors.append(caught.value)
        return make(self, group)

    with monkeypatch.context() as patch:
        patch.setattr(shard_builder.ShardBuilder, "build", look)
        hours.prepare(0, None)
    assert errors


# ── a full disk ────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4k,nr_inodes=1000", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a disk of a chosen size takes the right to mount one")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_damages_nothing_and_the_run_resumes_when_there_is_space(project, hourly, small_disk):
    hours = hourly("criteo", rows=3000, hours=1)
    spoil(hours.file(0))
    hours.prepare(0, None)
    undisturbed = content(hours_folder(project))
    said: list[str] = []
    found = None
    for size in range(4, 1600, 40):  # KiB: it fills up at another place each time
        subprocess.run(["mount", "-o", f"remount,size={size}k", str(small_disk)], check=True)
        try:
            found = hours.prepare(0, None, f"home={small_disk}")
            break
        except StorageError as error:
            said.append(str(error))
        assert not list(small_disk.rglob("manifest.json"))
        assert not list(small_disk.rglob("*.tmp"))
    assert len(said) > 5
    for message in said:
        assert re.search("disk is full|No space left on device", message), message
        assert re.search("[Ff]ree (some )?space", message), message
    assert found is not None
    assert found.dataset.splits["train"].rows == 2999
    there = content(small_disk / "hours")
    for document in (there, undisturbed):  # they tell where home is
        del document["20260101-00/resolved.yaml"]
    assert there == undisturbed


# ── hours that are no longer needed ────────────────────────────────────────────────────────────


def test_pruned_hours_keep_their_bad_rows_for_a_month(project, hourly):
    hours = hourly("criteo", rows=4000, hours=4)
    spoil(hours.file(1), rows=50)
    spoil(hours.file(2), rows=50)
    kept: dict[int, dict[str, str]] = {}
    for hour in range(4):
        found = hours.prepare(hour, None)
        kept[hour] = content(Path(found.dataset.folder))
    there = hours_folder(project)
    (there / "mine").mkdir()
    (there / "20261301-00").mkdir()  # there is no month 13
    for name in ("20251201-23", "20251202-05"):  # older than 30 days, and not
        (there / name / "quarantine").mkdir(parents=True)
        (there / name / "quarantine" / "train-00000.jsonl").write_text("{}\n")
    (there / "20251231-23" / "work").mkdir(parents=True)

    prune_hours(hours.config(), {FIRST + 2, FIRST + 3})
    assert sorted(path.name for path in there.iterdir()) == [
        "20251202-05",
        "20260101-01",
        "20260101-02",
        "20260101-03",
        "20261301-00",
        "mine",
    ]
    assert content(there / "20260101-02") == kept[2]
    assert content(there / "20260101-03") == kept[3]
    bad = {name: sha256 for name, sha256 in kept[1].items() if name.startswith("quarantine/")}
    assert bad and content(there / "20260101-01") == bad
    assert not hours.prepare(1, None).reused
    assert content(there / "20260101-01") == kept[1]
    prune_hours(hours.config(), ())
    assert not list(there.rglob("*.parquet"))
    prune_hours(hours.config("home=nothing-here"), ())


def test_a_half_removed_hour_is_not_a_dataset(project, hourly, monkeypatch):
    hours = hourly("criteo", hours=1)
    found = hours.prepare(0, None)
    delete = Storage.delete

    def end_after_one(self, uri):
        delete(self, uri)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Storage, "delete", end_after_one)
        with pytest.raises(Killed):
            prune_hours(hours.config(), ())
    with pytest.raises(ArtifactError):
        Dataset.open(Storage(), found.dataset.folder)
    assert not hours.prepare(0, None).reused
