"""The only things that change something: roll back, pin, unpin. Each is a move of the registry, with its reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clickline.artifacts.promotion import current_of, pin, promote, roll_back, unpin
from clickline.artifacts.registry import Registry
from clickline.errors import RequestRefused

ACTIONS = ("rollback", "pin", "unpin")
_LONGEST = 500


def act(registry: Registry, action: str, asked: Mapping[str, Any]) -> dict[str, Any]:
    """`asked`: reason, and the version where it is not the one before (rollback) or the current one (pin)."""
    reason, number = _checked(asked)
    if action == "rollback":
        newer = number is not None and number > current_of(registry).version
        moved = promote(registry, number, reason) if newer else roll_back(registry, number, reason)
    elif action == "pin":
        moved = pin(registry, current_of(registry).version if number is None else number, reason)
    else:
        moved = unpin(registry, reason)
    now = moved.now
    return {
        "current": now.version,
        "sequence": now.sequence,
        "pinned": now.pinned,
        "changed": moved.changed,
    }


def _checked(asked: Mapping[str, Any]) -> tuple[str, int | None]:
    reason, number = asked.get("reason"), asked.get("version")
    if not isinstance(reason, str) or not reason.strip() or len(reason) > _LONGEST:
        raise RequestRefused(
            "invalid",
            f"reason is missing. Say in up to {_LONGEST} characters why; it is kept in the history.",
        )
    if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
        raise RequestRefused("invalid", "version is no version's number; leave it out for the usual one.")
    return " ".join(reason.split()), number
