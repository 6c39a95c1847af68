"""kill -9 anywhere and run again: finished shards are kept, the result is the same to the byte."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from clickline.data.prepare import shard_builder
from clickline.errors import ArtifactError, DataError, StorageError
from clickline.storage.atomic import temporary_name
from clickline.storage.storage import Storage

COMMAND = [str(Path(sys.executable).with_name("clickline")), "prepare", "--json"]


def content(folder: Path) -> dict[str, str]:
    """Every file below a folder by its digest."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def fill(project, criteo_line, rows: int = 20_000) -> None:
    lines = [criteo_line(row % 4 == 0, row).replace("False", "0").replace("True", "1") for row in range(rows)]
    lines[7] = "only\ttwo\n"
    half = len(lines) // 2
    project.write("a.tsv", "".join(lines[:half]))
    project.write("b.tsv", "".join(lines[half:]))
    project.write("eval.tsv", "".join(lines[:500]))
    fields = {"I3": "zscore", "I4": {"transform": "bucket", "buckets": 8}}
    project.configure(
        {"train": ["a.tsv", "b.tsv"], "eval": "eval.tsv", "shard_size": "256KiB", "fields": fields}
    )


def start(project) -> subprocess.Popen[bytes]:
    return subprocess.Popen(COMMAND, cwd=project.folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def datasets(project) -> Path:
    return project.folder / ".clickline" / "datasets"


def notes(project) -> int:
    return len(list(datasets(project).glob("*/work/*.json")))


@pytest.mark.slow
def test_killed_at_many_moments_the_result_equals_an_uninterrupted_run(project, criteo_line):
    fill(project, criteo_line)
    project.prepare()
    undisturbed = content(datasets(project))
    subprocess.run(["rm", "-rf", str(datasets(project))], check=True)
    kills = 0
    for wanted in (0, 1, 3, 6, 10, 15):
        process = start(project)
        while process.poll() is None and notes(project) < wanted:
            time.sleep(0.002)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.communicate()
    assert kills >= 4
    process = start(project)
    assert process.wait() == 0, process.communicate()[1].decode()
    process.communicate()
    assert content(datasets(project)) == undisturbed


def test_finished_shards_are_reused(project, criteo_line, monkeypatch):
    fill(project, criteo_line, 4000)
    made: list[int] = []
    make = shard_builder.ShardBuilder.build

    def stop_after_three(self, group):
        if len(made) >= 3:
            raise StorageError("the disk went away")
        made.append(group.number)
        return make(self, group)

    with monkeypatch.context() as patch:
        patch.setattr(shard_builder.ShardBuilder, "build", stop_after_three)
        with pytest.raises(StorageError, match="the disk went away"):
            project.prepare()
    before = {path.name: path.stat().st_mtime_ns for path in datasets(project).glob("*/*.parquet")}
    assert len(before) == 3
    result = project.prepare()
    for name, written in before.items():
        assert Path(result.dataset.folder, name).stat().st_mtime_ns == written
    assert result.train_rows == 3999


def test_temporary_files_of_a_killed_write_are_removed(project, criteo_line, monkeypatch):
    """`kill -9` between writing a hidden file and renaming it: nothing else would remove it."""
    fill(project, criteo_line, 3000)
    project.prepare()
    undisturbed = content(datasets(project))
    subprocess.run(["rm", "-rf", str(datasets(project))], check=True)
    with monkeypatch.context() as patch:
        patch.setattr(
            "clickline.data.prepare.dataset_builder.finish_dataset",
            lambda *a: (_ for _ in ()).throw(StorageError("no")),
        )
        with pytest.raises(StorageError):
            project.prepare()
    (folder,) = (path for path in datasets(project).iterdir() if path.is_dir())
    for name in ("quarantine/train-00000.jsonl", "manifest.json", "work/train-00001.json"):
        (folder / name).with_name(temporary_name(Path(name).name)).write_bytes(b"half")
    (folder / ".mine").write_bytes(b"not of our making")
    project.prepare()
    assert content(datasets(project)).keys() - undisturbed.keys() == {f"{folder.name}/.mine"}
    assert content(datasets(project)).items() > undisturbed.items()


def test_a_kill_between_the_manifest_and_clean_up_leaves_nothing(project, criteo_line):
    fill(project, criteo_line, 3000)
    folder = Path(project.prepare().dataset.folder)
    undisturbed = content(datasets(project))
    (folder / "work").mkdir()
    (folder / "work" / "train-00000.json").write_bytes(b"{}")
    assert project.prepare().reused
    assert not (folder / "work").exists()
    assert content(datasets(project)) == undisturbed


def test_a_truncated_shard_is_built_again(project, criteo_line, monkeypatch):
    fill(project, criteo_line, 3000)
    with monkeypatch.context() as patch:
        patch.setattr(
            "clickline.data.prepare.dataset_builder.finish_dataset",
            lambda *a: (_ for _ in ()).throw(StorageError("no")),
        )
        with pytest.raises(StorageError):
            project.prepare()
    (first, *_) = sorted(datasets(project).glob("*/train-*.parquet"))
    whole = first.read_bytes()
    first.write_bytes(whole[:100])
    project.prepare()
    assert first.read_bytes() == whole


def test_an_unchanged_dataset_is_reported_and_reused(project, criteo_line):
    fill(project, criteo_line, 1000)
    first = project.prepare()
    again = project.prepare("data.max_bad_ratio=0.5")
    assert not first.reused
    assert again.reused
    assert again.dataset == first.dataset
    assert project.heard.said == [f"dataset {first.dataset.id} is up to date: same config, same input"]


def test_a_changed_config_or_input_is_reported(project, criteo_line):
    fill(project, criteo_line, 1000)
    first = project.prepare()
    project.write("b.tsv", criteo_line(1, 5) * 10)
    project.write("c.tsv", criteo_line(1, 5))
    second = project.prepare("data.train=[a.tsv, b.tsv, c.tsv]", "data.shard_size=1MiB")
    assert second.dataset.id != first.dataset.id
    assert project.heard.said == [
        f"changed since dataset {first.dataset.id}: data.shard_size",
        f"changed since dataset {first.dataset.id}: data.train files: 1 added, 1 changed",
    ]
    third = project.prepare("data.shard_size=2MiB")
    kept = {path.name for path in datasets(project).iterdir()}
    assert kept == {"current", second.dataset.id, third.dataset.id}


def test_a_second_prepare_of_the_same_dataset_is_refused(project, criteo_line, monkeypatch):
    fill(project, criteo_line, 1000)
    inside, go_on = threading.Event(), threading.Event()
    make = shard_builder.ShardBuilder.build

    def held(self, group):
        inside.set()
        assert go_on.wait(60)
        return make(self, group)

    monkeypatch.setattr(shard_builder.ShardBuilder, "build", held)
    first = threading.Thread(target=project.prepare)
    first.start()
    assert inside.wait(60)
    second = subprocess.run(COMMAND, cwd=project.folder, capture_output=True, text=True, check=False)
    go_on.set()
    first.join()
    assert second.returncode == 1
    assert f"another `clickline prepare` (process {os.getpid()}) is building this dataset" in second.stderr


def test_a_file_that_changes_while_it_is_read_is_noticed(project):
    project.write("a.txt", "1")
    project.write(
        "my_reader.py",
        "import pyarrow as pa\n\n\ndef read(path):\n"
        "    yield pa.RecordBatch.from_pylist([{'y': 1, 'u': 'a'}])\n"
        "    with open(path, 'a') as file:\n        file.write('more')\n",
    )
    project.configure({"reader": "my_reader.py", "train": "a.txt", "fields": {"y": "label", "u": "slot"}})
    with pytest.raises(DataError, match=r"a\.txt changed while it was read\. Run the same command again"):
        project.prepare()


def test_abandoned_unfinished_datasets_are_removed(project, criteo_line):
    fill(project, criteo_line, 1000)
    abandoned = datasets(project) / "0123456789ab"
    (abandoned / "work").mkdir(parents=True)
    (abandoned / "train-00000.parquet").write_bytes(b"half")
    (abandoned / "work" / "lock").write_text("1")
    project.prepare()
    assert not abandoned.exists()
    assert "removed dataset 0123456789ab, unfinished" in project.heard.said


def test_the_previous_dataset_is_kept_even_if_this_release_cannot_read_it(project, criteo_line):
    fill(project, criteo_line, 1000)
    first = Path(project.prepare().dataset.folder)
    manifest = first / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 0}))
    project.prepare("data.shard_size=1MiB")
    assert manifest.exists()


