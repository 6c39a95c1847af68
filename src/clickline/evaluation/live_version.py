"""Compares a model with the live version: one policy for `train`, `evaluate` and `up --follow`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from clickline.artifacts.from_config import registry_of
from clickline.artifacts.registry import Move, Registry
from clickline.config import Config
from clickline.errors import ArtifactError
from clickline.evaluation.evaluator import evaluate_rows
from clickline.evaluation.report.report_document import LiveEvaluation
from clickline.features import FeatureSpec
from clickline.machine import cores
from clickline.records import LabelledRows

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


def evaluate_live(
    config: Config, features: FeatureSpec, rows: Iterable[LabelledRows], slots: Mapping[str, int]
) -> tuple[LiveEvaluation | None, str]:
    """Evaluate the live version on rows that were encoded for another model; without one, returns the reason."""
    registry = registry_of(config)

    def evaluate(move: Move) -> LiveEvaluation:
        from clickline.scoring.open_scorer import open_scorer  # only a comparison needs what serving needs

        scorer = open_scorer(registry, registry.version(move.version), Path(config.cache.dir), cores())
        try:
            check_fields(move.version, scorer.features, features)
            return LiveEvaluation(move.version, evaluate_rows(scorer.probabilities, rows, slots=slots))
        finally:
            scorer.close()

    return with_live_version(registry, evaluate, requested=config.gate.vs_current is not None)


def check_fields(number: int, version_fields: FeatureSpec, rows: FeatureSpec) -> None:
    """Raise ArtifactError if a version cannot score rows that were encoded for another model."""
    if version_fields != rows:
        raise ArtifactError(f"version {number} has other fields or statistics than these rows")


def _sentence(error: Exception) -> str:
    return (str(error) or type(error).__name__).rstrip(".")
