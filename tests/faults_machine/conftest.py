"""Machines that misbehave; what other tests use to run real services and flows is used here too."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path += [str(Path(__file__).parents[1] / name) for name in ("faults", "pipeline", "serving")]

from faulty_machine import Machine, faulty_machine


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    folder = tmp_path / "machine"
    folder.mkdir()
    return faulty_machine(folder)
