"""Moving the pointer to the current version by hand: roll back, promote, pin, unpin."""

from __future__ import annotations

from dataclasses import dataclass

from clickline.artifacts.registry import Move, Registry
from clickline.errors import ArtifactError
from clickline.storage.redaction import redacted


@dataclass(frozen=True)
class MoveResult:
    """Where the pointer was and where it is now; both are the same if there was nothing to do."""

    before: Move | None
    now: Move

    @property
    def changed(self) -> bool:
        return self.before != self.now


def roll_back(registry: Registry, to: int | None, reason: str | None) -> MoveResult:
    """Make an earlier version current, by default the one that was current before; a pin moves with the pointer."""
    current = current_of(registry)
    if to is None and current.pinned:
        raise ArtifactError(
            f"version {current.version} is pinned since {current.at} ({current.reason}), so nothing was changed. "
            "To leave it, name a version, `clickline versions rollback --to N` or `clickline versions promote N`, "
            "which is then pinned; or run `clickline versions unpin` first."
        )
    if to is not None and to > current.version:
        registry.version(to)  # a version that does not exist has its own message
        raise ArtifactError(
            f"version {to} is newer than the current version {current.version}, and a rollback only goes to an "
            f"earlier one. To make it current, run `clickline versions promote {to}`."
        )
    target = to if to is not None else _previous(registry, current)
    return _move(registry, current, target, reason or f"rollback from {current.version}")


def promote(registry: Registry, number: int, reason: str | None) -> MoveResult:
    """Make a newer version current; a pin moves with the pointer."""
    current = current_of(registry)
    if number < current.version:
        registry.version(number)  # a version that does not exist has its own message
        raise ArtifactError(
            f"version {number} is older than the current version {current.version}, and only a newer one can be "
            f"promoted. To go back to it, run `clickline versions rollback --to {number}`."
        )
    return _move(registry, current, number, reason or f"promotion from {current.version}")


def pin(registry: Registry, number: int, reason: str | None) -> MoveResult:
    """Make a version current and keep it so: publishes do not move the pointer."""
    version = registry.version(number)
    current = registry.current()
    if current is not None and (current.version, current.pinned) == (number, True):
        return MoveResult(current, current)
    registry.check(version)
    return MoveResult(current, registry.move(number, reason or "pinned", after=current, pinned=True))


def unpin(registry: Registry, reason: str | None) -> MoveResult:
    """Let publishes move the pointer again."""
    current = current_of(registry)
    if not current.pinned:
        return MoveResult(current, current)
    return MoveResult(current, registry.move(current.version, reason or "unpinned", after=current))


def current_of(registry: Registry) -> Move:
    """Where the pointer is; ArtifactError if no version has been made current yet."""
    current = registry.current()
    if current is not None:
        return current
    numbers = ", ".join(map(str, registry.numbers()))
    remedy = (
        f"Versions {numbers} exist; `clickline versions pin N` makes one current."
        if numbers
        else "`clickline publish` creates the first version."
    )
    raise ArtifactError(f"{redacted(registry.uri)} has no current version yet. {remedy}")


def _move(registry: Registry, current: Move, target: int, reason: str) -> MoveResult:
    if target == current.version:
        return MoveResult(current, current)
    registry.check(registry.version(target))
    return MoveResult(current, registry.move(target, reason, after=current, pinned=current.pinned))


def _previous(registry: Registry, current: Move) -> int:
    """The last version that was current before and still exists."""
    numbers = registry.numbers()
    candidates = [number for number in current.before if number in numbers]
    if candidates:
        return candidates[-1]
    others = ", ".join(str(number) for number in numbers if number != current.version)
    raise ArtifactError(
        f"no version that was current before version {current.version} still exists to roll back to. "
        + (
            f"Versions {others} exist: `clickline versions promote N` makes a newer one current, "
            "`clickline versions rollback --to N` an older one."
            if others
            else "There are no other versions: publish a better one."
        )
    )
