"""A small project to train on a cluster, and undisturbed runs to compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster_run import ClusterRun, all_processes_end
from prepared_project import copy_project, make_project


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """80,000 synthetic rows, prepared once for all tests; 250 steps."""
    return make_project(tmp_path_factory.mktemp("world"), 80_000)


@pytest.fixture(scope="session")
def reference(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ClusterRun]:
    """A run of a mode without faults."""
    runs: dict[str, ClusterRun] = {}

    def run(mode: str) -> ClusterRun:
        if mode not in runs:
            with all_processes_end():
                one = ClusterRun(copy_project(world, tmp_path_factory.mktemp(f"reference-{mode}")), mode)
                one.start()
                one.assert_exact()
            runs[mode] = one
        return runs[mode]

    return run


@pytest.fixture
def project(world: Path, tmp_path: Path) -> Path:
    return copy_project(world, tmp_path)


@pytest.fixture(autouse=True)
def nothing_outlives_a_test() -> Iterator[None]:
    with all_processes_end():
        yield
