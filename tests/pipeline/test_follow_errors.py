"""Harmful or changing hours and a full disk are reported, damage nothing, and do not change the final model."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hour_world import HourWorld, Stop, Watcher, same_model

from clickline.data.prepare import hour_dataset as preparing
from clickline.data.prepare.hour_dataset import prepare_hour
from clickline.errors import HourNotReady
from clickline.pipeline.follow import follow
from clickline.progress import Progress

HOURS = 5
FIRST = 490896  # 2026-01-01T00 in hours since 1970


@pytest.fixture
def calm(tmp_path: Path, made: Path) -> HourWorld:
    """A project without faults."""
    return HourWorld(tmp_path / "calm", made)


class Happening(Watcher):
    """Calls `happen` once, at the first event for which `when` is true: a title or stage, and its facts."""

    def __init__(
        self, stop_at: str, when: Callable[[str, Mapping[str, Any]], bool], happen: Callable[[], None]
    ):
        super().__init__(stop_at)
        self._when = when
        self._happen: Callable[[], None] | None = happen
        self._known: Mapping[str, Any] = {}

    def _came_by(self, name: str, facts: Mapping[str, Any]) -> None:
        if self._happen is not None and self._when(name, facts):
            happen, self._happen = self._happen, None
            happen()

    def begin(self, title: str, *, total_bytes: int | None = None, total_rows: int | None = None) -> None:
        self._came_by(title, self._known)

    def stage(self, name: str, state: str, facts: Mapping[str, Any] | None = None) -> None:
        if name == "follow":
            self._known = dict(facts or {})
        self._came_by(f"{name} {state}", facts or {})
        super().stage(name, state, facts)

    def end_of(self, world: HourWorld, *overrides: str) -> Happening:
        """Follow to the end; returns this watcher."""
        with pytest.raises(Stop):
            follow(world.config(*overrides), self)
        return self


# ── a full disk ────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A separate disk of 48 MiB."""
    libc = ctypes.CDLL(None, use_errno=True)
    place = tmp_path / "disk"
    place.mkdir()
    if libc.mount(b"tmpfs", os.fsencode(place), b"tmpfs", 0, b"size=48m"):
        pytest.skip(f"this machine lets no test mount a disk: {os.strerror(ctypes.get_errno())}")
    try:
        yield place
    finally:
        assert libc.umount2(os.fsencode(place), 2) == 0  # at once for everybody, whatever is still open


def fill(disk: Path) -> None:
    """Fill a disk to the last byte."""
    with suppress(OSError), (disk / "ballast").open("wb", buffering=0) as ballast:
        for size in (1 << 20, 4096, 1):
            with suppress(OSError):
                while ballast.write(bytes(size)) == size:
                    pass
    assert os.statvfs(disk).f_bavail == 0


