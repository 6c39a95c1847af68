"""What nearly every test with a process of its own needs: a port that is free, and patience with a limit."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any


def eventually(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    """What `condition` returns as soon as it is true."""
    deadline = time.monotonic() + seconds
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < deadline, f"never came true: {condition}"
        time.sleep(0.01)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    with ExitStack() as held:
        found = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in found:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in found]


def free_serve_ports() -> dict[str, int]:
    """Free ports for the section `serve` of a config."""
    return dict(zip(("grpc_port", "http_port", "metrics_port"), free_ports(3), strict=True))
