"""What all tests share: Hypothesis without deadlines (kernels compile on first use), and the real rows."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "clickline",
    deadline=None,
    derandomize=os.environ.get("CI") == "true",
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("clickline")


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder with real rows, which are never copied into the project."""
    folder = Path(__file__).parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("the real rows are not here: no ../shared/data beside the project")
    return folder
