"""A full disk and a clock that jumps under a training on a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_run import ClusterRun, all_processes_end
from faulty_machine import DAY, Machine, small_disk
from prepared_project import copy_project, make_project

pytestmark = [pytest.mark.faults, pytest.mark.timeout(700)]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_project(tmp_path_factory.mktemp("world"), 80_000)


@pytest.fixture(autouse=True)
def nothing_outlives_a_test() -> Iterator[None]:
    with all_processes_end():
        yield


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_leases_and_timeouts_use_a_monotonic_clock(
    world: Path, tmp_path: Path, machine: Machine, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "ads"
    project.mkdir()
    for name, value in machine.environment.items():
        monkeypatch.setenv(name, value)
    run = ClusterRun(copy_project(world, project), mode)
    run.start()
    run.await_step(60)
    machine.set_clock(DAY)
    run.await_step(140)
    machine.set_clock(-DAY)
    run.assert_exact()
    assert not run.decisions("restart") and len(run.decisions("resize")) == 1, (
        run.output()
    )  # the first: it begins


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_full_disk_at_a_checkpoint_ends_the_run_and_the_same_command_resumes(
    world: Path, tmp_path: Path, mode: str
) -> None:
    with small_disk(tmp_path / "disk", "64m") as disk:
        run = ClusterRun(copy_project(world, disk.folder), mode)
        run.start()
        run.await_checkpoint()
        disk.fill()
        ended = run.wait()
        assert ended.code == 1, run.output()
        assert "No space left on device" in ended.errors, ended.errors
        assert "ree some space" in ended.errors, ended.errors
        assert "Traceback" not in ended.errors, ended.errors
        disk.make_room()
        whole = run.checkpoint_step()
        assert whole > 0
        run.start()
        run.assert_exact()
        assert f"resuming from step {whole} " in (run.project / "stderr.txt").read_text()
