"""The evaluate stage: any checkpoint or version on any data, to a report."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from clickline.artifacts.manifest import as_json
from clickline.config import Config
from clickline.errors import ArtifactError, ConfigError, Mistake
from clickline.features import FeatureSpec
from clickline.intake.stores import storage_of
from clickline.metrics.binary import Metrics
from clickline.metrics.evaluation import Evaluation, measure
from clickline.metrics.gate import Thresholds, Verdict, judge
from clickline.metrics.importance import FieldImportance, ImportanceCounts
from clickline.progress import Progress, usual
from clickline.stages.evaluate.models import Judged, find_model
from clickline.stages.evaluate.sources import LogRows, Rows, open_rows
from clickline.storage.cache import Cache
from clickline.storage.stores import Storage

__all__ = ["EvaluateResult", "evaluate"]


@dataclass(frozen=True)
class EvaluateResult:
    """What a model is worth on some rows."""

    model: Judged
    rows: Rows
    evaluation: Evaluation
    names: Mapping[str, Mapping[int, str]]  # by sliced slot: what an id stands for, where that is known
    importance: tuple[FieldImportance, ...] | None  # most important first; None: not asked for
    verdict: Verdict
    report: str  # where it was written
    seconds: float

    @property
    def bad(self) -> Mapping[str, int]:
        """Rows of raw logs that were left out, by reason."""
        return self.rows.bad if isinstance(self.rows, LogRows) else {}

    def name_of(self, slot: str, id: int) -> str:
        """How an id is shown: as the value it stands for, else as a hexadecimal number."""
        return self.names[slot].get(id, f"{id:016x}")

    def to_json(self) -> dict[str, Any]:
        """The report."""
        measured = self.evaluation.to_json()
        for slot, found in self.evaluation.slices.items():
            for one, entry in zip(found, measured["slices"][slot], strict=True):
                entry["value"] = self.names[slot].get(one.id)
        return {
            "model": dict(self.model.document),
            "data": self.rows.to_json(),
            "evaluation": measured,
            "importance": None if self.importance is None else [one.to_json() for one in self.importance],
            "gate": self.verdict.to_json(),
        }


def evaluate(
    config: Config,
    progress: Progress | None = None,
    *,
    model: str | None = None,
    data: Sequence[str] = (),
    split: str = "eval",
    slices: Sequence[str] = (),
    importance: bool = False,
    seed: int = 0,
    out: str | None = None,
) -> EvaluateResult:
    """Score rows with a model, measure, judge by the config's gate and write the report.

    `model` is what `find_model` takes; `data` a dataset's folder or raw logs, encoded as for the model, and
    without it the current dataset; `slices` are slots to measure by; `seed` fixes what importance shuffles.
    """
    began = time.monotonic()
    progress = progress or usual()
    storage = storage_of(config)
    cache = Cache(Path(config.cache.dir), config.cache.size, storage)
    judged = find_model(config, model)
    features = judged.features
    places = _places(slices, features)
    rows = open_rows(config, storage, cache, data, split, features, progress)

    shuffled = ImportanceCounts(features, seed) if importance else None
    evaluation = measure(judged.score, rows.read(progress), slots=places, own=judged.own, importance=shuffled)
    asked = Thresholds(**config.gate.model_dump(exclude={"retries"}))
    current = None if asked.vs_current is None else _current(config, storage, cache, data, split, progress)
    heavy = {slot: [one.id for one in found] for slot, found in evaluation.slices.items()}
    result = EvaluateResult(
        judged,
        rows,
        evaluation,
        rows.names(heavy) if heavy else {},
        None if shuffled is None else shuffled.found(evaluation.total),
        judge(evaluation.total, asked, current),
        out or Storage.join(config.home, "evaluations", f"{judged.name}-{rows.label}.json"),
        time.monotonic() - began,
    )
    storage.put(result.report, as_json(result.to_json(), indent=1))
    return result


def _current(
    config: Config, storage: Storage, cache: Cache, data: Sequence[str], split: str, progress: Progress
) -> Metrics | None:
    """The live version on the same rows, encoded as it wants them."""
    try:
        live = find_model(config, "current")
        rows = open_rows(config, storage, cache, data, split, live.features, progress)
    except ArtifactError as error:
        progress.say(f"the current version was not measured: {error}")
        return None
    return measure(live.score, rows.read(progress)).total


def _places(slices: Sequence[str], features: FeatureSpec) -> dict[str, int]:
    """The slots to slice by, with their places in the rows."""
    slots = [slot.name for slot in features.slots]
    dense = [field.name for field in features.dense]
    mistakes = []
    for name in dict.fromkeys(slices):
        if name in slots:
            continue
        near = get_close_matches(name, slots, n=1)
        problem = "is a dense field" if name in dense else "is no slot of the model"
        mistakes.append(
            Mistake(
                "",
                0,
                f"--slice {name}",
                f"{problem}. Its slots: {', '.join(slots)}.",
                f"Did you mean {near[0]}?" if near else "Name one of them.",
            )
        )
    if mistakes:
        raise ConfigError(mistakes)
    return {name: slots.index(name) for name in dict.fromkeys(slices)}
