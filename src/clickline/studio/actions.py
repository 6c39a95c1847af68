"""The actions, the only requests that change something: roll back, promote, pin, unpin. Each moves the registry's
pointer and records a reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clickline.artifacts.promotion import current_of, pin, promote, roll_back, unpin
from clickline.artifacts.registry import Registry
from clickline.errors import RequestRefused

ACTIONS = {
    "rollback": "Make an earlier version current.",
    "promote": "Make a newer version current.",
    "pin": "Make a version current and keep it current.",
    "unpin": "Let publishing change the current version again.",
}
_MAX_REASON = 500


def act(registry: Registry, action: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """Run an action. `request` has a reason and a version, which defaults to the previous one (rollback) or the
    current one (pin)."""
    reason, number = _checked(request)
    if action == "rollback":
        moved = roll_back(registry, number, reason)
    elif action == "promote":
        if number is None:
            raise RequestRefused("invalid", "version is missing. Give the number of the version to promote.")
        moved = promote(registry, number, reason)
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


def _checked(request: Mapping[str, Any]) -> tuple[str, int | None]:
    reason, number = request.get("reason"), request.get("version")
    if not isinstance(reason, str) or not reason.strip() or len(reason) > _MAX_REASON:
        raise RequestRefused(
            "invalid",
            f"reason is missing. Give one of up to {_MAX_REASON} characters; it is recorded in the history.",
        )
    if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
        raise RequestRefused(
            "invalid",
            "version is not a version number. Give a whole number from 1, or leave it out for the default.",
        )
    return " ".join(reason.split()), number
