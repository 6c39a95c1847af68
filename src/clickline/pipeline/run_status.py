"""All that can be known of the run of a home, without disturbing it."""

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
_MEASURES = ("auc", "logloss", "calibration")


def status(config: Config, versions: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """As a document: that of state.json, what was looked up now, and the versions, if `registered` was not asked
    before.

    `state` is never, starting, running, done, stopped, failed, or lost: it ended without a word."""
    folder = UpFolder(config)
    seen = folder.look()
    document = {key: value for key, value in seen.document.items() if key != "born"}
    stages = document.get("stages", {})
    serving = "grpc" in stages.get("serve", {}).get("facts", {}) and seen.state == "running"
    return {
        **document,
        "state": seen.state,
        "stage": seen.stage,
        "home": str(folder.home),
        "logs": str(folder.logs),
        "pid": seen.holder.pid if seen.holder else None,
        "processes": [{"role": one.role, "pid": one.pid} for one in seen.processes],
        "cluster": _cluster(folder.home, document),
        "metrics": _metrics(stages),
        "health": readiness(config) if serving else None,
        "versions": registered(config) if versions is None else versions,
    }


def _cluster(home: Path, document: dict[str, Any]) -> dict[str, Any] | None:
    """The training that runs on a cluster, also without `up`; or that was lost, if nothing was run since."""
    found = read_status(home)
    if found is None or found["alive"]:
        return found
    newest = found["state"] == "lost" and found.get("updated_at", "") >= document.get("updated", "")
    return found if newest else None


def _metrics(stages: dict[str, Any]) -> dict[str, Any]:
    """The newest there are: of the last hour, else of the evaluation."""
    last = stages.get("follow", {}).get("facts", {}).get("last") or {}
    found = last.get("progressive") or stages.get("evaluate", {}).get("facts", {})
    return {name: found[name] for name in _MEASURES if found.get(name) is not None}


def registered(config: Config, registry: Registry | None = None) -> dict[str, Any]:
    """What the registry holds, which may be open already; an error there is told, not raised: the run may well go
    on."""
    try:
        from clickline.artifacts.from_config import registry_of

        registry = registry or registry_of(config, any_version=True)
        current = registry.current()
        numbers = registry.numbers()
        newest = []
        for number in numbers[-_NEWEST:]:
            version = registry.version(number)
            newest.append({"version": number, "created": version.created, "table": version.body.get("table")})
    except (ClicklineError, OSError) as error:
        return {"error": str(error)}
    return {
        "current": None if current is None else current.version,
        "pinned": current is not None and current.pinned,
        "since": None if current is None else current.at,
        "count": len(numbers),
        "newest": newest,
    }
