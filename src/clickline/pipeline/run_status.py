"""The status of the run of a home, read without disturbing it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clickline.config import Config
from clickline.errors import ClicklineError
from clickline.pipeline.endpoint import readiness
from clickline.pipeline.up_folder import UpFolder
from clickline.training.cluster.job_status import read_status

if TYPE_CHECKING:
    from clickline.artifacts.registry import Registry

_NEWEST = 3
_METRICS = ("auc", "logloss", "calibration")


def status(config: Config, versions: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The status as a document: state.json, what is read now, and the versions (`registry_summary`, unless given).

    `state` is never, starting, running, done, stopped, failed, or lost (it crashed)."""
    folder = UpFolder(config)
    run = folder.read()
    document = {key: value for key, value in run.document.items() if key != "born"}
    stages = document.get("stages", {})
    serving = "grpc" in stages.get("serve", {}).get("facts", {}) and run.state == "running"
    return {
        **document,
        "state": run.state,
        "stage": run.stage,
        "home": str(folder.home),
        "logs": str(folder.logs),
        "pid": run.holder.pid if run.holder else None,
        "processes": [{"role": one.role, "pid": one.pid} for one in run.processes],
        "cluster": _cluster(folder.home, document),
        "metrics": _metrics(stages),
        "health": readiness(config) if serving else None,
        "versions": registry_summary(config) if versions is None else versions,
    }


def _cluster(home: Path, document: dict[str, Any]) -> dict[str, Any] | None:
    """The training that runs on a cluster, even without `up`; or that was lost, if nothing has run since."""
    status = read_status(home)
    if status is None or status["alive"]:
        return status
    newest = status["state"] == "lost" and status.get("updated_at", "") >= document.get("updated", "")
    return status if newest else None


def _metrics(stages: dict[str, Any]) -> dict[str, Any]:
    """The latest metrics: those of the last hour, else those of the evaluation."""
    last = stages.get("follow", {}).get("facts", {}).get("last") or {}
    facts = last.get("progressive") or stages.get("evaluate", {}).get("facts", {})
    return {name: facts[name] for name in _METRICS if facts.get(name) is not None}


def registry_summary(config: Config, registry: Registry | None = None) -> dict[str, Any]:
    """Versions in the registry, which may be open already. An error is returned, not raised: the run may well be
    fine."""
    try:
        from clickline.artifacts.from_config import registry_of

        registry = registry or registry_of(config, any_version=True)
        current = registry.current()
        numbers = registry.numbers()
        newest = []
        for number in numbers[-_NEWEST:]:
            version = registry.version(number)
            newest.append({"version": number, "created": version.created, "table": version.manifest.table})
    except (ClicklineError, OSError) as error:
        return {"error": str(error)}
    return {
        "current": None if current is None else current.version,
        "pinned": current is not None and current.pinned,
        "since": None if current is None else current.at,
        "count": len(numbers),
        "newest": newest,
    }
