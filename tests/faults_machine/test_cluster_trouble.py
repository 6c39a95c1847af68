"""A full disk and a clock that jumps under a training on a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_run import ClusterRun, all_processes_end
from small_world import make_world, share_world
from troubled import DAY, Machine, small_disk

pytestmark = [pytest.mark.faults, pytest.mark.timeout(700)]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_world(tmp_path_factory.mktemp("world"), 80_000)


@pytest.fixture(autouse=True)
def nothing_outlives_a_test() -> Iterator[None]:
    with all_processes_end():
        yield


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_leases_and_silence_are_measured_by_a_clock_that_does_not_jump(
    world: Path, tmp_path: Path, machine: Machine, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "ads"
    project.mkdir()
    for name, value in machine.environment.items():
        monkeypatch.setenv(name, value)
    run = ClusterRun(share_world(world, project), mode)
    run.start()
    run.await_step(60)
    machine.set_clock(DAY)
    run.await_step(140)
    machine.set_clock(-DAY)
    run.ends_exact()
    assert not run.decided("restart") and len(run.decided("resize")) == 1, run.told()  # the first: it begins


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_cut_that_finds_no_room_ends_the_run_and_the_same_command_goes_on(
    world: Path, tmp_path: Path, mode: str
) -> None:
    with small_disk(tmp_path / "disk", "64m") as disk:
        run = ClusterRun(share_world(world, disk.folder), mode)
        run.start()
        run.await_cut()
        disk.fill()
        ended = run.wait()
        assert ended.code == 1, run.told()
        assert "No space left on device" in ended.errors, ended.errors
        assert "ree some space" in ended.errors, ended.errors
        assert "Traceback" not in ended.errors, ended.errors
        disk.make_room()
        whole = run.cut_step()
        assert whole > 0
        run.start()
        run.ends_exact()
        assert f"going on from step {whole} " in (run.project / "stderr.txt").read_text()
