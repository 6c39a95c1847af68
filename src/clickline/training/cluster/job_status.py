"""The status of a cluster run in plain files, shared by its driver and other commands.

    <home>/cluster.json          the newest run
    <run>/cluster/lock           held by the driver while it lives; contains its pid and host
                  status.json    progress; only the driver writes it
                  scale.json     workers requested by `clickline scale`; only the driver removes it
                  logs/          one file per process: driver.log, worker-3.log, shard-0.log, network.log

A request of `clickline scale` survives a driver that is killed and is removed by one that ends by itself.
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
from clickline.storage.file_lock import acquire, read_owner, write_owner

EVENTS = 20


@dataclass(frozen=True)
class WorkerStatus:
    """State of one worker."""

    name: str  # worker-3
    node: str
    state: str  # starting, learning, idle, lost
    at: str = ""  # "step 120", "unit 3, batch 17"
    rows: int = 0
    rows_per_second: float = 0.0
    memory: int = 0


@dataclass(frozen=True)
class ServerStatus:
    """State of one stateful actor: an embedding server, or the dense parameter server, which has no ids."""

    name: str  # shard-0, network
    node: str
    ids: int | None = None
    memory: int = 0
    limit: int | None = None


@dataclass(frozen=True)
class LeaseCounts:
    """Work units of the epoch by state."""

    todo: int
    open: int
    done: int


@dataclass(frozen=True)
class CheckpointStatus:
    """The last checkpoint."""

    step: int
    at: str
    seconds: float  # to write it
    stalled: float = 0.0  # of these, how long training stood still


@dataclass(frozen=True)
class JobMetrics:
    """Progress and metrics of training."""

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


@dataclass(frozen=True)
class JobStatus:
    """Status of a cluster run, as `clickline status` shows it. Times are UTC in ISO 8601."""

    state: Literal["starting", "waiting", "running", "done", "stopped", "failed"]
    mode: Literal["sync", "async"]
    generation: int = 0  # number of rollbacks to a checkpoint
    workers: tuple[WorkerStatus, ...] = ()
    shards: tuple[ServerStatus, ...] = ()
    network: ServerStatus | None = None
    leases: LeaseCounts | None = None
    last_checkpoint: CheckpointStatus | None = None
    metrics: JobMetrics = JobMetrics()
    events: tuple[Event, ...] = ()  # the newest last
    most: int | None = None  # train.workers.max
    message: str = ""  # what the job waits for, or why it failed


# ── the driver's side ──────────────────────────────────────────────────────────────────────────


@contextmanager
def driver_lock(home: Path, run: Path) -> Iterator[None]:
    """Hold the driver lock of a run and make it the newest run of its home. Raises ClusterError if it is taken."""
    folder = run / "cluster"
    logs_folder(run).mkdir(parents=True, exist_ok=True)
    held = acquire(folder / "lock")
    if held is None:
        raise _already_running(run)
    try:
        write_owner(held, {"pid": os.getpid(), "host": socket.gethostname()})
        (folder / "status.json").unlink(missing_ok=True)  # of the previous driver
        put_atomically(home / "cluster.json", json.dumps({"run": os.path.relpath(run, home)}).encode())
        try:
            yield
        finally:
            (folder / "scale.json").unlink(missing_ok=True)
    finally:
        os.close(held)


def write_status(run: Path, status: JobStatus) -> None:
    """Replace the status file atomically. On a full disk the previous one stays, and training continues."""
    document = {
        **asdict(status),
        "events": [asdict(event) for event in status.events[-EVENTS:]],
        "run": run.name,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "updated_at": timestamp(),
    }
    hidden = run / "cluster" / ".status.json.new"  # only the lock holder writes here
    with suppress(OSError):
        hidden.write_text(json.dumps(document, indent=1))
        hidden.replace(hidden.with_name("status.json"))


def requested_workers(run: Path) -> int | None:
    """The number of workers requested by `clickline scale`."""
    workers = _document(run / "cluster" / "scale.json").get("workers")
    return workers if isinstance(workers, int) else None


# ── other commands ─────────────────────────────────────────────────────────────────────────────


def newest_run(home: Path) -> Path | None:
    """The folder of the cluster run that was started last."""
    name = _document(home / "cluster.json").get("run")
    return home / name if isinstance(name, str) else None


def logs_folder(run: Path) -> Path:
    return run / "cluster" / "logs"


def read_status(home: Path) -> dict[str, Any] | None:
    """The status of the newest cluster run, as a document; None if there was none.

    `alive`: whether its driver is alive; `requested`: workers, by `clickline scale`. The state is `lost` if the driver
    died without writing a final status."""
    run = newest_run(home)
    if run is None:
        return None
    # First the lock: a driver writes its final status before it releases it.
    holder = read_owner(run / "cluster" / "lock")
    document = {"state": "starting", "run": run.name, **_document(run / "cluster" / "status.json")}
    if holder is not None and document.get("pid", holder.get("pid")) != holder.get("pid"):
        document = {"state": "starting", "run": run.name}  # the file is of the previous driver
    if holder is None and document["state"] in ("starting", "waiting", "running"):
        document["state"] = "lost"
    document.update({key: holder[key] for key in ("pid", "host") if holder and key in holder})
    return {**document, "alive": holder is not None, "folder": str(run), "requested": requested_workers(run)}


def request_workers(home: Path, workers: int) -> dict[str, Any]:
    """Request a number of workers from the running driver; returns its status. Raises ClusterError."""
    status = read_status(home)
    if status is None:
        raise ClusterError(
            f"no cluster training was started in {home}. `clickline train` with train.mode: cluster starts one."
        )
    if not status["alive"]:
        ended = "died without a final status" if status["state"] == "lost" else f"is {status['state']}"
        raise ClusterError(
            f"no cluster training is running: run {status['run']} {ended}. `clickline train` resumes it; "
            "train.workers sets the number of workers."
        )
    max_workers = status.get("most")
    if max_workers is not None and workers > max_workers:
        raise ClusterError(
            f"run {status['run']} was started with train.workers.max {max_workers}, and {workers} were requested. "
            f"Request at most {max_workers}, or restart the run with a higher limit: it resumes where it was."
        )
    request = {"workers": workers, "at": timestamp()}
    put_atomically(Path(status["folder"], "cluster", "scale.json"), json.dumps(request).encode())
    return status


def _already_running(run: Path) -> ClusterError:
    holder = read_owner(run / "cluster" / "lock")
    owner = f" by pid {holder['pid']} on {holder['host']}" if holder else ""
    return ClusterError(
        f"run {run.name} is already being trained{owner}. `clickline status` shows its progress; "
        "stop that process before you start another one."
    )


def _document(path: Path) -> dict[str, Any]:
    """The JSON document; empty if the file is missing or damaged, for example by a power failure."""
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def timestamp() -> str:
    """The current time as the files have it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")
