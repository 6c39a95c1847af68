"""Runs `clickline serve` during a test."""

from __future__ import annotations

import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from clickline.config import Config, load_config

SCRIPT = Path(sys.executable).parent / "clickline"


@dataclass(frozen=True)
class Live:
    """A running server."""

    folder: Path
    config: Config
    grpc: str
    http: str

    def address(self, protocol: str) -> str:
        return self.grpc if protocol.endswith("grpc") else self.http


def _free_ports(count: int) -> list[int]:
    held = [socket.socket() for _ in range(count)]
    for one in held:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


@contextmanager
def serving(folder: Path, **serve: Any) -> Iterator[Live]:
    """Serve a project's current version with these keys in its `serve` section."""
    grpc_port, http_port, metrics_port = _free_ports(3)
    file = folder / "clickline.yaml"
    document = yaml.safe_load(file.read_text())
    ports = {"grpc_port": grpc_port, "http_port": http_port, "metrics_port": metrics_port}
    document |= {"name": "ads", "serve": {"processes": 1, "poll_interval": 0.1, **ports, **serve}}
    file.write_text(yaml.safe_dump(document))
    with (folder / "serve.log").open("wb") as log:
        process = subprocess.Popen(
            [SCRIPT, "serve", "--json"], cwd=folder, stdout=subprocess.PIPE, stderr=log
        )
    try:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], 120)
        assert ready and process.stdout.readline(), (folder / "serve.log").read_text()
        yield Live(folder, load_config(file), f"127.0.0.1:{grpc_port}", f"127.0.0.1:{http_port}")
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
