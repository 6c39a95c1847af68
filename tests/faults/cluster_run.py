"""`clickline train` on a cluster as a real process with injected faults, and what must be true at its end."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

from clickline.artifacts.checkpoint import Checkpoint, latest_checkpoint
from clickline.artifacts.dataset import Dataset
from clickline.storage.storage import Storage
from id_counters import counters_in, direct_count

CLICKLINE = Path(sys.executable).with_name("clickline")
MOMENTS = Path(__file__).parent / "moments"
BOTH = ("sync", "async")
AUC_NOISE = 0.01
T = TypeVar("T")
# The real limits are for busy machines that are far away; a test cannot wait for them.
SETTINGS = {
    "clickline.training.batches": {"WINDOW_ROWS": 8192},  # several units in few rows
    "clickline.training.cluster.job": {"TrainingJob.__init__": 8.0},  # group_seconds
    "clickline.training.cluster.sync_epoch": {"_SILENT_SECONDS": 4.0},
    "clickline.training.cluster.leases": {"PATIENCE_SECONDS": 4.0},
    "clickline.training.cluster.monitor": {
        "_LOOK_SECONDS": 0.1,
        "_LATE_SECONDS": 1.0,
        "ACTOR_SECONDS": 20.0,
    },
    "clickline.training.cluster.policy": {"GROW_SECONDS": 1.0},
}
_AGENTS = (
    "DashboardAgent",
    "RuntimeEnvAgent",
    "dashboard/agent",
    "runtime_env/agent",
)  # idle; go in a minute


class Fault(NamedTuple):
    """What a process does at a call of a function; see moments/sitecustomize.py."""

    place: str
    name: str
    call: int = 1
    after: bool = False
    do: str = "kill"


class CommandResult(NamedTuple):
    """How a command ended."""

    code: int
    errors: str


def poll(what: str, look: Callable[[], T], seconds: float = 300.0) -> T:
    """The first thing that `look` finds."""
    until = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < until, f"{what}: not within {seconds:.0f} s"
        time.sleep(0.02)
    return found


class ClusterRun:
    """A project, and the command that trains it."""

    def __init__(
        self, project: Path, mode: str, reference: ClusterRun | None = None, **settings: object
    ) -> None:
        self.project = project
        self._reference = reference  # the same run without faults
        self._settings = {"train.sync": str(mode == "sync").lower(), **settings}
        self._process: subprocess.Popen[bytes] | None = None
        self._moments = project / "moments"
        self._moments.mkdir()
        self.set_constants({})
        self._faults = 0

    # ── the command ────────────────────────────────────────────────────────────────────────────

    def set_constants(self, settings: dict) -> None:
        """Set more values for processes that start from now on, by module."""
        (self._moments / "settings.json").write_text(json.dumps({**SETTINGS, **settings}))

    def inject(self, *faults: Fault) -> list[Path]:
        """Prepare faults for processes that start from now on; the files that appear when they happen."""
        files = []
        for fault in faults:
            file = self._moments / f"fault-{self._faults}.json"
            document = {
                "at": [fault.place, fault.name],
                "call": fault.call,
                "after": fault.after,
                "do": fault.do,
            }
            file.write_text(json.dumps(document))
            files.append(file.with_suffix(".notes" if fault.do == "note" else ".taken"))
            self._faults += 1
        return files

    def clear_faults(self) -> None:
        """Remove the faults that have not happened."""
        for file in self._moments.glob("fault-*.json"):
            file.unlink()

    def start(self, **settings: object) -> None:
        self._settings.update(settings)
        options = [part for key, value in self._settings.items() for part in ("--set", f"{key}={value}")]
        with (self.project / "stderr.txt").open("ab") as errors:
            self._process = subprocess.Popen(
                [
                    CLICKLINE,
                    "train",
                    "--set",
                    "train.mode=cluster",
                    *options,
                ],
                cwd=self.project,
                env={
                    **os.environ,
                    "PYTHONPATH": str(MOMENTS),
                    "CLICKLINE_MOMENTS": str(self._moments),
                    "RAY_AUTH_MODE": "token",
                },
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )

    def command(self, *arguments: str) -> None:
        """Another command of clickline, while it runs."""
        subprocess.run([CLICKLINE, *arguments], cwd=self.project, check=True, timeout=60)

    def wait(self, seconds: float = 300.0) -> CommandResult:
        """Until the command ends."""
        assert self._process is not None
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end within {seconds:.0f} s; {self.output()}") from None
        return CommandResult(code, (self.project / "stderr.txt").read_text())

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    # ── what is seen of it ─────────────────────────────────────────────────────────────────────

    @property
    def folder(self) -> Path | None:
        """Of the run."""
        return next((self.project / ".clickline" / "runs").glob("*/"), None)

    def log(self, role: str) -> str:
        folder = self.folder
        path = None if folder is None else folder / "cluster" / "logs" / f"{role}.log"
        return path.read_text() if path is not None and path.exists() else ""

    def roles(self, kind: str) -> dict[str, int]:
        """The live processes, newest last: worker-3 → its pid."""
        folder = self.folder
        logs = (
            [] if folder is None else sorted((folder / "cluster" / "logs").glob(f"{kind}*.log"), key=_number)
        )
        found = {log.stem: re.findall(r"process (\d+)", log.read_text()) for log in logs}
        pids = {name: int(started[-1]) for name, started in found.items() if started}
        return {name: pid for name, pid in pids.items() if pid in descendants()}

    def role(self, kind: str) -> int:
        """The pid of a live one."""
        return poll(f"a {kind}", lambda: list(self.roles(kind).values()))[0]

    def status(self) -> dict:
        folder = self.folder
        with suppress(OSError, ValueError):
            return json.loads((folder / "cluster" / "status.json").read_text()) if folder else {}
        return {}

    def await_step(self, step: int) -> None:
        poll(
            f"step {step}",
            lambda: self._is_running() and self.status().get("metrics", {}).get("step", 0) >= step,
        )

    def await_checkpoint(self, step: int = 1) -> None:
        poll(f"checkpoint {step}", lambda: self._is_running() and (self.checkpoint_step() >= step))

    def checkpoint_step(self) -> int:
        """The step of the newest complete checkpoint."""
        found = None if self.folder is None else latest_checkpoint(self.folder)
        return 0 if found is None else found.step

    def _is_running(self) -> bool:
        assert self.alive, f"it ended early; {self.output()}"
        return True

    def child(self, name: str) -> int:
        """The pid of the driver's child that runs a program of Ray."""

        def look() -> int | None:
            return next((pid for pid in descendants(self.pid) if f"/{name}" in command_line(pid)[0]), None)

        return poll(f"the {name}", look)

    def output(self) -> str:
        errors = (self.project / "stderr.txt").read_text()[-3000:]
        logs = [
            f"── {name}\n{self.log(name)[-5000:]}" for name in ("driver", "worker-0", "worker-1", "shard-0")
        ]
        return "\n".join([errors, *logs])

    # ── what must be true at the end ───────────────────────────────────────────────────────────

    def assert_exact(self, *, epochs: int = 1, seconds: float = 300.0) -> None:
        """Exit 0; each row trained once per epoch, each id counted once per row; as good as an undisturbed run."""
        ended = self.wait(seconds)
        assert ended.code == 0, self.output()
        checkpoint = self.checkpoint
        dataset = Dataset.current(Storage(), str(self.project / ".clickline"))
        assert checkpoint.manifest.run.trained_rows == epochs * dataset.splits["train"].rows, self.output()
        assert counters_in(checkpoint) == direct_count(dataset, epochs=epochs), self.output()
        assert self.status()["state"] == "done"
        if self._reference is not None:
            reference = self._reference
            assert checkpoint.step == reference.checkpoint.step, self.output()
            assert abs(self.auc - reference.auc) < AUC_NOISE, (self.auc, reference.auc)

    @property
    def checkpoint(self) -> Checkpoint:
        assert self.folder is not None
        found = latest_checkpoint(self.folder)
        assert found is not None
        return found

    @property
    def auc(self) -> float:
        assert self.folder is not None
        return json.loads((self.folder / "history.json").read_text())[-1]["auc"]

    def decisions(self, decision: str) -> list[str]:
        """The reasons of the driver's decisions, newest last."""
        return re.findall(rf"Z {decision}: (.*)", self.log("driver"))


