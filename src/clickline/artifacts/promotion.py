"""Moving the pointer by hand: back to an earlier version, holding one, letting it go."""

from __future__ import annotations

from dataclasses import dataclass

from clickline.artifacts.registry import Move, Registry
from clickline.errors import ArtifactError
from clickline.storage.redaction import shown


@dataclass(frozen=True)
class Moved:
    """Where the pointer was and where it is; the same when there was nothing to do."""

    before: Move | None
    now: Move

    @property
    def changed(self) -> bool:
        return self.before != self.now


def roll_back(registry: Registry, to: int | None, reason: str | None) -> Moved:
    """Make an earlier version the current one, by default the one before. What is pinned stays pinned there."""
    current = current_of(registry)
    if to is None and current.pinned:
        raise ArtifactError(
            f"version {current.version} is pinned since {current.at} ({current.reason}), so nothing was changed. "
            "To leave it, name the version: `clickline versions rollback --to N`, which is pinned then; "
            "or run `clickline versions unpin` first."
        )
    target = to if to is not None else _previous(registry, current)
    if target == current.version:
        return Moved(current, current)
    registry.check(registry.version(target))
    made = registry.move(
        target, reason or f"rollback from {current.version}", after=current, pinned=current.pinned
    )
    return Moved(current, made)


def pin(registry: Registry, number: int, reason: str | None) -> Moved:
    """Make a version the current one; publishes do not move on."""
    version = registry.version(number)
    current = registry.current()
    if current is not None and (current.version, current.pinned) == (number, True):
        return Moved(current, current)
    registry.check(version)
    return Moved(current, registry.move(number, reason or "pinned", after=current, pinned=True))


def unpin(registry: Registry, reason: str | None) -> Moved:
    """Let publishes move the pointer again."""
    current = current_of(registry)
    if not current.pinned:
        return Moved(current, current)
    return Moved(current, registry.move(current.version, reason or "unpinned", after=current))


def current_of(registry: Registry) -> Move:
    """Where the pointer is; refuses when it is nowhere yet."""
    current = registry.current()
    if current is not None:
        return current
    numbers = ", ".join(map(str, registry.numbers()))
    remedy = (
        f"There are versions {numbers}; `clickline versions pin N` makes one current."
        if numbers
        else "`clickline publish` makes the first version."
    )
    raise ArtifactError(f"{shown(registry.uri)} has no current version yet. {remedy}")


def _previous(registry: Registry, current: Move) -> int:
    """The version that was current before, as far back as there still is one."""
    numbers = registry.numbers()
    there = [number for number in current.before if number in numbers]
    if there:
        return there[-1]
    others = ", ".join(str(number) for number in numbers if number != current.version)
    raise ArtifactError(
        f"no version that was current before {current.version} is left, so there is none to go back to. "
        + (
            f"There are versions {others}: name one with --to."
            if others
            else "There are no others: publish a better one."
        )
    )
