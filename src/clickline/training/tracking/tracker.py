"""The tracker that the trainer calls. No call waits for a store, and no failure of a store reaches the trainer."""

from __future__ import annotations

import json
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from clickline.config import Config
from clickline.progress import Progress
from clickline.storage.atomic import put_atomically
from clickline.storage.redaction import Redactor, redacted
from clickline.training.tracking.buffer import Payload, Point, TrackingBuffer
from clickline.training.tracking.sender_process import SenderProcess

RunStatus = Literal["FINISHED", "FAILED", "KILLED"]

_SEND_SECONDS = 2.0
_MAX_PAUSE = 30.0
_VALUES_PER_PAYLOAD = 1000
_MAX_PARAM_CHARS = 500  # accepted by every MLflow server
_DATABASE = re.compile(r"(sqlite|postgresql|mysql|mssql)(\+\w+)?:")


class Tracker:
    """The interface for training runs. This class records nothing: tracking is off, or MLflow is not installed."""

    def params(self, values: Mapping[str, object]) -> None:
        """Parameters of the run. Nested sections are joined by dots: {"model": {"dim": 9}} is model.dim."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Metrics of one step. A step that a resumed run repeats is not recorded twice."""

    def artifact(self, path: Path) -> None:
        """Attach a file to the run, with its content at the time of sending."""

    def close(self, status: RunStatus) -> None:
        """Send the rest and record how the run ended; does not wait for an unreachable store."""


