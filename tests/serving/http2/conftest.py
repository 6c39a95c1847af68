"""A server of HTTP/2 connections."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from http2_peer import Server


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.close()
    assert running.errors == []
