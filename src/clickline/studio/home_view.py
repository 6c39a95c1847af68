"""One home, looked at by anybody: what is slow is done in threads, once for all who ask at the same time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar, cast

from clickline.errors import ClicklineError
from clickline.pipeline.run_status import registry_summary, status
from clickline.pipeline.stage_logs import LOG_NAMES, LogReader, is_cluster_role, cluster_logs
from clickline.pipeline.up_folder import UpFolder
from clickline.storage.storage import Storage
from clickline.studio.dataset_view import Data
from clickline.studio.homes import Home
from clickline.studio.runs import Runs
from clickline.studio.serving_view import Serving
from clickline.studio.versions_view import Versions
from clickline.training.cluster.job_status import read_status

_LONGEST = 20.0  # seconds for an answer; what takes longer goes on, for the next one who asks
_REGISTRY_SECONDS = 2.0  # that the status waits for the registry
_NEAR, _FAR = 0.5, 5.0  # seconds between two looks at a registry on this machine, and elsewhere
_MOST_LINES = 5000

T = TypeVar("T")


class NotThere(ClicklineError):
    """No such run, version or log."""


class Slow(ClicklineError):
    """Something did not answer in time."""


class View:
    """What can be asked of one home."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self.versions = Versions(home.config)
        self.data = Data(home.folder)
        self.runs = Runs(home.folder)
        self.serving = Serving(home.config)
        self._running: dict[str, asyncio.Task[Any]] = {}
        self._registered: dict[str, Any] = {"error": "the registry was not asked yet"}
        self._registered_at = float("-inf")
        self._registry_stamp: object = None
        registry = home.config.publish.registry or home.config.home
        self._patience = _NEAR if Storage.is_local(registry) else _FAR

    async def once(self, what: str, work: Callable[[], T], seconds: float = _LONGEST) -> T:
        """The result of slow work. Whoever asks for the same while it runs gets the same."""
        task = self._running.get(what)
        if task is None:
            task = self._running[what] = asyncio.create_task(asyncio.to_thread(work))
            task.add_done_callback(lambda done: self._forget(what, done))
        try:
            return cast(T, await asyncio.wait_for(asyncio.shield(task), seconds))
        except TimeoutError:
            if task.done():
                raise
            raise Slow(f"no answer within {seconds:g} s: {what}. It goes on; ask again.") from None

    @property
    def waits(self) -> bool:
        return bool(self._running)

    def _forget(self, what: str, done: asyncio.Task[Any]) -> None:
        del self._running[what]
        if not done.cancelled():
            done.exception()  # it was told to those who asked, if any were left

    # ── what is asked ──────────────────────────────────────────────────────────────────────────

    async def state(self) -> str:
        return str((await self.once("state", self._state)).get("state"))

    async def status(self) -> dict[str, Any]:
        await self._look_at_registry()
        found = await self.once("status", self._status)
        return {**found, "now": datetime.now(UTC).isoformat(timespec="milliseconds")}

    async def list_runs(self) -> list[dict[str, Any]]:
        return await self.once("runs", lambda: self.runs.list(self._state()))

    async def all_versions(self) -> dict[str, Any]:
        return await self.once("versions", self.versions.all)

    async def all_data(self) -> dict[str, Any]:
        return await self.once("data", lambda: self.data.all(self._state()))

    async def cluster(self) -> dict[str, Any] | None:
        return await self.once("cluster", lambda: read_status(self.home.folder))

    async def log(self, name: str, lines: int) -> str:
        if name not in LOG_NAMES and not is_cluster_role(name):
            allowed = f"{', '.join(LOG_NAMES)}, driver, network, worker-N, shard-N"
            raise NotThere(f"there is no log of that name. Allowed: {allowed}.")
        return await self.once(f"log {name} {lines}", lambda: self._log(name, min(lines, _MOST_LINES)))

    async def stamps(self) -> dict[str, object]:
        """Each changes when there is something new to fetch under its name."""
        return await self.once(
            "stamps",
            lambda: {"runs": self.runs.stamp(), "data": self.data.stamp(), "versions": self._registered},
        )

    # ── in threads ─────────────────────────────────────────────────────────────────────────────

    def _state(self) -> dict[str, Any]:
        """What `up` says of itself."""
        try:
            seen = UpFolder(self.home.config).read()
        except ClicklineError:  # the home is elsewhere
            return {"state": "never"}
        return {**seen.document, "state": seen.state}

    def _status(self) -> dict[str, Any]:
        about = {"name": self.home.name, "note": self._note()}
        try:
            found = status(self.home.config, self._registered)
        except (ClicklineError, OSError) as error:
            told = {"kind": type(error).__name__, "message": str(error)}
            return {**_NOTHING, "home": self.home.config.home, "versions": self._registered, **about} | {
                "error": told
            }
        return {**_NOTHING, **found, **about}

    def _look_again(self) -> dict[str, Any]:
        """What the registry holds; a local one that has not changed is not read again."""
        try:
            stamp = self.versions.stamp()
        except (ClicklineError, OSError) as error:
            return {"error": str(error)}
        if stamp is not None and stamp == self._registry_stamp:
            return self._registered
        found = registry_summary(self.home.config, self.versions.shown)
        self._registry_stamp = None if "error" in found else stamp
        return found

    def _note(self) -> str | None:
        folder = Path(self.home.config.home)
        if not Storage.is_local(self.home.config.home):
            return f"{folder} is not on this machine: what runs there cannot be seen from here"
        return None if folder.is_dir() else f"{folder} is not there yet, or not any more"

    def _log(self, name: str, lines: int) -> str:
        folder = UpFolder(self.home.config)
        stages = [name] if name in LOG_NAMES else []
        reader = LogReader(folder.logs, stages, lambda: cluster_logs(folder.home, name))
        try:
            return "".join(f"{line.at} {line.text}\n" for line in reader.last(lines))
        finally:
            reader.close()

    async def _look_at_registry(self) -> None:
        """It may be far away: the rest does not wait long for it."""
        if time.monotonic() - self._registered_at < self._patience:
            return
        try:
            self._registered = await self.once("registry", self._look_again, _REGISTRY_SECONDS)
            self._registered_at = time.monotonic()
        except Slow as slow:
            if "error" in self._registered:
                self._registered = {"error": str(slow)}


_NOTHING: dict[str, Any] = {
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
