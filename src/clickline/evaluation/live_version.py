"""Compares a model with the live version: one policy for `train`, `evaluate` and `up --follow`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from clickline.artifacts.registry import Move, Registry
from clickline.errors import ArtifactError
from clickline.features import FeatureSpec

T = TypeVar("T")


def with_live_version(
    registry: Registry, use: Callable[[Move], T], *, requested: bool
) -> tuple[T | None, str]:
    """Returns the result of `use` for the live version, or None and the reason why there is nothing to compare with.

    A version that is damaged or has other fields is not compared with: it must not block its own replacement. Any
    other error, such as a store that does not answer, is raised if gate.vs_current needs the comparison (`requested`);
    if only the report would show it, it is a reason like the others.
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
        if requested:
            raise
        return None, f"{name} cannot be compared with: {_sentence(error)}"


def check_fields(number: int, version_fields: FeatureSpec, rows: FeatureSpec) -> None:
    """Raise ArtifactError if a version cannot score rows that were encoded for another model."""
    if version_fields != rows:
        raise ArtifactError(f"version {number} has other fields or statistics than these rows")


def _sentence(error: Exception) -> str:
    return (str(error) or type(error).__name__).rstrip(".")