class MlflowTracker(Tracker):
    """One run of one experiment in an MLflow store.

    Calls put values into a buffer; one thread passes them to a child process that talks to MLflow. When the store
    fails, the thread retries with growing pauses, and what is unsent at the end is saved to
    `folder`/tracking-unsent.jsonl for the next start of the same run. `warn` is called from that thread.
    """

    def __init__(
        self,
        uri: str,
        experiment: str,
        run_name: str,
        *,
        folder: Path,
        warn: Callable[[str], None],
        artifacts: str | None = None,
        capacity: int = 20_000,
        patience: float = 20.0,
    ) -> None:
        self._store_name = redacted(uri)
        self._redact = Redactor(_secrets(uri))
        self._warn = warn
        self._folder = folder
        self._unsent = folder / "tracking-unsent.jsonl"
        self._target = {"uri": uri, "experiment": experiment, "run_name": run_name, "artifacts": artifacts}
        self._patience = patience
        self._buffer = TrackingBuffer(capacity)
        self._sender = SenderProcess()
        self._warned: set[str] = set()
        self._failure = ""  # of the last attempt
        self._status: RunStatus | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="tracking", daemon=True)
        self._thread.start()

    def params(self, values: Mapping[str, object]) -> None:
        self._buffer.add_params(dict(_flat(values)))

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        point = Point(step, time.time_ns() // 1_000_000, {name: float(x) for name, x in values.items()})
        self._buffer.add_point(point)

    def artifact(self, path: Path) -> None:
        self._buffer.add_artifact(str(path.absolute()))

    def close(self, status: RunStatus) -> None:
        if self._status is not None:
            return
        self._status = status
        self._closing.set()
        self._thread.join(self._patience)
        if self._thread.is_alive():
            self._sender.kill()  # the thread then saves what is unsent to a file, and ends
            self._thread.join()

    def _work(self) -> None:
        try:
            self._sender.target = {**self._target, "key": self._key()}
            self._load_unsent()
            complete = self._send_until_closed()
            self._sender.close()
            self._keep_unsent(complete)
        except OSError as error:
            self._warn(f"tracking is off: {error}")

    def _send_until_closed(self) -> bool:
        """Whether everything was sent in the end. After the run is over, a failed store is not retried."""
        reached = self._send(Payload())  # creates the run before there are metrics
        pause = 0.5
        while not self._closing.is_set():
            pause = _SEND_SECONDS if reached else min(2 * pause, _MAX_PAUSE)
            self._closing.wait(pause)
            reached = self._send_all()
        return reached and self._send_all() and self._send(Payload(), self._status)

    def _send_all(self) -> bool:
        while payload := self._buffer.take(_VALUES_PER_PAYLOAD):
            if not self._send(payload):
                self._buffer.put_back(payload)
                return False
        self._unsent.unlink(missing_ok=True)
        return True

    def _send(self, payload: Payload, status: RunStatus | None = None) -> bool:
        points = [point.to_json() for point in payload.points]
        message = {
            "params": payload.params,
            "points": points,
            "artifacts": payload.artifacts,
            "status": status,
        }
        answer = self._sender.request(message)
        if "failed" in answer:
            self._failure = self._redact(answer["failed"])
            if not self._closing.is_set():
                kept = "Training continues; its metrics are kept and sent later."
                self._warn_once("away", f"tracking: {self._store_name}: {self._failure}. {kept}")
            return False
        if "away" in self._warned:
            self._warn_once(
                "back", f"tracking: {self._store_name} is reachable again; the kept metrics are being sent."
            )
        for reason in answer["refused"]:
            self._warn_once(
                "refused", f"tracking: {self._store_name} rejected some values: {self._redact(reason)}."
            )
        return True

    def _warn_once(self, what: str, message: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            self._warn(message)

    def _key(self) -> str:
        """The key that identifies the run in the store; created once, before the run exists there."""
        path = self._folder / "tracking.json"
        if not path.exists():
            put_atomically(path, json.dumps({"key": secrets.token_hex(16)}).encode())
        return str(json.loads(path.read_bytes())["key"])

    def _load_unsent(self) -> None:
        if not self._unsent.exists():
            return
        try:
            with self._unsent.open(encoding="utf-8") as lines:
                self._buffer.put_back(Payload.from_lines(lines))
        except (ValueError, KeyError, TypeError, AttributeError):
            aside = self._unsent.replace(self._unsent.with_suffix(".unreadable"))
            self._warn(
                f"tracking: the unsent metrics of an earlier start cannot be read; they were moved to {aside}."
            )

    def _keep_unsent(self, complete: bool) -> None:
        if self._buffer.dropped:
            self._warn(
                f"tracking: the metrics of the oldest {self._buffer.dropped:,} steps were dropped: "
                f"{self._store_name} was unreachable for more than the {self._buffer.capacity:,} steps that are kept."
            )
        unsent = self._buffer.take()
        if unsent:
            put_atomically(self._unsent, unsent.to_lines().encode())
            self._warn(
                f"tracking: {self._store_name}: {self._failure}. The metrics of {len(unsent.points):,} steps, "
                f"{len(unsent.params):,} parameters and {len(unsent.artifacts):,} files were not sent; they are saved "
                f"in {self._unsent} and will be sent when this run is started again."
            )
        elif not complete:
            self._warn(
                f"tracking: {self._store_name}: {self._failure}. The final status {self._status} was not recorded."
            )


def tracker_of(config: Config, run: Path, progress: Progress) -> Tracker:
    """A tracker that records the run in MLflow, or nothing if that is off or not installed."""
    tracking = config.tracking
    if tracking.enabled is False or (tracking.enabled is None and find_spec("mlflow") is None):
        return Tracker()
    home, experiment = Path(config.home), tracking.experiment or config.name
    return open_tracker(tracking.uri, experiment, run.name, home=home, folder=run, warn=progress.log)


def open_tracker(
    uri: str | None, experiment: str, run_name: str, *, home: Path, folder: Path, warn: Callable[[str], None]
) -> Tracker:
    """A tracker for the run in `folder`. Without a URI the store is a SQLite file in `home`."""
    if uri is None:
        uri = f"sqlite:///{home.absolute() / 'mlflow.db'}"
    database = _DATABASE.match(uri) is not None
    if any(find_spec(name) is None for name in ("mlflow", *(("alembic", "sqlalchemy") if database else ()))):
        warn("tracking is off: pip install 'clickline[tracking]'")
        return Tracker()
    # A bare database has no file location of its own, and MLflow would use ./mlruns.
    artifacts = (home.absolute() / "mlflow-artifacts").as_uri() if database else None
    return MlflowTracker(uri, experiment, run_name, folder=folder, warn=warn, artifacts=artifacts)


def _flat(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            text = redacted(str(value))
            yield (
                f"{prefix}{name}",
                text if len(text) <= _MAX_PARAM_CHARS else text[: _MAX_PARAM_CHARS - 1] + "…",
            )


def _secrets(uri: str) -> list[str]:
    """Secrets that must be redacted even where a message quotes them without the URI."""
    password = uri.rpartition("@")[0].rpartition(":")[2]
    return [password, *(os.environ.get(f"MLFLOW_TRACKING_{name}", "") for name in ("TOKEN", "PASSWORD"))]
