"""Follow mode with a store that does not answer for a while: it is reported and retried, and every hour is trained once."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import s3fs
from hour_world import HourWorld, Stop, Watcher, same_model

from clickline.artifacts.from_config import registry_of
from clickline.config import Config
from clickline.pipeline.follow import follow
from servers.waiting import eventually, free_ports

HOURS = 4

pytestmark = pytest.mark.slow

GATE = "gate.vs_current=-1"  # the live version is asked too


class Store:
    """An S3 that can be stopped and comes back at the same address with what it held."""

    def __init__(self) -> None:
        (self._port,) = free_ports(1)
        self.options = {
            "client_kwargs": {"endpoint_url": f"http://127.0.0.1:{self._port}"},
            "config_kwargs": {"retries": {"max_attempts": 0}, "connect_timeout": 2, "read_timeout": 5},
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._held: dict[str, bytes] = {}

    @property
    def files(self) -> s3fs.S3FileSystem:
        return s3fs.S3FileSystem(**self.options, skip_instance_cache=True, use_listings_cache=False)

    def start(self) -> None:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self._port)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        eventually(self._answers)
        self.files.mkdir("ads")
        for name, content in self._held.items():
            self.files.pipe(name, content)

    def stop(self) -> None:
        files = self.files
        self._held = {name: files.cat(name) for name in files.find("ads")}
        self.kill()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(30)
            self._process = None

    def put(self, folder: Path, name: str) -> None:
        """A local hour, its donefile last."""
        for path in sorted(folder.iterdir(), key=lambda path: path.name == "donefile"):
            self._held[f"ads/{name}/{path.name}"] = path.read_bytes()
            if self._process is not None:
                self.files.pipe(f"ads/{name}/{path.name}", path.read_bytes())

    def _answers(self) -> bool:
        assert self._process is not None and self._process.poll() is None
        try:
            with urlopen(f"http://127.0.0.1:{self._port}/moto-api/", timeout=2) as answer:
                return int(answer.status) == 200
        except OSError:
            return False


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    store = Store()
    store.start()
    try:
        yield store
    finally:
        store.kill()


@pytest.fixture
def calm(tmp_path: Path, made: Path) -> HourWorld:
    world = HourWorld(tmp_path / "calm", made)
    world.arrive(0, 1, 2)
    world.follow(3, GATE)
    return world


class Outage(Watcher):
    """Stops the store when `when` is true and restarts it after the failure is reported; `back` is called just before."""

    def __init__(
        self, store: Store, when: Callable[[str, Mapping[str, Any]], bool], back: Callable[[], None]
    ):
        super().__init__("20260101/03")
        self._store = store
        self._when = when
        self._back = back
        self._known: Mapping[str, Any] = {}
        self.outage = 0.0  # when it began

    def _came_by(self, name: str) -> None:
        if not self.outage and self._when(name, self._known):
            self.outage = time.monotonic()
            self._store.stop()

    def begin(self, title: str, *, total_bytes: int | None = None, total_rows: int | None = None) -> None:
        self._came_by(title)

    def stage(self, name: str, state: str, facts: Mapping[str, Any] | None = None) -> None:
        if name == "follow":
            before, self._known = self._known, dict(facts or {})
            if self._known.get("trouble") and not before.get("trouble"):
                self._back()
                self._store.start()
        self._came_by(f"{name} {state}")
        super().stage(name, state, facts)

    def end_of(self, config: Config) -> None:
        with pytest.raises(Stop):
            follow(config, self)
        assert self.outage


def troubles(watcher: Watcher) -> list[tuple[str, str]]:
    """What was in trouble, and the words."""
    found = [facts["trouble"] for facts in watcher.facts if facts.get("trouble")]
    return list(dict.fromkeys((trouble["what"], trouble["words"]) for trouble in found))


def test_follow_waits_for_an_unreachable_source(
    calm: HourWorld, store: Store, tmp_path: Path, made: Path
) -> None:
    hit = HourWorld(tmp_path / "hit", made)
    hours = sorted((made / "coming/20260101").iterdir())
    for hour in hours[:2]:
        store.put(hour, f"20260101/{hour.name}")
    config = hit.config(
        GATE, "data.train=s3://ads/{date}/{hour}/*.csv", f"storage.options={{s3: {store.options}}}"
    )

    def is_waiting(name: str, known: Mapping[str, Any]) -> bool:
        return known.get("state") == "waiting" and known.get("hour") == "20260101/02"

    watcher = Outage(store, is_waiting, lambda: store.put(hours[2], "20260101/02"))
    watcher.end_of(config)
    ((what, words),) = troubles(watcher)
    assert what == "the source"
    assert "the store did not answer" in words
    assert watcher.said.count("the source: works again") == 1
    assert [(r["hour"], r["state"]) for r in hit.records()] == [
        (f"20260101/0{hour}", "learned") for hour in range(3)
    ]
    same_model(calm, hit)


@pytest.mark.parametrize("moment", ["train", "publish version 2"])
def test_follow_waits_for_an_unreachable_registry(
    moment: str, calm: HourWorld, store: Store, tmp_path: Path, made: Path
) -> None:
    """Before a version is begun, and in the middle of one."""
    hit = HourWorld(tmp_path / "hit", made)
    hit.arrive(0, 1, 2)
    config = hit.config(
        GATE, "publish.registry=s3://ads/registry", f"storage.options={{s3: {store.options}}}"
    )

    def at(name: str, known: Mapping[str, Any]) -> bool:
        return name == moment and known.get("hour") == "20260101/01"

    watcher = Outage(store, at, lambda: None)
    watcher.end_of(config)
    ((what, words),) = troubles(watcher)
    assert what == "the registry"
    assert "the store did not answer" in words
    assert watcher.said.count("the registry: works again") == 1
    same_model(calm, hit)
    registry = registry_of(config)
    versions = registry.versions()
    assert [version.manifest.model.hour for version in versions] == [f"20260101/0{hour}" for hour in range(3)]
    for version in versions:
        registry.check(version)
    current = registry.current()
    assert current is not None and current.version == versions[-1].number
    assert [record["version"] for record in hit.records()] == [version.number for version in versions]
