"""The evaluate stage: any checkpoint or version on any data, to a report."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from clickline.artifacts.dataset import Dataset, dataset_folder
from clickline.artifacts.from_config import registry_of, storage_of
from clickline.artifacts.registry import Move
from clickline.config import Config
from clickline.config.loader import resolved
from clickline.errors import ClicklineError, ConfigError, Mistake
from clickline.evaluation.baseline import worse_than_base_rate
from clickline.evaluation.drift import RowSample
from clickline.evaluation.eval_rows import DatasetRows, LogRows, Rows, open_rows
from clickline.evaluation.evaluator import Evaluation, measure
from clickline.evaluation.gate import Thresholds, Verdict, judge
from clickline.evaluation.importance import FieldImportance, ImportanceCounts
from clickline.evaluation.live_version import with_current
from clickline.evaluation.report.report_document import (
    SAMPLED_ROWS,
    Current,
    Told,
    document,
    drift_between,
    lineage,
    names_in,
    sample,
    slot_table,
    write,
)
from clickline.evaluation.scored_model import Judged, find_model
from clickline.features import FeatureSpec
from clickline.progress import Progress, usual
from clickline.records import LabelledRows
from clickline.storage.file_cache import Cache
from clickline.storage.storage import Storage


@dataclass(frozen=True)
class EvaluateResult:
    """What a model is worth on some rows."""

    model: Judged
    rows: Rows
    evaluation: Evaluation
    names: Mapping[str, Mapping[int, str]]  # by sliced slot: what an id stands for, where that is known
    importance: tuple[FieldImportance, ...] | None  # most important first; None: not asked for
    verdict: Verdict
    document: Mapping[str, Any]  # the report
    report: str  # where it was written
    page: str | None  # the same to look at; None: it could not be made
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
        return dict(self.document)


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
    some = RowSample(SAMPLED_ROWS)
    evaluation = measure(
        judged.score,
        _watched(rows.read(progress), some),
        slots=places,
        own=judged.own,
        importance=shuffled,
    )
    asked = Thresholds(**config.gate.model_dump(exclude={"retries"}))
    current, why = _current(config, storage, cache, judged, data, split, places, progress)
    heavy = {slot: [one.id for one in found] for slot, found in evaluation.slices.items()}
    names = rows.names(heavy) if heavy else {}
    worth = None if shuffled is None else shuffled.found(evaluation.total)
    verdict = judge(evaluation.total, asked, None if current is None else current.evaluation.total, why)
    verdict = verdict.warned(worse_than_base_rate(evaluation.total, features, some.rows()))
    notes = [f"No other version was measured on these rows: {why}."] if why else []
    if worth is None:
        notes.append(
            "What each field is worth was not asked for: `clickline evaluate --importance` tells it."
        )
    learned, fields = _fields(config, storage, cache, judged, rows, some.rows(), notes)
    told = Told(
        name=f"{judged.name}-{rows.label}",
        home=config.home,
        project=config.name,
        config=resolved(config),
        lineage=lineage(learned, judged.checkpoint, judged.version),
        evaluation=evaluation,
        verdict=verdict,
        importance=worth,
        importance_rows=None if worth is None else evaluation.total.rows,
        current=current,
        names=names,
        notes=notes,
        **fields,
    )
    whole = {"model": dict(judged.document), "data": rows.to_json(), **document(told)}
    place = out or Storage.join(config.home, "evaluations", f"{told.name}.json")
    page = write(whole, place, storage, progress)
    return EvaluateResult(
        judged, rows, evaluation, names, worth, verdict, whole, place, page, time.monotonic() - began
    )


def _watched(rows: Iterable[LabelledRows], some: RowSample) -> Iterator[LabelledRows]:
    """The same rows, of which a sample is kept."""
    for part in rows:
        some.add(part)
        yield part


def _fields(
    config: Config,
    storage: Storage,
    cache: Cache,
    judged: Judged,
    rows: Rows,
    some: LabelledRows | None,
    notes: list[str],
) -> tuple[Dataset | None, dict[str, Any]]:
    """The dataset that the model has learned, and what it and the evaluated rows tell of the fields."""
    notes.append("How the model was trained is told in the report of its run.")
    features, name = judged.features, judged.document.get("dataset")
    unseen = None if some is None else judged.unseen(some)
    evaluated = rows.dataset.splits[rows.split] if isinstance(rows, DatasetRows) else None
    if evaluated is None:
        notes.append("Different and missing values of raw logs are not counted.")
    try:
        learned = Dataset.open(storage, dataset_folder(config.home, name)) if name else None
    except ClicklineError:
        learned = None
    same = learned is not None and learned.features == features and "train" in learned.splits
    drift = None
    if learned is None or not same:
        notes.append(
            "What the model has learned from is not here any more, so these rows are compared with nothing."
        )
    elif some is not None:
        before = sample(learned, "train", DatasetRows(learned, "train", storage, cache).group)
        if before is not None:
            drift = drift_between(features, before, some, names_in(learned, features))
    train = learned.splits.get("train") if learned is not None and same else None
    table = slot_table(features, train, evaluated, judged.slots, unseen)
    return learned, {"slot_table": table, "drift": drift}


def _current(
    config: Config,
    storage: Storage,
    cache: Cache,
    judged: Judged,
    data: Sequence[str],
    split: str,
    sliced: Collection[str],
    progress: Progress,
) -> tuple[Current | None, str]:
    """The live version on the same rows, encoded as it wants them; without it, why not."""
    asked = config.gate.vs_current is not None

    def score(move: Move) -> Current | None:
        if move.version == judged.version and not asked:
            return None
        live = find_model(config, str(move.version))
        rows = open_rows(config, storage, cache, data, split, live.features, progress)
        places = {slot.name: place for place, slot in enumerate(live.features.slots) if slot.name in sliced}
        return Current(move.version, measure(live.score, rows.read(progress), slots=places))

    current, why = with_current(registry_of(config), score, asked=asked)
    return current, why or ("" if current else f"version {judged.version} is the current one itself")


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
