"""A full disk: artifacts stay intact, the error says what to do, and with free space the command resumes."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from faulty_machine import Disk, small_disk
from service import Service, command

import clickline
from clickline.artifacts.from_config import registry_of
from clickline.config import load_config
from clickline.errors import StorageError
from clickline.progress import Progress
from clickline.publishing.run import publish
from clickline.scoring.open_scorer import open_scorer
from servers.waiting import eventually

CLICKLINE = str(Path(sys.executable).with_name("clickline"))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with small_disk(tmp_path / "disk", "48m") as made:
        yield made


def content(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "resolved.yaml"  # it tells where home is
    }


def dataset_of(home: Path) -> Path:
    (found,) = (path.parent for path in home.glob("datasets/*/manifest.json"))
    return found


def test_prepare_resumes_after_a_full_disk(project: Path, disk: Disk) -> None:
    home = disk.folder / "home"
    home.mkdir()
    settings = load_config(project / "clickline.yaml", [f"home={home}"])
    for room in (0, 40_000, 400_000):
        disk.fill(leave=room)
        with pytest.raises(StorageError, match=r"No space left on device.*[Ff]ree (some )?space.* run "):
            clickline.prepare(settings)
        assert not list(home.rglob("manifest.json"))
        disk.make_room()
    clickline.prepare(settings)
    calm = project / "calm"
    clickline.prepare(load_config(project / "clickline.yaml", [f"home={calm}"]))
    assert content(dataset_of(home)) == content(dataset_of(calm))


def test_any_command_on_a_full_disk_says_what_to_do(tmp_path: Path, disk: Disk) -> None:
    disk.fill()
    order = [CLICKLINE, "init", str(disk.folder / "ads")]
    done = subprocess.run(order, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    said = r"(.*: )?No space left on device\. Free some space, then run the same command again\.\n"
    assert re.fullmatch(said, done.stderr), done.stderr


class Watching(Progress):
    """Calls `look` on all progress, and keeps the messages."""

    def __init__(self, look: Callable[[], None]) -> None:
        self.said: list[str] = []
        self._look = look

    def advance(self, *, rows: int = 0, size: int = 0) -> None:
        self._look()

    def log(self, message: str) -> None:
        self.said.append(message)


def test_full_disk_ends_training_which_resumes_from_the_previous_checkpoint(
    project: Path, disk: Disk
) -> None:
    home = disk.folder / "home"
    shutil.copytree(project / ".clickline" / "datasets", home / "datasets")
    options = ["train.epochs=2", "train.checkpoint_steps=10"]
    calm = clickline.train(load_config(project / "clickline.yaml", options)).checkpoint.folder
    settings = load_config(project / "clickline.yaml", [f"home={home}", *options])
    run = home / "runs" / calm.parent.name
    filled: list[str] = []

    def fill_after_the_first() -> None:
        found = sorted(path.parent.name for path in run.glob("step-*/manifest.json"))
        if found and not filled:
            filled.extend(found)
            disk.fill()

    with pytest.raises((StorageError, OSError), match="No space left on device"):
        clickline.train(settings, Watching(fill_after_the_first))
    assert [path.parent.name for path in sorted(run.glob("step-*/manifest.json"))] == filled
    disk.make_room()
    again = Watching(lambda: None)
    found = clickline.train(settings, again).checkpoint.folder
    assert any(f"resuming from step {int(filled[0][5:])}" in line for line in again.said), again.said
    assert content(found) == content(calm)
    assert not list(run.rglob("*.tmp"))


@pytest.mark.slow
@pytest.mark.parametrize("room", [0, 30_000, 90_000])
def test_full_disk_publishes_nothing_and_the_next_publish_succeeds(
    project: Path, disk: Disk, room: int
) -> None:
    place = disk.folder / "registry"
    settings = load_config(
        project / "clickline.yaml", [f"publish.registry={place}", "publish.table_precision=fp16"]
    )
    publish(settings)
    registry = registry_of(settings)
    disk.fill(leave=room)
    with pytest.raises((StorageError, OSError), match="No space left on device") as caught:
        publish(load_config(project / "clickline.yaml", [f"publish.registry={place}"]), base=True)
    assert str(place) in str(caught.value)
    current = registry.current()
    assert current is not None and current.version == 1
    assert [version.number for version in registry.versions()] == [1]
    registry.verify(registry.version(1), Path(registry.version(1).folder))
    disk.make_room()
    again = publish(load_config(project / "clickline.yaml", [f"publish.registry={place}"]), base=True)
    current = registry.current()
    assert current is not None and current.version == again.version.number
    open_scorer(registry, again.version, project / "cache", 1).check_sample()
    registry.gc(1)
    assert not list((place / "drafts").iterdir())


def ask(service: Service) -> int:
    """The version that answers."""
    reply = httpx.post(service.url("/v1/models/ctr:predict"), json={"instances": [{}]}, timeout=60)
    assert reply.status_code == 200, reply.text
    return int(reply.headers["clickline-version"])


@pytest.mark.slow
def test_server_with_a_full_cache_keeps_serving_its_version(project: Path, disk: Disk) -> None:
    """Deltas of a version are merged into a file of the cache; there is no room for it until there is."""
    file = project / "clickline.yaml"
    file.write_text(file.read_text().replace("dir: cache", f"dir: {disk.folder / 'cache'}"))
    for sample in (256, 100):
        publish(load_config(file, [f"publish.sample_rows={sample}"]))
    with command(project) as service:
        assert service.wait_up()["version"] == 2
        disk.fill()
        assert publish(load_config(file, ["publish.sample_rows=101"])).version.parent == 2
        (said,) = eventually(lambda: service.log("a version was refused"))
        assert said["version"] == 3 and "No space left on device" in said["reason"], said
        assert ask(service) == 2
        disk.make_room()
        eventually(lambda: ask(service) == 3)
