"""Homes for runs of `up`, where a test fails if a process is left at its end; hours of logs to follow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hour_world import HourWorld, make_hours
from up_home import Home, home_of_doubles


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    """A home whose stages are test doubles, see doubles/sitecustomize.py."""
    with home_of_doubles(tmp_path / "ads", {}) as made:
        yield made


@pytest.fixture(scope="module")
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The logs of as many hours as the module says in HOURS."""
    folder = tmp_path_factory.mktemp("hours")
    make_hours(folder, request.module.HOURS, 1500)
    return folder


@pytest.fixture
def world(tmp_path: Path, made: Path) -> HourWorld:
    return HourWorld(tmp_path / "ads", made)
