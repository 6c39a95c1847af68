"""What is evaluated: a checkpoint, or a published version."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from clickline.artifacts.checkpoint import Checkpoint
from clickline.artifacts.from_config import registry_of
from clickline.artifacts.runs import find_checkpoint
from clickline.artifacts.version import Version
from clickline.config import Config
from clickline.errors import ArtifactError
from clickline.evaluation.evaluator import OwnMetric
from clickline.evaluation.importance import Score
from clickline.evaluation.report.report_document import unseen_in
from clickline.features import FeatureSpec
from clickline.machine import cores
from clickline.models.model import open_checkpoint
from clickline.records import LabelledRows
from clickline.scoring.open_scorer import open_scorer


@dataclass(frozen=True)
class Judged:
    """A model that scores rows."""

    name: str  # as part of a file's name
    shown: str
    features: FeatureSpec
    score: Score
    own: Mapping[str, OwnMetric] | None  # measures of the user's own network
    document: Mapping[str, Any]  # what the report says of it
    checkpoint: Checkpoint | None  # None of a version
    version: int | None  # None of a checkpoint
    unseen: Callable[
        [LabelledRows], Sequence[float]
    ]  # by slot: share of the values that it has no vector for
    slots: Sequence[Mapping[str, Any]] | None = None  # what its tables hold; None of a version


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
        checkpoint,
        None,
        partial(unseen_in, model.tables),
        [
            {**asdict(slot), "evicted": checkpoint.body.get("evicted", {}).get(slot.name, 0)}
            for slot in model.tables.report()
        ],
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

    def unseen(rows: LabelledRows) -> list[float]:
        before_2S = np.array([scorer.misses_S, scorer.lookups_S])
        scorer.probabilities(rows)
        misses_S, lookups_S = np.array([scorer.misses_S, scorer.lookups_S]) - before_2S
        return [float(share) for share in misses_S / np.maximum(lookups_S, 1)]

    return Judged(
        f"version-{number}",
        f"version {number}",
        scorer.features,
        scorer.probabilities,
        None,
        document,
        None,
        number,
        unseen,
    )
