"""The open versions of one shard, and the follower that keeps them up to date with the registry.

The current version and the previous one are open, because predictors switch a moment after the pointer moves. An older
one stays open while it is used, so that a slow predictor still finds its rows.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from clickline.artifacts.registry import Move, Registry
from clickline.artifacts.version import Verifier, Version
from clickline.embedding.serving import ServingTable
from clickline.embedding.serving.file_format import shard_name
from clickline.errors import ArtifactError, ClicklineError
from clickline.serving.json_log import JsonLog
from clickline.wire.lookup_frames import LOOKUP_ROWS_AT

_IDLE_SECONDS = 10.0  # without a lookup before an old version is closed
_MAX_OPEN = 4
_PIECE_BYTES = 256 * 1024  # of an answer, sent in one call
_FIRST_PAUSE, _LONGEST_PAUSE = 2.0, 300.0
_LOG_SECONDS = 300.0  # between two lines about the same problem


class ShardVersion:
    """One shard of one version, open for lookups."""

    def __init__(self, number: int, tables: ServingTable, chain: Sequence[Version] = ()) -> None:
        """`chain`: the versions whose files are mapped."""
        self.number = number
        self.chain = tuple(chain)
        self.tables = tables
        self.widths = tuple(
            tables.row_bytes(part) for part in range(len(tables.parts))
        )  # bytes of a row, by part
        self.piece = max(_PIECE_BYTES, LOOKUP_ROWS_AT + max(self.widths, default=0))
        self.rows = tables.rows
        self.bytes = sum(mapped.size for level in tables.levels for mapped in level.values())
        self.last_used = time.monotonic()
        for part, width in enumerate(self.widths):  # compile kernels now, not in the first request
            tables.find(
                part, np.zeros(1, np.uint64), np.empty((1, width), np.uint8), np.empty(1, dtype=np.bool_)
            )


class ShardVersions:
    """The open versions of a shard, by number. Any thread may read; only the follower adds and drops."""

    def __init__(self, shard: int) -> None:
        self.shard = shard
        self.shards: int | None = None
        self.open: Mapping[int, ShardVersion] = {}
        self.current: int | None = None  # the version the registry points to, open or not
        self.refused: Mapping[int, str] = {}  # versions that could not be opened, with the reason

    def describe(self) -> dict[str, Any]:
        """The document that answers a status request."""
        return {
            "shard": self.shard,
            "shards": self.shards,
            "current": self.current,
            "versions": sorted(self.open),
            "refused": {str(number): reason[:500] for number, reason in self.refused.items()},
            "rows": {str(number): version.rows for number, version in self.open.items()},
        }


class ShardFiles(NamedTuple):
    """Fetches the files of one shard of a version, and opens them."""

    registry: Registry
    shard: int
    copies: Path  # folder for copies of remote files
    verifier: Verifier

    def open(self, number: int) -> tuple[ShardVersion, int]:
        """Open a version; returns it with its number of shards."""
        version = self.registry.version(number)
        shards = self._shards_of(version)
        chain = [self._only_shard(one, shards) for one in self.registry.chain(version)]
        folders = []
        for one in chain:
            folders.append(self.registry.fetch(one, self.copies))
            self.verifier.check(one, folders[-1])
        tables = ServingTable.open(folders, shards=[self.shard], work=self.copies / "merged")
        return ShardVersion(number, tables, chain), shards

    def check_shard(self) -> None:
        """Refuse a shard number that the current version does not have, if the registry can be read now."""
        version = None
        with suppress(ClicklineError):  # unreachable or damaged: the follower keeps trying, and logs it
            move = self.registry.current()
            version = None if move is None else self.registry.version(move.version)
        if version is not None:
            self._shards_of(version)

    def keep(self, versions: Iterable[ShardVersion]) -> None:
        """Remove local copies that none of these versions needs."""
        needed = {one.number: one for version in versions for one in version.chain}
        self.verifier.keep(needed)
        self.registry.remove_copies(self.copies, needed.values())

    def _shards_of(self, version: Version) -> int:
        shards = version.manifest.shards
        if not 0 <= self.shard < shards:
            raise ArtifactError(
                f"there is no shard {self.shard}: version {version.number} has {shards}, numbered 0 … {shards - 1}. "
                "Choose one with --shard."
            )
        return shards

    def _only_shard(self, version: Version, shards: int) -> Version:
        """The version with only the file of this shard."""
        name = shard_name(self.shard, shards)
        files = {file: entry for file, entry in version.files.items() if file == name}
        return replace(version, manifest=replace(version.manifest, files=files))


class ShardFollower:
    """Opens the version that the registry points to. While the registry cannot be reached, open versions keep
    answering."""

    def __init__(self, files: ShardFiles, versions: ShardVersions, poll: float, log: JsonLog) -> None:
        self.unreachable = False
        self._files = files
        self._versions = versions
        self._poll = poll
        self._log = log
        self._pauses: dict[
            int, tuple[float, float]
        ] = {}  # time of the next attempt, and the pause after its failure
        self._logged = float("-inf")
        self._stop = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._follow, name="follower", daemon=True).start()

    def stop(self) -> None:
        self._stop.set()

    def _follow(self) -> None:
        while not self._stop.wait(self._poll):
            try:
                self.poll_once()
            except Exception as error:  # noqa: BLE001 - a bug here must not stop the polling
                self._log.event("following the registry failed", "error", message=repr(error))

    def poll_once(self) -> None:
        """Poll once: open the current version and the previous one, and drop unused ones."""
        try:
            move = self._files.registry.current()
        except (ClicklineError, OSError) as error:
            self._log_unreachable(str(error))
            return
        if move is None:
            if self._versions.current is not None:  # an unmounted disk looks like this
                self._log_unreachable("it had versions before, and is now empty or missing")
            return
        if self.unreachable:
            self.unreachable, self._logged = False, float("-inf")
            self._log.event("the registry answers again")
        self._versions.current = move.version
        wanted = _wanted(move)
        self._versions.refused = {n: reason for n, reason in self._versions.refused.items() if n in wanted}
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
            # The store may be unavailable for a moment, or the damage may be repaired.
            self._pauses[number] = (time.monotonic() + pause, min(pause * 2, _LONGEST_PAUSE))
            versions.refused = {**versions.refused, number: str(error)}
            if is_current:
                self._log.event(
                    "a version was refused",
                    "error",
                    version=number,
                    reason=str(error),
                    open=sorted(versions.open),
                )
            return
        self._pauses.pop(number, None)
        versions.refused = {n: reason for n, reason in versions.refused.items() if n != number}
        versions.open = {**versions.open, number: opened}
        if is_current:
            versions.shards = shards
        self._log.event(
            "a version is open", version=number, shards=shards, rows=opened.rows, bytes=opened.bytes
        )

    def _drop(self, wanted: tuple[int, ...]) -> None:
        opened = self._versions.open
        old = sorted(
            (one for one in opened.values() if one.number not in wanted), key=lambda one: one.last_used
        )
        idle_before = time.monotonic() - _IDLE_SECONDS
        excess = max(0, len(opened) - _MAX_OPEN)
        dropped = {one.number for n, one in enumerate(old) if n < excess or one.last_used < idle_before}
        if not dropped:
            return
        # The memory is freed with the last request that reads it.
        self._versions.open = {number: one for number, one in opened.items() if number not in dropped}
        try:
            self._files.keep(self._versions.open.values())
        except (ClicklineError, OSError) as error:
            self._log.event("old copies could not be removed", "warning", message=str(error))
        self._log.event("versions were dropped", versions=sorted(dropped))

    def _log_unreachable(self, message: str) -> None:
        self.unreachable = True
        if time.monotonic() - self._logged >= _LOG_SECONDS:
            self._logged = time.monotonic()
            self._log.event("the registry cannot be reached", "warning", message=message)


def _wanted(move: Move) -> tuple[int, ...]:
    return (move.version,) if move.previous is None else (move.version, move.previous)
