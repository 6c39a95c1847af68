"""The sender process: receives payloads from the tracker and logs them to MLflow. The only place that imports mlflow.

    python -P -m clickline.training.tracking.mlflow_sender FD

The first message names the run; each following message is a payload, answered by {"refused": [...]}, or by
{"failed": why} if nothing counts as sent. The process ends when the tracker's end is closed, also by kill -9. Standard
output and error are discarded, so whatever mlflow prints goes nowhere.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clickline.processes import ParentConnection
from clickline.storage.atomic import temporary_name

# Identifies a run: the key is generated once per run folder, so two machines that train the same config with one server
# have separate runs.
_KEY_TAG = "clickline.key"
# MLflow's limits per request.
_MAX_METRICS, _MAX_PARAMS = 1000, 100
_REJECTED_CODES = {"INVALID_PARAMETER_VALUE", "BAD_REQUEST", "MALFORMED_REQUEST"}


@dataclass(frozen=True)
class _Run:
    """An open MLflow run, and its content when it was opened."""

    client: Any
    id: str
    params: dict[str, str]
    last_step: dict[str, int]  # by metric


class MlflowStore:
    """One run in one MLflow store, local or remote."""

    def __init__(self, uri: str, experiment: str, run_name: str, key: str, artifacts: str | None) -> None:
        self._uri = uri
        self._experiment = experiment
        self._run_name = run_name
        self._key = key
        self._artifacts = artifacts  # location of a new experiment's files; None: the server decides
        self._run: _Run | None = None

    def handle(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Log a payload to the run. Sending it again after a failure adds no duplicates."""
        try:
            return {"refused": self._log_payload(payload)}
        except Exception as error:  # noqa: BLE001  stores raise all kinds of errors; each becomes an answer
            self._run = None  # look it up again next time: it may be on another server, or deleted
            return {"failed": _reason(error)}

    def _log_payload(self, payload: dict[str, Any]) -> list[str]:
        if self._run is None:
            self._run = self._open()
        run = self._run
        refused = self._log_params(run, payload["params"]) + self._log_points(run, payload["points"])
        for path in payload["artifacts"]:
            if Path(path).exists():
                run.client.log_artifact(run.id, path)
            else:
                refused.append(f"{path} no longer exists")
        if payload["status"]:
            run.client.set_terminated(run.id, payload["status"])
        return refused

    def _open(self) -> _Run:
        from mlflow import MlflowClient

        if self._uri.startswith("sqlite:///"):
            _create_database(Path(self._uri.removeprefix("sqlite:///").partition("?")[0]))
        client = MlflowClient(tracking_uri=self._uri)
        experiment = client.get_experiment_by_name(self._experiment)
        if experiment is None:
            experiment_id = client.create_experiment(self._experiment, artifact_location=self._artifacts)
        else:
            experiment_id = experiment.experiment_id
        found = client.search_runs([experiment_id], f"tags.`{_KEY_TAG}` = '{self._key}'", max_results=1)
        if not found:
            run = client.create_run(experiment_id, tags={_KEY_TAG: self._key}, run_name=self._run_name)
            return _Run(client, run.info.run_id, {}, {})
        run = found[0]
        client.update_run(run.info.run_id, status="RUNNING")
        # The public `metrics` has the newest values but not their steps.
        last_step = {metric.key: metric.step for metric in run.data._metric_objs}
        return _Run(client, run.info.run_id, dict(run.data.params), last_step)

    @staticmethod
    def _log_params(run: _Run, given: dict[str, str]) -> list[str]:
        """MLflow parameters cannot change; if a resumed run changes one, its new value becomes a tag."""
        from mlflow.entities import Param, RunTag

        params = {_name(name): value for name, value in given.items()}
        new = [Param(name, value) for name, value in params.items() if name not in run.params]
        changed = [
            RunTag(f"changed.{name}", value)
            for name, value in params.items()
            if run.params.get(name, value) != value
        ]
        refused = _log_batches(run, "params", new, _MAX_PARAMS) + _log_batches(
            run, "tags", changed, _MAX_PARAMS
        )
        run.params.update(params)
        return refused

    @staticmethod
    def _log_points(run: _Run, points: list[dict[str, Any]]) -> list[str]:
        """Skip steps that the run had when it was opened: resumed training repeats them."""
        from mlflow.entities import Metric

        metrics = [
            Metric(_name(name), float(value), point["time_ms"], point["step"])
            for point in points
            for name, value in point["values"].items()
            if point["step"] > run.last_step.get(_name(name), -1)
        ]
        return _log_batches(run, "metrics", metrics, _MAX_METRICS)


def _create_database(path: Path) -> None:
    """Create a missing SQLite store, under a temporary name first.

    MLflow runs all its migrations to create one. That takes seconds, and a database that is left in the middle of them
    is unusable.
    """
    from mlflow import MlflowClient

    if path.exists():
        return
    hidden = path.with_name(temporary_name(path.name))
    try:
        MlflowClient(tracking_uri=f"sqlite:///{hidden}").search_experiments(max_results=1)
        with suppress(FileExistsError):  # another training run created it in the meantime
            path.hardlink_to(hidden)
    finally:
        hidden.unlink(missing_ok=True)


def _log_batches(run: _Run, kind: str, items: Sequence[Any], size: int) -> list[str]:
    """Log params, tags or metrics, `size` at a time; returns why the store will never accept some, so that the rest is
    still sent."""
    from mlflow.exceptions import MlflowException

    refused = []
    for start in range(0, len(items), size):
        try:
            run.client.log_batch(run.id, **{kind: items[start : start + size]})
        except MlflowException as error:
            if error.error_code not in _REJECTED_CODES:
                raise
            refused.append(_first_line(error))
    return refused


def _name(name: str) -> str:
    """MLflow accepts letters, digits and a few symbols."""
    return re.sub(r"[^\w./ -]", "_", name)


def _reason(error: BaseException) -> str:
    from requests import exceptions

    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, exceptions.Timeout | exceptions.ConnectionError):
            return "it does not answer"
        cause = cause.__cause__ or cause.__context__
    return _first_line(error)


def _first_line(error: BaseException) -> str:
    line = next(iter(str(error).splitlines()), "") or type(error).__name__
    return line if len(line) <= 300 else line[:299] + "…"


def main() -> None:
    parent = ParentConnection(int(sys.argv[1]))
    store = MlflowStore(**parent.request)
    with suppress(ConnectionError):  # the parent process has died
        for payload in parent.messages():
            parent.send(**store.handle(payload))


if __name__ == "__main__":
    main()
