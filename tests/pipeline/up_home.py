"""A project in which tests run `up` as real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from clickline.processes import Process, descendants, still_alive
from servers.waiting import eventually, free_serve_ports

SCRIPT = Path(sys.executable).parent / "clickline"
DOUBLES = Path(__file__).parent / "doubles"


class Home:
    """A project in which `up` is run."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        self.file = folder / "clickline.yaml"
        self.up = folder / ".clickline" / "up"
        self.environment = {**os.environ, "COLUMNS": "100", **environment}
        self._started: list[subprocess.Popen[str]] = []
        self.processes: dict[int, Process] = {}

    def configure(self, **sections: Any) -> None:
        """Write the config; the studio, which takes a second to start, is disabled unless a section enables it."""
        config = yaml.safe_load(self.file.read_text()) if self.file.exists() else {}
        self.file.write_text(yaml.safe_dump({"studio": {"enabled": False}, **config, **sections}))

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a command; its output goes to files, so that no process that keeps a pipe open blocks the test."""
        number = len(self._started)
        with (
            (self.folder / f"out-{number}").open("w") as out,
            (self.folder / f"err-{number}").open("w") as err,
        ):
            process = subprocess.Popen(
                [SCRIPT, *arguments],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                text=True,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            )
        self._started.append(process)
        return process

    def output(self, process: subprocess.Popen[str]) -> tuple[str, str]:
        number = self._started.index(process)
        return (self.folder / f"out-{number}").read_text(), (self.folder / f"err-{number}").read_text()

    def run(self, *arguments: str, seconds: float = 90.0) -> tuple[int, str, str]:
        process = self.start(*arguments)
        try:
            code = process.wait(seconds)
        finally:
            self.note_processes()
        return (code, *self.output(process))

    @property
    def state(self) -> dict[str, Any]:
        try:
            document: dict[str, Any] = json.loads((self.up / "state.json").read_text())
        except FileNotFoundError:
            return {}
        return document

    def stage(self, name: str) -> str | None:
        found = self.state.get("stages", {}).get(name, {}).get("state")
        return None if found is None else str(found)

    def pid(self, role: str) -> int:
        """The pid of the first process with this role."""
        return int(next(one["pid"] for one in self.state["processes"] if one["role"] == role))

    def is_up(self) -> bool:
        return "grpc" in self.state.get("stages", {}).get("serve", {}).get("facts", {})

    def until_up(self, process: subprocess.Popen[str]) -> None:
        """Wait until the command reports that it is up."""
        eventually(lambda: (self.is_up() and self.output(process)[0]) or process.poll() is not None)
        assert process.poll() is None, self.output(process)
        self.note_processes()

    def note_processes(self) -> list[Process]:
        """Record all processes of this home; they are checked again at the end of the test."""
        for one in self.state.get("processes", ()):
            found = Process.from_json(one)
            self.processes[found.pid] = found
        for process in self._started:
            if process.poll() is None:
                self.processes |= {one.pid: one for one in descendants(process.pid)}
        return still_alive(one for one in self.processes.values() if one.pid != os.getpid())

    def none_left(self, seconds: float = 20.0) -> bool:
        return bool(eventually(lambda: not self.note_processes(), seconds))

    def end(self) -> list[Process]:
        """Kill and return the remaining processes."""
        self.note_processes()
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.wait()
        left = still_alive(one for one in self.processes.values() if one.pid != os.getpid())
        deadline = time.monotonic() + 15.0  # children exit with their parent
        while left and time.monotonic() < deadline:
            time.sleep(0.02)
            left = still_alive(left)
        for one in left:
            one.send_signal(signal.SIGKILL)
        return left


@contextmanager
def home_of_doubles(folder: Path, environment: dict[str, str]) -> Iterator[Home]:
    """A home whose stages are test doubles, see doubles/sitecustomize.py; checks that no process is left at the end."""
    folder.mkdir()
    made = Home(folder, {"PYTHONPATH": str(DOUBLES), "CLICKLINE_DOUBLES": str(folder), **environment})
    made.configure(
        name="ads",
        data={"train": "train.tsv"},
        cache={"dir": "cache"},
        serve={**free_serve_ports(), "processes": 1, "drain_timeout": 2},
    )
    yield made
    assert made.end() == [], "processes were left behind"
