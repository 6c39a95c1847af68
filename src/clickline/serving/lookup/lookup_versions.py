"""The versions of one shard that are open, and how they follow the registry.

Open are the current version and the one before it: predictors switch a moment after the pointer moves. One that is
older stays as long as it is asked for, so that a predictor that is late finds its rows.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from clickline.artifacts.registry import Move, Registry
from clickline.artifacts.version import Verifier, Version
from clickline.embedding.serving import FrozenTables
from clickline.embedding.serving.file_format import shard_name
from clickline.errors import ArtifactError, ClicklineError
from clickline.serving.json_log import Log
from clickline.wire.frames import LOOKUP_ROWS_AT

_LINGER_SECONDS = 10.0  # without a request before an old version is dropped
_MOST_OPEN = 4
_PIECE_BYTES = 256 * 1024  # of an answer, sent at once
_FIRST_PAUSE, _LONGEST_PAUSE = 2.0, 300.0
_SILENT_SECONDS = 300.0  # between two lines about the same trouble


class OpenVersion:
    """One shard of one version."""

    def __init__(self, number: int, tables: FrozenTables, chain: Sequence[Version] = ()) -> None:
        """`chain`: the versions whose files it is mapped from."""
        self.number = number
        self.chain = tuple(chain)
        self.tables = tables
        self.widths = tuple(tables.row_bytes(part) for part in range(len(tables.parts)))  # of rows, in bytes
        self.piece = max(_PIECE_BYTES, LOOKUP_ROWS_AT + max(self.widths, default=0))
        self.rows = tables.rows
        self.bytes = sum(mapped.size for level in tables.levels for mapped in level.values())
        self.asked = time.monotonic()  # when it was last
        for part, width in enumerate(self.widths):  # the first request must not wait for a kernel
            tables.find(
                part, np.zeros(1, np.uint64), np.empty((1, width), np.uint8), np.empty(1, dtype=np.bool_)
            )


class OpenVersions:
    """Versions by number. Any thread may look one up; the follower alone adds and drops."""

    def __init__(self, shard: int) -> None:
        self.shard = shard
        self.shards: int | None = None
        self.open: Mapping[int, OpenVersion] = {}
        self.current: int | None = None  # where the registry's pointer is, loaded or not
        self.refused: Mapping[int, str] = {}  # versions that could not be loaded, and why

    @property
    def ready(self) -> bool:
        return bool(self.open)

    def describe(self) -> dict[str, Any]:
        """What a status answers."""
        return {
            "shard": self.shard,
            "shards": self.shards,
            "current": self.current,
            "versions": sorted(self.open),
            "refused": {str(number): reason[:500] for number, reason in self.refused.items()},
            "rows": {str(number): version.rows for number, version in self.open.items()},
        }


class ShardFiles(NamedTuple):
    """Brings one shard's files of a version here, and opens them."""

    registry: Registry
    shard: int
    copies: Path  # of files that lie elsewhere
    verifier: Verifier

    def open(self, number: int) -> tuple[OpenVersion, int]:
        """A version, and how many shards it has."""
        version = self.registry.version(number)
        shards = self._shards_of(version)
        chain = [self._only_shard(one, shards) for one in self.registry.chain(version)]
        folders = []
        for one in chain:
            folders.append(self.registry.fetch(one, self.copies))
            self.verifier.check(one, folders[-1])
        tables = FrozenTables.open(folders, shards=[self.shard], work=self.copies / "merged")
        return OpenVersion(number, tables, chain), shards

    def check_shard(self) -> None:
        """Refuse a shard that the current version does not have, as far as that can be known now."""
        version = None
        with suppress(ClicklineError):  # unreachable or damaged: the follower goes on trying, and tells
            move = self.registry.current()
            version = None if move is None else self.registry.version(move.version)
        if version is not None:
            self._shards_of(version)

    def keep(self, versions: Iterable[OpenVersion]) -> None:
        """Remove copies of files that none of these needs."""
        needed = {one.number: one for version in versions for one in version.chain}
        self.verifier.keep(needed)
        self.registry.forget(self.copies, needed.values())

    def _shards_of(self, version: Version) -> int:
        shards = int(version.body["shards"])
        if not 0 <= self.shard < shards:
            raise ArtifactError(
                f"there is no shard {self.shard}: version {version.number} has {shards}, numbered 0 … {shards - 1}. "
                "Give one of them by --shard."
            )
        return shards

    def _only_shard(self, version: Version, shards: int) -> Version:
        """The version as if the file of this shard were all it has."""
        name = shard_name(self.shard, shards)
        files = {one: told for one, told in version.files.items() if one == name}
        return Version(version.number, version.folder, {**version.body, "files": files})


