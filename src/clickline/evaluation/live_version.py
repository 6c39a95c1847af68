"""The current version beside a model that is judged: one policy for `train`, `evaluate` and `up --follow`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from clickline.artifacts.registry import Move, Registry
from clickline.errors import ArtifactError
from clickline.features import FeatureSpec

T = TypeVar("T")


def with_current(registry: Registry, use: Callable[[Move], T], *, asked: bool) -> tuple[T | None, str]:
    """What `use` makes of the current version; without it, why there is nothing to compare with.

    A version that is damaged, or was made for other fields, is not compared with: it must not block its own
    replacement. Anything else, a store that does not answer above all, is an error if gate.vs_current asks for the
    comparison (`asked`); where only a report would show it, it is a reason like the others.
    """
    name = "the current version"
    try:
        move = registry.current()
        if move is None:
            return None, "there is no current version to compare with"
        name = f"the current version, {move.version},"
        return use(move), ""
    except ArtifactError as error:
        return None, f"{name} cannot be compared with: {_sentence(error)}"
    except Exception as error:
        if asked:
            raise
        return None, f"{name} cannot be compared with: {_sentence(error)}"


def check_fields(number: int, its: FeatureSpec, rows: FeatureSpec) -> None:
    """ArtifactError when a version cannot score rows that were encoded for another model."""
    if its != rows:
        raise ArtifactError(f"version {number} has other fields or statistics than these rows")


def _sentence(error: Exception) -> str:
    return (str(error) or type(error).__name__).rstrip(".")