LOOKS = """
import sys
from pathlib import Path
from clickline.artifacts.checkpoint import latest_checkpoint
from clickline.config import load_config
from clickline.artifacts.from_config import registry_of
config = load_config(Path(sys.argv[1]))
found = latest_checkpoint(Path(config.home, "runs/follow"))
assert found.is_intact()
registry = registry_of(config)
for version in registry.versions():
    registry.check(version)
    registry.verify(version, Path(version.folder))
print(found.manifest.hourly.record["hour"], registry.current().version)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "what"),
    [
        ("prepare 20260101/02", "hour 20260101/02"),
        ("train", "the registry"),
        ("publish done", "the checkpoint"),
    ],
    ids=["before prepare", "before publish", "before the checkpoint"],
)
def test_follow_waits_while_the_disk_is_full(
    moment: str, what: str, calm: HourWorld, tmp_path: Path, made: Path, disk: Path
) -> None:
    hit = HourWorld(tmp_path / "hit", made, disk / "home")
    for world in (calm, hit):
        world.arrive(0, 1, 2, 3)
    calm.follow(4)
    seen: list[str] = []

    def is_full(name: str, facts: Mapping[str, Any]) -> bool:
        return name == moment and (facts.get("hour") == "20260101/02" or name.startswith("prepare"))

    class Freeing(Happening):
        """Another process checks the files while the disk is full, then space is freed."""

        def stage(self, name: str, state: str, facts: Mapping[str, Any] | None = None) -> None:
            super().stage(name, state, facts)
            if (facts or {}).get("trouble") and (disk / "ballast").exists():
                looked = subprocess.run(
                    [sys.executable, "-c", LOOKS, str(hit.file)], capture_output=True, text=True, timeout=60
                )
                assert looked.returncode == 0, looked.stderr
                seen.append(looked.stdout.strip())
                (disk / "ballast").unlink()

    watcher = Freeing("20260101/04", is_full, lambda: fill(disk)).end_of(hit)

    published = 3 if moment == "publish done" else 2
    assert seen == [f"20260101/01 {published}"]
    troubles = [facts["trouble"] for facts in watcher.facts if facts.get("trouble")]
    assert troubles[0]["what"] == what
    assert "No space left on device" in troubles[0]["words"]
    assert watcher.facts[-1]["trouble"] is None
    assert f"{what}: works again" in watcher.said
    same_model(calm, hit)
    assert [record["state"] for record in hit.records()] == ["learned"] * 4
    assert [record["progressive"] for record in hit.records()] == [
        record["progressive"] for record in calm.records()
    ]
    assert hit.versions()[-1].manifest.model.hour == "20260101/03"


# ── harmful hours ─────────────────────────────────────────────────────────────────────────────


def columns(text: str, change: Callable[[int, dict[str, str]], None]) -> str:
    """A csv log with changed rows."""
    head, *lines = text.splitlines()
    names = head.split(",")
    changed = []
    for number, line in enumerate(lines):
        row = dict(zip(names, line.split(","), strict=True))
        change(number, row)
        changed.append(",".join(row.values()))
    return "\n".join([head, *changed]) + "\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("value", "rows"), [("3e38", 1500), ("1e30", 1500), ("1e30", 30)], ids=["all", "all, smaller", "few"]
)
def test_hour_that_makes_the_model_diverge_is_skipped(
    value: str, rows: int, calm: HourWorld, tmp_path: Path, made: Path
) -> None:
    """The model resumes from the previous hour, exactly as without the bad one."""
    fields = "data.fields={click: label, timestamp: time, I1: none, I2: zscore, C1: slot, C2: slot}"
    hit = HourWorld(tmp_path / "hit", made)
    for world in (calm, hit):
        world.arrive(0, 1, 3)
    hit.arrive(2)

    def spoil(number: int, row: dict[str, str]) -> None:
        if number % (1500 // rows) == 0:
            row["I1"] = row["I2"] = value

    hit.log(2).write_text(columns(hit.log(2).read_text(), spoil))
    calm.follow(4, fields, "follow.on_missing_hour=skip")
    watcher = hit.follow(4, fields)
    (told,) = [line for line in watcher.said if line.startswith("20260101/02 was not trained: ")]
    assert "dense fields for extreme values" in told
    assert [record["state"] for record in hit.records()] == ["learned", "learned", "corrupt", "learned"]
    assert [record["state"] for record in calm.records()] == ["learned", "learned", "skipped", "learned"]
    same_model(calm, hit)
    assert hit.versions()[-1].manifest.model.hour == "20260101/03"


def test_hour_that_diverges_stops_the_run_if_configured(calm: HourWorld) -> None:
    fields = "data.fields={click: label, timestamp: time, I1: none, C1: slot, C2: slot}"
    calm.arrive(0, 1)
    calm.log(1).write_text(columns(calm.log(1).read_text(), lambda _, row: row.update(I1="3e38")))
    with pytest.raises(Exception, match="extreme values"):
        calm.follow(2, fields, "follow.on_corrupt_hour=stop")


# ── changing hours ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
@pytest.mark.parametrize("change", ["a file grows", "a file comes", "a file goes", "the donefile goes"])
def test_hour_changed_while_read_is_trained_in_its_final_state(
    change: str, calm: HourWorld, tmp_path: Path, made: Path
) -> None:
    hit = HourWorld(tmp_path / "hit", made)
    calm.arrive(0, 1, 2)
    hit.arrive(0, 1, 2)
    second = "part-00001.csv"
    for world in (calm, hit):  # in the end the hour has two files
        head, *lines = world.log(1).read_text().splitlines(keepends=True)
        world.log(1).write_text("".join([head, *lines[:700]]))
        (world.hour(1) / second).write_text("".join([head, *lines[700:]]))
    whole = (hit.hour(1) / second).read_text()
    if change == "a file grows":
        (hit.hour(1) / second).write_text(whole[: len(whole) // 2])
    elif change == "a file comes":
        (hit.hour(1) / second).unlink()
    elif change == "a file goes":
        (hit.hour(1) / "part-00002.csv").write_text(whole)

    def happen() -> None:
        if change in ("a file grows", "a file comes"):
            (hit.hour(1) / second).write_text(whole)
        elif change == "a file goes":
            (hit.hour(1) / "part-00002.csv").unlink()
        else:
            (hit.hour(1) / "donefile").unlink()

    class Returning(Happening):
        """Restores the donefile when it is waited for."""

        def stage(self, name: str, state: str, facts: Mapping[str, Any] | None = None) -> None:
            super().stage(name, state, facts)
            if (facts or {}).get("state") == "waiting" and (facts or {}).get("hour") == "20260101/01":
                (hit.hour(1) / "donefile").touch()

    calm.follow(3)
    Returning("20260101/03", lambda name, _: name == "prepare 20260101/01", happen).end_of(hit)
    assert [record["rows"] for record in hit.records()] == [1500, 1500, 1500]
    same_model(calm, hit)


def test_hour_changed_after_reading_is_not_ready(calm: HourWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """All files were read, but one of them is written again before the hour is finished."""
    calm.arrive(0)
    real = preparing.DatasetBuilder.build_split

    def split(making: Any, *arguments: Any, **options: Any) -> Any:
        result = real(making, *arguments, **options)
        calm.log(0).write_text(calm.log(0).read_text() + "1,1767225600,1,1,a,b,c,d\n")
        return result

    with monkeypatch.context() as patch:
        patch.setattr(preparing.DatasetBuilder, "build_split", split)
        with pytest.raises(HourNotReady, match="20260101/00 changed while it was read"):
            prepare_hour(calm.config(), FIRST, None, Progress())
    assert prepare_hour(calm.config(), FIRST, None, Progress()).dataset.splits["train"].rows == 1501
