"""Follows the registry: looks where its pointer is, fetches and checks what is new, offers it to the workers.

A thread of its own, because stores may hang. While the store cannot be reached the current version goes on answering.
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
from clickline.serving.rollout import Offer
from clickline.serving.server_log import Log
from clickline.storage.redaction import shown

_log = logging.getLogger(__name__)  # the service's own log hears it
_SILENT_SECONDS = 300.0  # between two lines about the same trouble
_FIRST_PAUSE, _LONGEST_PAUSE = 5.0, 300.0


class Source(Protocol):
    """Where versions come from; as text, what people call it."""

    def current(self) -> tuple[int, int] | None:
        """The number of the pointer's last move and the version it points to; None: nothing published yet."""

    def fetch(self, number: int) -> Offer:
        """The version with its files here and whole. ArtifactError: it never will be; others: not now."""


class RegistrySource:
    """Versions of a registry."""

    def __init__(self, registry: Registry, copies: Path, *, tables: bool = True) -> None:
        """`copies`: where those of a remote registry go. Without `tables` only the version's own files are fetched:
        lookup servers have the rows."""
        self._registry = registry
        self._copies = copies
        self._tables = tables
        self._verifier = Verifier()
        self._chains: list[list[Version]] = []  # of the version that was fetched last, and the one before

    def __str__(self) -> str:
        return shown(self._registry.uri)

    def current(self) -> tuple[int, int] | None:
        move = self._registry.current()
        return None if move is None else (move.sequence, move.version)

    def fetch(self, number: int) -> Offer:
        version = self._registry.version(number)
        chain = self._registry.chain(version) if self._tables else [version]
        folders = []
        for one in chain:
            folder = self._registry.fetch(one, self._copies)
            self._verifier.check(one, folder)
            folders.append(str(folder))
        # Only now: a copy that no longer serves may still be what a worker is about to open.
        self._chains = [*self._chains[-1:], chain]
        kept = [one for known in self._chains for one in known]
        self._verifier.keep(one.number for one in kept)
        try:
            self._registry.forget(self._copies, kept)
        except (ClicklineError, OSError) as error:  # no reason not to serve the new version
            _log.warning("old copies could not be removed: %s", error)
        created = datetime.fromisoformat(version.created).timestamp()
        return Offer(number, tuple(folders), created, version.body["model"].get("data_until"))


class Follower:
    """Looks at a source again and again."""

    def __init__(
        self,
        source: Source,
        poll: float,
        log: Log,
        offer: Callable[[Offer], None],
        refuse: Callable[[int, str], None],
        looked: Callable[[], None] = lambda: None,
    ) -> None:
        """All three are called in the follower's thread: `refuse` for files that are not whole, `looked` after the
        first look, whatever came of it."""
        self.unreachable = False
        self._source = source
        self._poll = poll
        self._log = log
        self._offer = offer
        self._refuse = refuse
        self._looked = looked
        self._move: tuple[int, int] | None = None  # where the pointer was at the last look
        self._not_before = 0.0  # when that version may be fetched and offered; infinity: that is done
        self._pause = _FIRST_PAUSE
        self._said = float("-inf")

    def start(self) -> None:
        threading.Thread(target=self._follow, name="follower", daemon=True).start()

    def try_again(self, number: int) -> None:
        """The version could not be loaded for a reason that may pass: offer it once more, after a pause."""
        if self._move is not None and self._move[1] == number:
            self._not_before = time.monotonic() + self._pause
            self._pause = min(self._pause * 2, _LONGEST_PAUSE)

    def _follow(self) -> None:
        first = True
        while True:
            try:
                self.look()
            except Exception as error:  # noqa: BLE001 - a bug here must not end the following
                self._tell_unreachable(f"a bug: {error!r}")
            if first:
                first = False
                if self._move is None and not self.unreachable:
                    self._log.say("nothing is published yet", "warning", registry=str(self._source))
                self._looked()
            time.sleep(self._poll)

    def look(self) -> None:
        """Look once."""
        try:
            move = self._source.current()
        except (ClicklineError, OSError) as error:
            self._tell_unreachable(str(error))
            return
        if move is None and self._move is not None:
            self._tell_unreachable("the registry was there, and now it is empty or gone")
            return
        if self.unreachable:
            self.unreachable, self._said = False, float("-inf")
            self._log.say("the registry answers again")
        if move is None:
            return
        if move != self._move:
            self._move, self._not_before, self._pause = move, 0.0, _FIRST_PAUSE
        if time.monotonic() >= self._not_before:
            self._not_before = float("inf")
            self._take(move[1])

    def _take(self, number: int) -> None:
        try:
            offer = self._source.fetch(number)
        except ArtifactError as error:
            self._refuse(number, str(error))
        except (ClicklineError, OSError) as error:
            self._log.say("fetching a version failed", "warning", version=number, message=str(error))
            self.try_again(number)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with a version, the next one may be right
            self._refuse(number, f"it cannot be read: {error!r}")
        else:
            self._offer(offer)

    def _tell_unreachable(self, message: str) -> None:
        self.unreachable = True
        if time.monotonic() - self._said >= _SILENT_SECONDS:
            self._said = time.monotonic()
            self._log.say(
                "the registry cannot be reached", "warning", registry=str(self._source), message=message
            )