# ── processes ──────────────────────────────────────────────────────────────────────────────────


def descendants(of: int | None = None, *, dead: bool = False) -> set[int]:
    """Descendants of a process, by default of this one; `dead`: also those that were not waited for."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent = stat.read_text().rpartition(") ")[2].split()[:2]
            if state != "Z" or dead:
                children.setdefault(int(parent), []).append(int(stat.parent.name))
    found: set[int] = set()
    below = [os.getpid() if of is None else of]
    while below:
        new = children.get(below.pop(), [])
        found.update(new)
        below += new
    return found


def command_line(pid: int) -> list[str]:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return [""]


@contextmanager
def all_processes_end() -> Iterator[None]:
    """Whatever is started meanwhile and loses its parent becomes our child, and ends here at the latest."""
    before = descendants()
    prctl, was = ctypes.CDLL(None).prctl, ctypes.c_int()
    prctl(37, ctypes.byref(was), 0, 0, 0)  # PR_GET_CHILD_SUBREAPER
    prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    try:
        yield
    finally:
        until = time.monotonic() + 10
        while (left := descendants() - before) and time.monotonic() < until:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        prctl(36, was.value, 0, 0, 0)
        for pid in descendants(dead=True) - before:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        assert not left


def leftover_processes() -> list[str]:
    """Processes of Ray that should have gone with their driver."""
    words = [" ".join(command_line(pid)) for pid in descendants()]
    return [line for line in words if "ray" in line and not any(agent in line for agent in _AGENTS)]


def _number(log: Path) -> int:
    return int(re.sub(r"\D", "", log.stem) or 0)
