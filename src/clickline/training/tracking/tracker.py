"""What the trainer calls. No call waits for a store, and no store's failure reaches the trainer."""

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

from clickline.storage.atomic import put_atomically
from clickline.storage.redaction import Redactor, shown
from clickline.training.tracking.buffer import Buffer, Parcel, Point
from clickline.training.tracking.sender_process import Child

Status = Literal["FINISHED", "FAILED", "KILLED"]

_SEND_SECONDS = 2.0
_LONGEST_PAUSE = 30.0
_VALUES_PER_PARCEL = 1000
_LONGEST_PARAM = 500  # what every MLflow server takes
_DATABASE = re.compile(r"(sqlite|postgresql|mysql|mssql)(\+\w+)?:")


class Tracker:
    """What a training run calls. This one keeps nothing: tracking is off, or MLflow is not installed."""

    def params(self, values: Mapping[str, object]) -> None:
        """What the run was made with. Sections within are joined by dots: {"model": {"dim": 9}} is model.dim."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Figures of one step. A step that a resumed run comes by again is not recorded twice."""

    def artifact(self, path: Path) -> None:
        """A file to keep with the run, as it is when it is sent."""

    def close(self, status: Status) -> None:
        """Send what is left and say how the run ended; a store that is away is not waited for."""


class MlflowTracker(Tracker):
    """One run of one experiment in an MLflow store.

    The calls put values into a buffer; one thread hands them to a child process that speaks MLflow. When the
    store fails the thread tries again, ever more rarely, and what is left at the end is kept in
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
        self._where = shown(uri)
        self._redact = Redactor(_secrets(uri))
        self._warn = warn
        self._folder = folder
        self._unsent = folder / "tracking-unsent.jsonl"
        self._target = {"uri": uri, "experiment": experiment, "run_name": run_name, "artifacts": artifacts}
        self._patience = patience
        self._buffer = Buffer(capacity)
        self._child = Child()
        self._said: set[str] = set()
        self._failure = ""  # why the last attempt failed
        self._status: Status | None = None
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

    def close(self, status: Status) -> None:
        if self._status is not None:
            return
        self._status = status
        self._closing.set()
        self._thread.join(self._patience)
        if self._thread.is_alive():
            self._child.kill()  # the thread hears of it, keeps what is left in a file, and ends
            self._thread.join()

    def _work(self) -> None:
        try:
            self._child.target = {**self._target, "key": self._key()}
            self._load_unsent()
            complete = self._send_until_closed()
            self._child.end()
            self._keep_unsent(complete)
        except OSError as error:
            self._warn(f"tracking is off: {error}")

    def _send_until_closed(self) -> bool:
        """Whether all went out in the end. A store that failed after the run was over is not tried again."""
        reached = self._send(Parcel())  # the run is there from the start, before there are figures
        pause = 0.5
        while not self._closing.is_set():
            pause = _SEND_SECONDS if reached else min(2 * pause, _LONGEST_PAUSE)
            self._closing.wait(pause)
            reached = self._send_all()
        return reached and self._send_all() and self._send(Parcel(), self._status)

    def _send_all(self) -> bool:
        while parcel := self._buffer.take(_VALUES_PER_PARCEL):
            if not self._send(parcel):
                self._buffer.put_back(parcel)
                return False
        self._unsent.unlink(missing_ok=True)
        return True

    def _send(self, parcel: Parcel, status: Status | None = None) -> bool:
        points = [point.to_json() for point in parcel.points]
        message = {"params": parcel.params, "points": points, "artifacts": parcel.artifacts, "status": status}
        answer = self._child.ask(message)
        if "failed" in answer:
            self._failure = self._redact(answer["failed"])
            if not self._closing.is_set():
                kept = "Training goes on; what it has to say is kept and sent later."
                self._say_once("away", f"tracking: {self._where}: {self._failure}. {kept}")
            return False
        if "away" in self._said:
            self._say_once("back", f"tracking: {self._where} is back; what was kept is sent now.")
        for reason in answer["refused"]:
            self._say_once(
                "refused", f"tracking: {self._where} did not take everything: {self._redact(reason)}."
            )
        return True

    def _say_once(self, what: str, message: str) -> None:
        if what not in self._said:
            self._said.add(what)
            self._warn(message)

    def _key(self) -> str:
        """By which the run is found in the store; made once, before the store knows of the run."""
        path = self._folder / "tracking.json"
        if not path.exists():
            put_atomically(path, json.dumps({"key": secrets.token_hex(16)}).encode())
        return str(json.loads(path.read_bytes())["key"])

    def _load_unsent(self) -> None:
        if not self._unsent.exists():
            return
        try:
            with self._unsent.open(encoding="utf-8") as lines:
                self._buffer.put_back(Parcel.from_lines(lines))
        except (ValueError, KeyError, TypeError, AttributeError):
            aside = self._unsent.replace(self._unsent.with_suffix(".unreadable"))
            self._warn(
                f"tracking: what an earlier start left unsent cannot be read; it is put aside as {aside}."
            )

    def _keep_unsent(self, complete: bool) -> None:
        if self._buffer.dropped:
            self._warn(
                f"tracking: the figures of {self._buffer.dropped:,} steps, the oldest, were dropped: "
                f"{self._where} was away for longer than the {self._buffer.capacity:,} that are kept."
            )
        left = self._buffer.take()
        if left:
            put_atomically(self._unsent, left.to_lines().encode())
            self._warn(
                f"tracking: {self._where}: {self._failure}. The figures of {len(left.points):,} steps, "
                f"{len(left.params):,} parameters and {len(left.artifacts):,} files were not sent; they are kept "
                f"in {self._unsent} and go out when this run is started again."
            )
        elif not complete:
            self._warn(
                f"tracking: {self._where}: {self._failure}. It was not told that the run is {self._status}."
            )


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
    # With a bare database nobody else says where files go, and MLflow would take ./mlruns.
    artifacts = (home.absolute() / "mlflow-artifacts").as_uri() if database else None
    return MlflowTracker(uri, experiment, run_name, folder=folder, warn=warn, artifacts=artifacts)


def _flat(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            text = shown(str(value))
            yield f"{prefix}{name}", text if len(text) <= _LONGEST_PARAM else text[: _LONGEST_PARAM - 1] + "…"


def _secrets(uri: str) -> list[str]:
    """What must not be shown even where a message quotes it apart from the URI."""
    password = uri.rpartition("@")[0].rpartition(":")[2]
    return [password, *(os.environ.get(f"MLFLOW_TRACKING_{name}", "") for name in ("TOKEN", "PASSWORD"))]
