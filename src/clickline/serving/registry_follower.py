"""Follows the registry: polls its pointer, fetches and verifies new versions, and passes them to the rollout.

It runs in its own thread because stores may hang. While the store cannot be reached, the current version keeps serving.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Protocol

from clickline.artifacts.registry import Registry
from clickline.artifacts.version import Verifier, Version
from clickline.errors import ArtifactError, ClicklineError
from clickline.serving.rollout import FetchedVersion
from clickline.serving.server_log import ServerLog
from clickline.storage.redaction import redacted

_log = logging.getLogger(__name__)  # handled by ServerLog
_LOG_SECONDS = 300.0  # between two lines about the same problem
_FIRST_PAUSE, _LONGEST_PAUSE = 5.0, 300.0


class VersionSource(Protocol):
    """Where versions come from; str() gives its name for messages."""

    def current(self) -> tuple[int, int] | None:
        """Return the sequence number of the pointer's last move and the version it points to; None: nothing
        published."""

    def fetch(self, number: int) -> FetchedVersion:
        """Fetch and verify a version. ArtifactError: it is damaged; other errors may be temporary."""


class RegistrySource:
    """Versions from a registry."""

    def __init__(self, registry: Registry, copies: Path, *, tables: bool = True) -> None:
        """`copies`: folder for local copies of a remote registry. Without `tables` only the version's own files are
        fetched, because lookup servers have the rows."""
        self._registry = registry
        self._copies = copies
        self._tables = tables
        self._verifier = Verifier()
        self._chains: list[list[Version]] = []  # of the last two versions fetched

    def __str__(self) -> str:
        return redacted(self._registry.uri)

    def current(self) -> tuple[int, int] | None:
        move = self._registry.current()
        return None if move is None else (move.sequence, move.version)

    def fetch(self, number: int) -> FetchedVersion:
        version = self._registry.version(number)
        chain = self._registry.chain(version) if self._tables else [version]
        folders = []
        for member in chain:
            folder = self._registry.fetch(member, self._copies)
            self._verifier.check(member, folder)
            folders.append(str(folder))
        # Only now: a worker may still be about to open a copy of the version before.
        self._chains = [*self._chains[-1:], chain]
        needed = [member for recent in self._chains for member in recent]
        self._verifier.keep(member.number for member in needed)
        try:
            self._registry.remove_copies(self._copies, needed)
        except (ClicklineError, OSError) as error:  # does not keep the new version from serving
            _log.warning("old copies could not be removed: %s", error)
        created = datetime.fromisoformat(version.created).timestamp()
        return FetchedVersion(number, tuple(folders), created, version.manifest.model.data_until)


class RegistryFollower:
    """Polls a version source."""

    def __init__(
        self,
        source: VersionSource,
        poll: float,
        log: ServerLog,
        on_fetched: Callable[[FetchedVersion], None],
        on_refused: Callable[[int, str], None],
        on_first_poll: Callable[[], None] = lambda: None,
    ) -> None:
        """The callbacks run in the follower's thread: `on_refused` for damaged versions, `on_first_poll` after the
        first poll, whether it succeeded or not."""
        self.unreachable = False
        self._source = source
        self._poll = poll
        self._log = log
        self._on_fetched = on_fetched
        self._on_refused = on_refused
        self._on_first_poll = on_first_poll
        self._move: tuple[int, int] | None = None  # the pointer at the last poll
        self._not_before = 0.0  # when that version may be fetched; infinity: it has been
        self._pause = _FIRST_PAUSE
        self._logged = float("-inf")

    def start(self) -> None:
        threading.Thread(target=self._follow, name="follower", daemon=True).start()

    def retry_later(self, number: int) -> None:
        """Fetch a version again after a pause: it could not be loaded for a reason that may be temporary."""
        if self._move is not None and self._move[1] == number:
            self._not_before = time.monotonic() + self._pause
            self._pause = min(self._pause * 2, _LONGEST_PAUSE)

    def _follow(self) -> None:
        first = True
        while True:
            try:
                self.poll_once()
            except Exception as error:  # noqa: BLE001 - a bug here must not stop the polling
                self._log_unreachable(f"a bug: {error!r}")
            if first:
                first = False
                if self._move is None and not self.unreachable:
                    self._log.event("nothing is published yet", "warning", registry=str(self._source))
                self._on_first_poll()
            time.sleep(self._poll)

    def poll_once(self) -> None:
        """Poll once, and fetch the version if the pointer moved."""
        try:
            move = self._source.current()
        except (ClicklineError, OSError) as error:
            self._log_unreachable(str(error))
            return
        if move is None and self._move is not None:
            self._log_unreachable("it had versions before, and is now empty or missing")
            return
        if self.unreachable:
            self.unreachable, self._logged = False, float("-inf")
            self._log.event("the registry answers again")
        if move is None:
            return
        if move != self._move:
            self._move, self._not_before, self._pause = move, 0.0, _FIRST_PAUSE
        if time.monotonic() >= self._not_before:
            self._not_before = float("inf")
            self._fetch(move[1])

    def _fetch(self, number: int) -> None:
        try:
            fetched = self._source.fetch(number)
        except ArtifactError as error:
            self._on_refused(number, str(error))
        except (ClicklineError, OSError) as error:
            self._log.event("fetching a version failed", "warning", version=number, message=str(error))
            self.retry_later(number)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with a version, the next one may be good
            self._on_refused(number, f"it cannot be read: {error!r}")
        else:
            self._on_fetched(fetched)

    def _log_unreachable(self, message: str) -> None:
        self.unreachable = True
        if time.monotonic() - self._logged >= _LOG_SECONDS:
            self._logged = time.monotonic()
            self._log.event(
                "the registry cannot be reached", "warning", registry=str(self._source), message=message
            )
