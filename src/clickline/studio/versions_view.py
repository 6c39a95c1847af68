"""The versions panel: the versions of the registry, the current one and the history of moves."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from clickline.artifacts.diff import differences, metrics_of, state_of, summary
from clickline.artifacts.from_config import registry_of
from clickline.artifacts.registry import Move, Registry
from clickline.config import Config
from clickline.errors import ArtifactError, ClicklineError
from clickline.storage.storage import Storage

_MAX_MOVES = 100
_MOVE_KEYS = ("sequence", "version", "reason", "at", "pinned", "by")


class VersionsView:
    """The versions of one home. A version never changes, so it is read once."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._known: dict[int, dict[str, Any]] = {}
        self._moves: list[Move] = []
        self._numbers: tuple[object, list[int]] = (None, [])

    @cached_property
    def registry(self) -> Registry:
        """The registry, opened on first use: wrong credentials must not prevent showing the rest."""
        return registry_of(self._config)

    @cached_property
    def unverified(self) -> Registry:
        """The registry without signature checks, for listing all versions."""
        return registry_of(self._config, any_version=True)

    def all(self) -> dict[str, Any]:
        """The document of the versions panel; `error` is the reason if nothing could be read."""
        try:
            return {**self._read(), "error": None}
        except (ClicklineError, OSError) as error:
            return {
                "current": None,
                "pinned": False,
                "previous": None,
                "list": [],
                "moves": [],
                "error": str(error),
            }

    def diff(self, first: int, second: int) -> dict[str, Any]:
        """The document of `clickline versions diff --json`. Raises ArtifactError if a version does not exist."""
        old, new = self.unverified.version(first), self.unverified.version(second)
        return {"versions": [old.number, new.number], **differences(old, new)}

    def _read(self) -> dict[str, Any]:
        registry = self.unverified
        current = registry.current()
        numbers = self._listed(registry)
        if current != (self._moves[-1] if self._moves else None):
            moves = registry.moves()[-_MAX_MOVES:]
            if self._moves and not set(moves) & set(self._moves):
                self._known.clear()  # the registry was replaced by another one
            self._moves = moves
        existing = set(numbers)
        self._known = {number: line for number, line in self._known.items() if number in existing}
        listed = [
            {**self._line(number), "state": [*state_of(number, current), *self._damage(number)]}
            for number in reversed(numbers)
        ]
        return {
            "current": None if current is None else current.version,
            "pinned": current is not None and current.pinned,
            "previous": None if current is None else current.previous,
            "list": listed,
            "moves": [{key: getattr(move, key) for key in _MOVE_KEYS} for move in reversed(self._moves)],
        }

    def stamp(self) -> object:
        """A value that changes when something is published, moved or removed; None if that cannot be told cheaply."""
        uri = self.unverified.uri
        if not Storage.is_local(uri):
            return None
        try:
            return [Path(uri, name).stat().st_mtime_ns for name in ("versions", "moves")]
        except OSError:
            return None  # nothing yet

    def _listed(self, registry: Registry) -> list[int]:
        stamp = self.stamp()
        if stamp is None or stamp != self._numbers[0]:
            self._numbers = (stamp, registry.numbers())
        return self._numbers[1]

    def _line(self, number: int) -> dict[str, Any]:
        known = self._known.get(number)
        if known is None:
            try:
                version = self.unverified.version(number)
            except ArtifactError:
                return _UNREADABLE | {"version": number}
            metrics = metrics_of(version)
            known = {**summary(version), **{name: metrics.get(name) for name in ("logloss", "calibration")}}
            self._known[number] = known
        return known

    def _damage(self, number: int) -> list[str]:
        return [] if number in self._known else ["damaged"]


_UNREADABLE: dict[str, Any] = dict.fromkeys(
    ["version", "table", "parent", "created", "rows", "tombstones", "bytes", "auc", "logloss", "calibration"]
)
