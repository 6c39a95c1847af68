"""The evaluate stage: any checkpoint on any data, to a report."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from clickline.artifacts.checkpoint import Checkpoint, open_checkpoint_folder, result_of
from clickline.artifacts.manifest import MANIFEST, as_json
from clickline.config import Config
from clickline.errors import ArtifactError, ConfigError, Mistake
from clickline.features import FeatureSpec
from clickline.intake.inputs import cores
from clickline.learner import open_checkpoint
from clickline.metrics.evaluation import Evaluation, measure
from clickline.metrics.gate import Thresholds, Verdict, judge
from clickline.metrics.importance import FieldImportance, ImportanceCounts
from clickline.progress import Progress
from clickline.stages.evaluate.sources import LogRows, Rows, open_rows
from clickline.storage.cache import Cache
from clickline.storage.stores import Storage

__all__ = ["EvaluateResult", "evaluate", "open_model"]


@dataclass(frozen=True)
class EvaluateResult:
    """What a model is worth on some rows."""

    checkpoint: Checkpoint
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
            "model": {
                "checkpoint": str(self.checkpoint.folder),
                "step": self.checkpoint.step,
                "dataset": self.checkpoint.body["dataset"],
            },
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

    `model` is what `open_model` takes; `data` a dataset's folder or raw logs, encoded as for the model, and
    without it the current dataset; `slices` are slots to measure by; `seed` fixes what importance shuffles.
    """
    began = time.monotonic()
    progress = progress or Progress()
    credentials = config.storage.credentials
    storage = Storage(config.storage.options, None if credentials is None else Path(credentials))
    cache = Cache(Path(config.cache.dir), config.cache.size, storage)
    checkpoint = open_model(model, config.home)
    features = FeatureSpec.from_json(checkpoint.body["features"])
    places = _places(slices, features)
    rows = open_rows(config, storage, cache, data, split, features, progress)
    file = config.model.file
    scorer = open_checkpoint(checkpoint, cores(), None if file is None else Path(file))

    shuffled = ImportanceCounts(features, seed) if importance else None
    evaluation = measure(
        scorer.score,
        rows.read(progress),
        slots=places,
        own=None if scorer.custom is None else scorer.custom.metrics,
        importance=shuffled,
    )
    gate = config.gate
    asked = Thresholds(gate.auc, gate.logloss, gate.accuracy, gate.calibration, gate.vs_current)
    heavy = {slot: [one.id for one in found] for slot, found in evaluation.slices.items()}
    name = f"{checkpoint.folder.parent.name}-{checkpoint.folder.name}-{rows.label}.json"
    result = EvaluateResult(
        checkpoint,
        rows,
        evaluation,
        rows.names(heavy) if heavy else {},
        None if shuffled is None else shuffled.found(evaluation.total),
        judge(evaluation.total, asked),
        out or Storage.join(config.home, "evaluations", name),
        time.monotonic() - began,
    )
    storage.put(result.report, as_json(result.to_json(), indent=1))
    return result


def open_model(text: str | None, home: str) -> Checkpoint:
    """The model that a text names: a checkpoint's folder, a run's folder or its name in `home`, whose result is
    meant (its newest checkpoint as long as it has none); None means the run that wrote a checkpoint last."""
    if text is None:
        return _newest(home)
    runs = Path(home, "runs")
    for place in (Path(text), runs / text):
        found = open_checkpoint_folder(place) or result_of(place)
        if found is not None:
            return found
    there = ", ".join(path.name for path in _by_age(runs)[:5]) or "none"
    raise ArtifactError(
        f"{text} is no checkpoint and no run with one. Name a folder such as .clickline/runs/RUN or "
        f".clickline/runs/RUN/step-…; the runs in {home}, newest first: {there}."
    )


def _newest(home: str) -> Checkpoint:
    runs = _by_age(Path(home, "runs"))
    found = result_of(runs[0]) if runs else None
    if found is None:
        raise ArtifactError(
            f"{home} holds no checkpoint. Run `clickline train` first, or name one by --model."
        )
    return found


def _by_age(runs: Path) -> list[Path]:
    """The runs that have a checkpoint, the one that wrote one last first."""
    written: dict[Path, int] = {}
    for manifest in runs.glob(f"*/step-*/{MANIFEST}"):
        run = manifest.parent.parent
        written[run] = max(written.get(run, 0), manifest.stat().st_mtime_ns)
    return sorted(written, key=lambda run: (-written[run], run.name))


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
