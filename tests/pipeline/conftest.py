"""Homes for runs of `up`; a test fails if a process is left at its end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from up_home import Home, home_of_doubles


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    """A home whose stages are test doubles, see doubles/sitecustomize.py."""
    with home_of_doubles(tmp_path / "ads", {}) as made:
        yield made
