"""The checkpoint of the small model."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def checkpoint(project: Path) -> Path:
    """The folder of the project's only checkpoint that counts."""
    return max((project / ".clickline" / "runs").glob("*/step-*"))