def test_a_damaged_dataset_is_refused_with_a_remedy(project, criteo_line):
    fill(project, criteo_line, 1000)
    result = project.prepare()
    shard = Path(result.dataset.folder, result.dataset.splits["train"].shards[0].file)
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ArtifactError, match=r"Remove .* and run `clickline prepare` again"):
        project.prepare()


def test_home_can_be_in_any_store(project, criteo_line):
    fill(project, criteo_line, 1000)
    local = project.prepare()
    remote = project.prepare("home=memory://bucket/home")
    storage = Storage()
    for shard in remote.dataset.splits["train"].shards:
        stored = storage.read(Storage.join(remote.dataset.folder, shard.file))
        assert stored == Path(local.dataset.folder, shard.file).read_bytes()
    assert not storage.list(Storage.join(remote.dataset.folder, "work", "*"))
    assert project.prepare("home=memory://bucket/home").reused
    storage.delete("memory://bucket")


@pytest.mark.slow
def test_ctrl_c_exits_with_130_and_the_next_run_resumes(project, criteo_line):
    fill(project, criteo_line, 30_000)
    process = start(project)
    while process.poll() is None and notes(project) < 2:
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    code = process.wait()
    stderr = process.communicate()[1].decode()
    assert code == 130, stderr
    assert time.monotonic() - began < 2
    assert "Traceback" not in stderr
    assert "run the same command again" in stderr
    assert not list(datasets(project).glob("*/manifest.json"))
    assert project.prepare().train_rows == 29_999
