"""Homes for runs of `up`; whatever they start is gone when a test is over, or the test fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from up_home import DOUBLES, Home, free_ports


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    """A home whose stages are doubles: see doubles/sitecustomize.py."""
    folder = tmp_path / "ads"
    folder.mkdir()
    made = Home(folder, {"PYTHONPATH": str(DOUBLES), "CLICKLINE_DOUBLES": str(folder)})
    grpc, http, metrics = free_ports(3)
    made.configure(
        name="ads",
        data={"train": "train.tsv"},
        cache={"dir": "cache"},
        serve={"grpc_port": grpc, "http_port": http, "metrics_port": metrics, "processes": 1, "drain": 2},
    )
    yield made
    assert made.end() == [], "processes were left behind"
