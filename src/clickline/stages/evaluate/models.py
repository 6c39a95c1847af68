"""What is evaluated: a checkpoint, or a published version."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clickline.artifacts.runs import find_checkpoint
from clickline.artifacts.version import Version
from clickline.config import Config
from clickline.errors import ArtifactError
from clickline.features import FeatureSpec
from clickline.intake.inputs import cores
from clickline.intake.stores import registry_of
from clickline.learner import open_checkpoint
from clickline.metrics.evaluation import OwnMetric
from clickline.metrics.importance import Score
from clickline.scoring.versions import open_scorer

__all__ = ["Judged", "find_model"]


@dataclass(frozen=True)
class Judged:
    """A model that scores rows."""

    name: str  # as part of a file's name
    shown: str
    features: FeatureSpec
    score: Score
    own: Mapping[str, OwnMetric] | None  # measures of the user's own network
    document: Mapping[str, Any]  # what the report says of it


def find_model(config: Config, text: str | None) -> Judged:
    """The model that a text names: `current`, a version's number, or what `find_checkpoint` takes."""
    if text == "current" or (text is not None and text.isdigit()):
        return _version(config, text)
    checkpoint = find_checkpoint(text, config.home)
    file = config.model.file
    model = open_checkpoint(checkpoint, cores(), None if file is None else Path(file))
    document = {
        "checkpoint": str(checkpoint.folder),
        "step": checkpoint.step,
        "dataset": checkpoint.body["dataset"],
    }
    return Judged(
        f"{checkpoint.folder.parent.name}-{checkpoint.folder.name}",
        str(checkpoint.folder),
        model.features,
        model.score,
        None if model.custom is None else model.custom.metrics,
        document,
    )


def _version(config: Config, text: str) -> Judged:
    registry = registry_of(config)
    number = int(text) if text != "current" else None
    if number is None:
        move = registry.current()
        if move is None:
            raise ArtifactError("there is no current version yet. Run `clickline publish` first.")
        number = move.version
    version: Version = registry.version(number)
    scorer = open_scorer(registry, version, Path(config.cache.dir), cores())
    document = {"version": number, **version.body["model"]}
    return Judged(
        f"version-{number}", f"version {number}", scorer.features, scorer.probabilities, None, document
    )