class Follower:
    """Opens what the registry points to. While the registry cannot be reached, what is open goes on answering."""

    def __init__(self, files: ShardFiles, versions: OpenVersions, poll: float, log: Log) -> None:
        self.unreachable = False
        self._files = files
        self._versions = versions
        self._poll = poll
        self._log = log
        self._pauses: dict[int, tuple[float, float]] = {}  # not before, and the pause after the next failure
        self._said = float("-inf")
        self._stop = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._follow, name="follower", daemon=True).start()

    def stop(self) -> None:
        self._stop.set()

    def _follow(self) -> None:
        while not self._stop.wait(self._poll):
            try:
                self.look()
            except Exception as error:  # noqa: BLE001 - a bug here must not end the following
                self._log.say("following the registry failed", "error", message=repr(error))

    def look(self) -> None:
        """Look once: open the current version, then the one before it, then drop what nobody asks for."""
        try:
            move = self._files.registry.current()
        except (ClicklineError, OSError) as error:
            self._tell_unreachable(str(error))
            return
        if move is None:
            if self._versions.current is not None:  # a disk that is not mounted looks so
                self._tell_unreachable("it is empty, and it was not before")
            return
        if self.unreachable:
            self.unreachable, self._said = False, float("-inf")
            self._log.say("the registry answers again")
        self._versions.current = move.version
        wanted = _wanted(move)
        self._versions.refused = {n: why for n, why in self._versions.refused.items() if n in wanted}
        self._pauses = {n: pause for n, pause in self._pauses.items() if n in wanted}
        for number in wanted:
            if number not in self._versions.open:
                self._open(number, is_current=number == move.version)
        self._drop(wanted)

    def _open(self, number: int, *, is_current: bool) -> None:
        not_before, pause = self._pauses.get(number, (0.0, _FIRST_PAUSE))
        if time.monotonic() < not_before:
            return
        versions = self._versions
        try:
            opened, shards = self._files.open(number)
        except (ClicklineError, OSError) as error:
            # Perhaps a store that is not there for a moment, perhaps damage that somebody repairs.
            self._pauses[number] = (time.monotonic() + pause, min(pause * 2, _LONGEST_PAUSE))
            versions.refused = {**versions.refused, number: str(error)}
            if is_current:
                self._log.say(
                    "a version was refused",
                    "error",
                    version=number,
                    reason=str(error),
                    open=sorted(versions.open),
                )
            return
        self._pauses.pop(number, None)
        versions.refused = {n: why for n, why in versions.refused.items() if n != number}
        versions.open = {**versions.open, number: opened}
        if is_current:
            versions.shards = shards
        self._log.say(
            "a version is open", version=number, shards=shards, rows=opened.rows, bytes=opened.bytes
        )

    def _drop(self, wanted: tuple[int, ...]) -> None:
        opened = self._versions.open
        old = sorted((one for one in opened.values() if one.number not in wanted), key=lambda one: one.asked)
        quiet = time.monotonic() - _LINGER_SECONDS
        most = max(0, len(opened) - _MOST_OPEN)
        gone = {one.number for n, one in enumerate(old) if n < most or one.asked < quiet}
        if not gone:
            return
        # The memory goes with the last request that reads it.
        self._versions.open = {number: one for number, one in opened.items() if number not in gone}
        try:
            self._files.keep(self._versions.open.values())
        except (ClicklineError, OSError) as error:
            self._log.say("old copies could not be removed", "warning", message=str(error))
        self._log.say("versions were dropped", versions=sorted(gone))

    def _tell_unreachable(self, message: str) -> None:
        self.unreachable = True
        if time.monotonic() - self._said >= _SILENT_SECONDS:
            self._said = time.monotonic()
            self._log.say("the registry cannot be reached", "warning", message=message)


def _wanted(move: Move) -> tuple[int, ...]:
    return (move.version,) if move.previous is None else (move.version, move.previous)
