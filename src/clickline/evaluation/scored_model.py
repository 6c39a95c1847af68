"""The model that is evaluated: a checkpoint or a published version."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from clickline.artifacts.checkpoint import Checkpoint, find_checkpoint
from clickline.artifacts.from_config import registry_of
from clickline.artifacts.version import Version
from clickline.config import Config
from clickline.errors import ArtifactError
from clickline.evaluation.evaluator import CustomMetric
from clickline.evaluation.importance import ScoreFn
from clickline.evaluation.report.report_document import unseen_shares
from clickline.features import FeatureSpec
from clickline.machine import cores
from clickline.models.model import open_checkpoint
from clickline.records import LabelledRows
from clickline.scoring.open_scorer import open_scorer


@dataclass(frozen=True)
class ScoredModel:
    """A model that scores rows."""

    name: str  # for file names
    title: str  # for people
    features: FeatureSpec
    score: ScoreFn
    custom_metrics: Mapping[str, CustomMetric] | None  # user-defined metrics of a custom network
    document: Mapping[str, Any]  # its description in the report
    checkpoint: Checkpoint | None  # None for a version
    version: int | None  # None for a checkpoint
    unseen_shares: Callable[[LabelledRows], Sequence[float]]  # share of values without an embedding, by slot
    slots: Sequence[Mapping[str, Any]] | None = None  # statistics of its tables; None for a version


def find_model(config: Config, name: str | None) -> ScoredModel:
    """Open a model by name: `current`, a version's number, or what `find_checkpoint` takes."""
    if name == "current" or (name is not None and name.isdigit()):
        return _version(config, name)
    checkpoint = find_checkpoint(name, config.home)
    file = config.model.file
    model = open_checkpoint(checkpoint, cores(), None if file is None else Path(file))
    evicted = {} if checkpoint.manifest.run is None else checkpoint.manifest.run.evicted
    document = {
        "checkpoint": str(checkpoint.folder),
        "step": checkpoint.step,
        "dataset": checkpoint.dataset,
    }
    return ScoredModel(
        f"{checkpoint.folder.parent.name}-{checkpoint.folder.name}",
        str(checkpoint.folder),
        model.features,
        model.score,
        None if model.custom is None else model.custom.metrics,
        document,
        checkpoint,
        None,
        partial(unseen_shares, model.tables),
        [{**asdict(slot), "evicted": evicted.get(slot.name, 0)} for slot in model.tables.report()],
    )


def _version(config: Config, name: str) -> ScoredModel:
    registry = registry_of(config)
    number = int(name) if name != "current" else None
    if number is None:
        move = registry.current()
        if move is None:
            raise ArtifactError("there is no current version yet. Run `clickline publish` first.")
        number = move.version
    version: Version = registry.version(number)
    scorer = open_scorer(registry, version, Path(config.cache.dir), cores())
    document = {"version": number, **version.manifest.model.to_json()}

    def unseen(rows: LabelledRows) -> list[float]:
        before_2S = np.array([scorer.misses_S, scorer.lookups_S])
        scorer.probabilities(rows)
        misses_S, lookups_S = np.array([scorer.misses_S, scorer.lookups_S]) - before_2S
        return [float(share) for share in misses_S / np.maximum(lookups_S, 1)]

    return ScoredModel(
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
