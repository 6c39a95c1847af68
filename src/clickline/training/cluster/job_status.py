"""Where a running driver and other processes meet: plain files.

    <home>/cluster.json          which run is the newest
    <run>/cluster/lock           held by the driver as long as it lives; holds its pid and host
                  status.json    how far it is; only the driver writes it
                  scale.json     how many workers `clickline scale` asks for; only the driver removes it
                  logs/          a file a role: driver.log, worker-3.log, shard-0.log, network.log

A wish of `clickline scale` outlives a driver that is killed, and ends with one that ends by itself.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from clickline.errors import ClusterError
from clickline.storage.atomic import put_atomically
from clickline.storage.file_lock import holder_of, sign, take

EVENTS = 20


@dataclass(frozen=True)
class WorkerStatus:
    """A process that computes."""

    name: str  # worker-3
    node: str
    state: str  # starting, learning, idle, lost
    at: str = ""  # "step 120", "unit 3, batch 17"
    rows: int = 0
    rows_per_second: float = 0.0
    memory: int = 0


@dataclass(frozen=True)
class ShardStatus:
    """A process that holds sparse rows, or the network (then it has no ids)."""

    name: str  # shard-0, network
    node: str
    ids: int | None = None
    memory: int = 0
    limit: int | None = None


@dataclass(frozen=True)
class LeaseCounts:
    """Units of the epoch."""

    todo: int
    open: int
    done: int


@dataclass(frozen=True)
class CutStatus:
    """The last checkpoint of everything at once."""

    step: int
    at: str
    seconds: float  # to write it
    stalled: float = 0.0  # of these, how long nobody learned


@dataclass(frozen=True)
class Figures:
    """How training is doing."""

    step: int = 0
    rows: int = 0
    total_rows: int | None = None  # of all epochs
    rows_per_second: float = 0.0
    auc: float | None = None
    loss: float | None = None


@dataclass(frozen=True)
class Event:
    """A decision that changed something."""

    at: str
    decision: str  # resize, restart, …
    reason: str

    @classmethod
    def now(cls, decision: str, reason: str) -> Event:
        return cls(_now(), decision, reason)


@dataclass(frozen=True)
class Status:
    """What people want to know of a cluster run while it runs. Times are UTC, as ISO 8601."""

    state: Literal["starting", "waiting", "running", "done", "stopped", "failed"]
    mode: Literal["sync", "async"]
    generation: int = 0  # how often it went back to a cut
    workers: tuple[WorkerStatus, ...] = ()
    shards: tuple[ShardStatus, ...] = ()
    network: ShardStatus | None = None
    leases: LeaseCounts | None = None
    last_cut: CutStatus | None = None
    figures: Figures = Figures()
    events: tuple[Event, ...] = ()  # the newest last
    most: int | None = None  # workers: train.workers.max
    message: str = ""  # what it waits for, or why it failed


# ── the driver's side ──────────────────────────────────────────────────────────────────────────


@contextmanager
def driving(home: Path, run: Path) -> Iterator[None]:
    """Be the one driver of a run, which becomes the newest of its home. Raises ClusterError if another one is."""
    folder = run / "cluster"
    logs_of(run).mkdir(parents=True, exist_ok=True)
    held = take(folder / "lock")
    if held is None:
        raise _is_taken(run)
    try:
        sign(held, {"pid": os.getpid(), "host": socket.gethostname()})
        (folder / "status.json").unlink(missing_ok=True)  # of the driver before
        put_atomically(home / "cluster.json", json.dumps({"run": os.path.relpath(run, home)}).encode())
        try:
            yield
        finally:
            (folder / "scale.json").unlink(missing_ok=True)
    finally:
        os.close(held)


def write_status(run: Path, status: Status) -> None:
    """Put it in place of the one before, whole. A full disk is no reason to stop: then the one before stays."""
    document = {
        **asdict(status),
        "events": [asdict(event) for event in status.events[-EVENTS:]],
        "run": run.name,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "updated_at": _now(),
    }
    hidden = run / "cluster" / ".status.json.new"  # the holder of the lock is alone here
    with suppress(OSError):
        hidden.write_text(json.dumps(document, indent=1))
        hidden.replace(hidden.with_name("status.json"))


def asked_workers(run: Path) -> int | None:
    """How many workers `clickline scale` asks for."""
    asked = _document(run / "cluster" / "scale.json").get("workers")
    return asked if isinstance(asked, int) else None


# ── the others' ────────────────────────────────────────────────────────────────────────────────


def newest_run(home: Path) -> Path | None:
    """The folder of the cluster run that was begun last."""
    name = _document(home / "cluster.json").get("run")
    return home / name if isinstance(name, str) else None


def logs_of(run: Path) -> Path:
    return run / "cluster" / "logs"


def read_status(home: Path) -> dict[str, Any] | None:
    """The status of the newest cluster run, as a document; None if there was none.

    `alive` says whether its driver is; `asked` how many workers `clickline scale` asks for. The state is `lost` if
    the driver is gone without a word."""
    run = newest_run(home)
    if run is None:
        return None
    holder = holder_of(run / "cluster" / "lock")  # first: a driver writes its last status before it goes
    document = {"state": "starting", "run": run.name, **_document(run / "cluster" / "status.json")}
    if holder is not None and document.get("pid", holder.get("pid")) != holder.get("pid"):
        document = {
            "state": "starting",
            "run": run.name,
        }  # it wrote nothing yet: that is of the driver before
    if holder is None and document["state"] in ("starting", "waiting", "running"):
        document["state"] = "lost"
    document.update({key: holder[key] for key in ("pid", "host") if holder and key in holder})
    return {**document, "alive": holder is not None, "folder": str(run), "asked": asked_workers(run)}


def ask_workers(home: Path, workers: int) -> dict[str, Any]:
    """Tell the driver that is alive to go on with so many workers; returns its status. Raises ClusterError."""
    status = read_status(home)
    if status is None:
        raise ClusterError(
            f"no training on a cluster was begun in {home}. `clickline train` begins one, with train.mode: cluster."
        )
    if not status["alive"]:
        ended = "was lost without a word" if status["state"] == "lost" else f"is {status['state']}"
        raise ClusterError(
            f"no training runs on a cluster: run {status['run']} {ended}. `clickline train` goes on with it; "
            "train.workers says with how many workers."
        )
    most = status.get("most")
    if most is not None and workers > most:
        raise ClusterError(
            f"run {status['run']} was started with train.workers.max {most}, and {workers} are asked for. "
            f"Ask for at most {most}, or stop it and start it again with a higher one: it goes on where it was."
        )
    wish = {"workers": workers, "at": _now()}
    put_atomically(Path(status["folder"], "cluster", "scale.json"), json.dumps(wish).encode())
    return status


def _is_taken(run: Path) -> ClusterError:
    holder = holder_of(run / "cluster" / "lock")
    who = f" by pid {holder['pid']} on {holder['host']}" if holder else ""
    return ClusterError(
        f"run {run.name} is being trained already{who}. `clickline status` shows how far it is; "
        "end that process before you start another one."
    )


def _document(path: Path) -> dict[str, Any]:
    """Empty when there is none, or what a power cut left of it."""
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
