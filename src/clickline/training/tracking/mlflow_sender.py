"""The other process: takes parcels from our side and puts them into MLflow. The only place that imports mlflow.

    python -P -m clickline.training.tracking.mlflow_sender FD

FD is one end of a pair of sockets. The first message says which run it is about; each one after it is a parcel,
answered by {"refused": [...]}, or by {"failed": why} if nothing may be taken for sent. It ends when the other
end is closed, also by kill -9. What mlflow prints goes nowhere: standard output and error are closed off.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from clickline.storage.atomic import hidden_name

# How a run is found again: the key is made once for each run folder, so two machines that train the same
# thing into one server keep their runs apart.
_KEY_TAG = "clickline.key"
# The most that one request to MLflow may hold.
_MOST_METRICS, _MOST_PARAMS = 1000, 100
_REFUSALS = {"INVALID_PARAMETER_VALUE", "BAD_REQUEST", "MALFORMED_REQUEST"}


@dataclass(frozen=True)
class _Run:
    """An MLflow run that is there, and what it held when it was opened."""

    client: Any
    id: str
    params: dict[str, str]
    last_step: dict[str, int]  # by metric


class Store:
    """One run in one MLflow store, wherever that is."""

    def __init__(self, uri: str, experiment: str, run_name: str, key: str, artifacts: str | None) -> None:
        self._uri = uri
        self._experiment = experiment
        self._run_name = run_name
        self._key = key
        self._artifacts = artifacts  # where a new experiment keeps its files; None: the server decides
        self._run: _Run | None = None

    def answer(self, parcel: dict[str, Any]) -> dict[str, Any]:
        """Put a parcel into the run. Sent again after a failure it adds nothing twice."""
        try:
            return {"refused": self._accept(parcel)}
        except Exception as error:  # noqa: BLE001  stores raise what they like; all of it is an answer
            self._run = None  # look again next time: it may be another server's, or gone
            return {"failed": _reason(error)}

    def _accept(self, parcel: dict[str, Any]) -> list[str]:
        if self._run is None:
            self._run = self._open()
        run = self._run
        refused = self._log_params(run, parcel["params"]) + self._log_points(run, parcel["points"])
        for path in parcel["artifacts"]:
            if Path(path).exists():
                run.client.log_artifact(run.id, path)
            else:
                refused.append(f"{path} is no longer there")
        if parcel["status"]:
            run.client.set_terminated(run.id, parcel["status"])
        return refused

    def _open(self) -> _Run:
        from mlflow import MlflowClient

        if self._uri.startswith("sqlite:///"):
            _make_database(Path(self._uri.removeprefix("sqlite:///").partition("?")[0]))
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
        """MLflow never changes a parameter; the new value of one that a resumed run changed becomes a tag."""
        from mlflow.entities import Param, RunTag

        params = {_name(name): value for name, value in given.items()}
        new = [Param(name, value) for name, value in params.items() if name not in run.params]
        changed = [
            RunTag(f"changed.{name}", value)
            for name, value in params.items()
            if run.params.get(name, value) != value
        ]
        refused = []
        for some in _slices(new, _MOST_PARAMS):
            refused += _try(lambda some=some: run.client.log_batch(run.id, params=some))
        for some in _slices(changed, _MOST_PARAMS):
            refused += _try(lambda some=some: run.client.log_batch(run.id, tags=some))
        run.params.update(params)
        return refused

    @staticmethod
    def _log_points(run: _Run, points: list[dict[str, Any]]) -> list[str]:
        """Steps the run held when it was opened are left out: a resumed training walks over them again."""
        from mlflow.entities import Metric

        metrics = [
            Metric(_name(name), float(value), point["time_ms"], point["step"])
            for point in points
            for name, value in point["values"].items()
            if point["step"] > run.last_step.get(_name(name), -1)
        ]
        refused = []
        for some in _slices(metrics, _MOST_METRICS):
            refused += _try(lambda some=some: run.client.log_batch(run.id, metrics=some))
        return refused


def _make_database(path: Path) -> None:
    """Make a SQLite store that is not there yet, under another name first.

    MLflow walks through all its migrations to make one. That takes seconds, and a database left in the middle of
    them is of no use to anybody ever after.
    """
    from mlflow import MlflowClient

    if path.exists():
        return
    hidden = path.with_name(hidden_name(path.name))
    try:
        MlflowClient(tracking_uri=f"sqlite:///{hidden}").search_experiments(max_results=1)
        with suppress(FileExistsError):  # another training has made it meanwhile
            path.hardlink_to(hidden)
    finally:
        hidden.unlink(missing_ok=True)


def _slices(things: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(things), size):
        yield things[start : start + size]


def _try(call: Any) -> list[str]:
    """Make the call; what the store will never take is returned as a reason, so that the rest gets through."""
    from mlflow.exceptions import MlflowException

    try:
        call()
    except MlflowException as error:
        if error.error_code not in _REFUSALS:
            raise
        return [_first_line(error)]
    return []


def _name(name: str) -> str:
    """MLflow takes letters, digits and a few signs."""
    return re.sub(r"[^\w./ -]", "_", name)


def _reason(error: BaseException) -> str:
    from requests import exceptions

    link: BaseException | None = error
    while link is not None:
        if isinstance(link, exceptions.Timeout | exceptions.ConnectionError):
            return "it does not answer"
        link = link.__cause__ or link.__context__
    return _first_line(error)


def _first_line(error: BaseException) -> str:
    line = next(iter(str(error).splitlines()), "") or type(error).__name__
    return line if len(line) <= 300 else line[:299] + "…"


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    try:
        store = Store(**json.loads(connection.recv_bytes()))
        while True:
            answer = store.answer(json.loads(connection.recv_bytes()))
            connection.send_bytes(json.dumps(answer).encode())
    except (EOFError, ConnectionError):
        pass  # whoever started us is done, or dead


if __name__ == "__main__":
    main()
