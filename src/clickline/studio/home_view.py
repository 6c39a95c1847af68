"""Reads one home for all requests: slow work runs in threads, once for concurrent requests of the same thing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar, cast

from clickline.errors import ClicklineError
from clickline.pipeline.run_status import registry_summary, status
from clickline.pipeline.stage_logs import LOG_NAMES, LogReader, cluster_logs, is_cluster_role
from clickline.pipeline.up_folder import UpFolder
from clickline.storage.storage import Storage
from clickline.studio.dataset_view import DatasetView
from clickline.studio.homes import Home
from clickline.studio.runs_view import RunsView
from clickline.studio.serving_view import ServingView
from clickline.studio.versions_view import VersionsView
from clickline.training.cluster.job_status import read_status

_TIMEOUT_SECONDS = 20.0  # after this a request fails; the work continues for the next request
_REGISTRY_SECONDS = 2.0  # how long the status waits for the registry
_NEAR, _FAR = 0.5, 5.0  # seconds between two reads of a local and of a remote registry
_MAX_LINES = 5000

T = TypeVar("T")


class NotFound(ClicklineError):
    """The requested run, version or log does not exist."""


class SlowAnswer(ClicklineError):
    """A slow task did not finish in time."""


class HomeView:
    """The documents of one home."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self.versions = VersionsView(home.config)
        self.data = DatasetView(home.folder)
        self.runs = RunsView(home.folder)
        self.serving = ServingView(home.config)
        self._running: dict[str, asyncio.Task[Any]] = {}
        self._registry_summary: dict[str, Any] = {"error": "the registry has not been read yet"}
        self._registry_read_at = float("-inf")
        self._registry_stamp: object = None
        registry = home.config.publish.registry or home.config.home
        self._registry_interval = _NEAR if Storage.is_local(registry) else _FAR

    async def run_once(self, what: str, work: Callable[[], T], seconds: float = _TIMEOUT_SECONDS) -> T:
        """The result of slow work; concurrent calls for the same `what` share one run."""
        task = self._running.get(what)
        if task is None:
            task = self._running[what] = asyncio.create_task(asyncio.to_thread(work))
            task.add_done_callback(lambda done: self._discard(what, done))
        try:
            return cast(T, await asyncio.wait_for(asyncio.shield(task), seconds))
        except TimeoutError:
            if task.done():
                raise
            raise SlowAnswer(f"no answer within {seconds:g} s: {what}. It continues; try again.") from None

    @property
    def is_busy(self) -> bool:
        return bool(self._running)

    def _discard(self, what: str, done: asyncio.Task[Any]) -> None:
        del self._running[what]
        if not done.cancelled():
            done.exception()  # retrieved: it was raised in the calls that waited, if any

    # ── the documents ──────────────────────────────────────────────────────────────────────────

    async def state(self) -> str:
        return str((await self.run_once("state", self._state)).get("state"))

    async def status(self) -> dict[str, Any]:
        await self._refresh_registry()
        document = await self.run_once("status", self._status)
        return {**document, "now": datetime.now(UTC).isoformat(timespec="milliseconds")}

    async def list_runs(self) -> list[dict[str, Any]]:
        return await self.run_once("runs", lambda: self.runs.list(self._state()))

    async def all_versions(self) -> dict[str, Any]:
        return await self.run_once("versions", self.versions.all)

    async def all_data(self) -> dict[str, Any]:
        return await self.run_once("data", lambda: self.data.all(self._state()))

    async def cluster(self) -> dict[str, Any] | None:
        return await self.run_once("cluster", lambda: read_status(self.home.folder))

    async def log(self, name: str, lines: int) -> str:
        if name not in LOG_NAMES and not is_cluster_role(name):
            allowed = f"{', '.join(LOG_NAMES)}, driver, network, worker-N, shard-N"
            raise NotFound(f"there is no log with that name. Allowed: {allowed}.")
        return await self.run_once(f"log {name} {lines}", lambda: self._log(name, min(lines, _MAX_LINES)))

    async def stamps(self) -> dict[str, object]:
        """A value per document that changes when the document does."""
        return await self.run_once(
            "stamps",
            lambda: {
                "runs": self.runs.stamp(),
                "data": self.data.stamp(),
                "versions": self._registry_summary,
            },
        )

    # ── in threads ─────────────────────────────────────────────────────────────────────────────

    def _state(self) -> dict[str, Any]:
        """The state document of `up`."""
        try:
            info = UpFolder(self.home.config).read()
        except ClicklineError:  # the home is elsewhere
            return {"state": "never"}
        return {**info.document, "state": info.state}

    def _status(self) -> dict[str, Any]:
        about = {"name": self.home.name, "note": self._note()}
        try:
            document = status(self.home.config, self._registry_summary)
        except (ClicklineError, OSError) as error:
            failure = {"kind": type(error).__name__, "message": str(error)}
            return {
                **_EMPTY_STATUS,
                "home": self.home.config.home,
                "versions": self._registry_summary,
                **about,
            } | {"error": failure}
        return {**_EMPTY_STATUS, **document, **about}

    def _read_registry(self) -> dict[str, Any]:
        """Summary of the registry; a local registry that has not changed is not read again."""
        try:
            stamp = self.versions.stamp()
        except (ClicklineError, OSError) as error:
            return {"error": str(error)}
        if stamp is not None and stamp == self._registry_stamp:
            return self._registry_summary
        summary = registry_summary(self.home.config, self.versions.unverified)
        self._registry_stamp = None if "error" in summary else stamp
        return summary

    def _note(self) -> str | None:
        folder = Path(self.home.config.home)
        if not Storage.is_local(self.home.config.home):
            return f"{folder} is not on this machine, so its processes cannot be seen from here"
        return None if folder.is_dir() else f"{folder} does not exist yet, or was deleted"

    def _log(self, name: str, lines: int) -> str:
        folder = UpFolder(self.home.config)
        stages = [name] if name in LOG_NAMES else []
        reader = LogReader(folder.logs, stages, lambda: cluster_logs(folder.home, name))
        try:
            return "".join(f"{line.at} {line.text}\n" for line in reader.last(lines))
        finally:
            reader.close()

    async def _refresh_registry(self) -> None:
        """Read the registry again if it is due. It may be remote, so the rest does not wait long for it."""
        if time.monotonic() - self._registry_read_at < self._registry_interval:
            return
        try:
            self._registry_summary = await self.run_once("registry", self._read_registry, _REGISTRY_SECONDS)
            self._registry_read_at = time.monotonic()
        except SlowAnswer as slow:
            if "error" in self._registry_summary:
                self._registry_summary = {"error": str(slow)}


_EMPTY_STATUS: dict[str, Any] = {
    "state": "never",
    "stage": None,
    "stages": {},
    "work": None,
    "metrics": {},
    "health": None,
    "versions": {},
    "cluster": None,
    "processes": [],
    "error": None,
    "follow": False,
    "serve": False,
    "since": None,
    "ended": None,
    "pid": None,
    "studio": None,
}
