"""The evaluate stage: evaluates any checkpoint or version on any data and writes a report."""

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
from clickline.evaluation.eval_rows import DatasetRows, EvalRows, EvalSource, LogRows
from clickline.evaluation.evaluator import Evaluation, evaluate_rows
from clickline.evaluation.gate import Thresholds, Verdict, check_gate
from clickline.evaluation.importance import FieldImportance, ImportanceCounts
from clickline.evaluation.live_version import with_live_version
from clickline.evaluation.report.report_document import (
    SAMPLED_ROWS,
    LiveEvaluation,
    ReportInputs,
    build_document,
    dataset_id_names,
    drift_between,
    lineage,
    sample,
    slot_table,
    write_report,
)
from clickline.evaluation.scored_model import ScoredModel, find_model
from clickline.features import FeatureSpec
from clickline.progress import Progress, default_progress
from clickline.records import LabelledRows
from clickline.storage.file_cache import FileCache
from clickline.storage.storage import Storage


@dataclass(frozen=True)
class EvaluateResult:
    """The evaluation of a model on some rows."""

    model: ScoredModel
    rows: EvalRows
    evaluation: Evaluation
    names: Mapping[str, Mapping[int, str]]  # values of ids by sliced slot, if known
    importance: tuple[FieldImportance, ...] | None  # highest first; None: not requested
    verdict: Verdict
    document: Mapping[str, Any]  # the report
    report: str  # where it was written
    page: str | None  # the HTML page; None if it could not be written
    seconds: float

    @property
    def bad(self) -> Mapping[str, int]:
        """Rows of raw logs that were left out, by reason."""
        return self.rows.logs.bad if isinstance(self.rows, LogRows) else {}

    def name_of(self, slot: str, id: int) -> str:
        """The display name of an id: its value if known, else its hexadecimal number."""
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
    """Score rows with a model, compute metrics, check the config's gate and write the report.

    `model` is what `find_model` takes. `data` is a dataset's folder or raw logs, which are encoded for the model; the
    default is the current dataset. `slices` are the slots to slice by; `seed` sets the shuffling for the importance.
    """
    began = time.monotonic()
    progress = progress or default_progress()
    storage = storage_of(config)
    cache = FileCache(Path(config.cache.dir), config.cache.size, storage)
    scored = find_model(config, model)
    features = scored.features
    slot_indices = _slot_indices(slices, features)
    source = EvalSource(config, storage, cache, data, split)
    rows = source.open(features, progress)

    importance_counts = ImportanceCounts(features, seed) if importance else None
    sampler = RowSample(SAMPLED_ROWS)
    evaluation = evaluate_rows(
        scored.score,
        _sampled(rows.read(progress), sampler),
        slots=slot_indices,
        custom_metrics=scored.custom_metrics,
        importance=importance_counts,
    )
    current, why = _evaluate_live(source, scored, slot_indices, progress)
    top_ids = {slot: [one.id for one in slices_of_slot] for slot, slices_of_slot in evaluation.slices.items()}
    names = rows.names(top_ids) if top_ids else {}
    importances = None if importance_counts is None else importance_counts.result(evaluation.total)
    live = None if current is None else current.evaluation.total
    verdict = check_gate(evaluation.total, Thresholds.of(config.gate), live, why)
    verdict = verdict.warned(worse_than_base_rate(evaluation.total, features, sampler.rows()))
    notes = [f"No other version was evaluated on these rows: {why}."] if why else []
    if importances is None:
        notes.append("Field importance was not requested: run `clickline evaluate --importance`.")
    training_dataset, fields = _field_analysis(source, scored, rows, sampler.rows(), notes)
    inputs = ReportInputs(
        name=f"{scored.name}-{rows.label}",
        home=config.home,
        project=config.name,
        config=resolved(config),
        lineage=lineage(training_dataset, scored.checkpoint, scored.version),
        evaluation=evaluation,
        verdict=verdict,
        importance=importances,
        importance_rows=None if importances is None else evaluation.total.rows,
        current=current,
        names=names,
        notes=notes,
        **fields,
    )
    report = {"model": dict(scored.document), "data": rows.to_json(), **build_document(inputs)}
    path = out or Storage.join(config.home, "evaluations", f"{inputs.name}.json")
    page = write_report(report, path, storage, progress)
    return EvaluateResult(
        scored, rows, evaluation, names, importances, verdict, report, path, page, time.monotonic() - began
    )


def _sampled(rows: Iterable[LabelledRows], sampler: RowSample) -> Iterator[LabelledRows]:
    """Pass the rows on and keep a sample of them."""
    for part in rows:
        sampler.add(part)
        yield part


def _field_analysis(
    source: EvalSource,
    scored: ScoredModel,
    rows: EvalRows,
    sample_rows: LabelledRows | None,
    notes: list[str],
) -> tuple[Dataset | None, dict[str, Any]]:
    """The dataset that the model was trained on, and the slot table and drift of the report."""
    storage = source.storage
    notes.append("See the report of the run for how the model was trained.")
    features, name = scored.features, scored.document.get("dataset")
    unseen_shares = None if sample_rows is None else scored.unseen_shares(sample_rows)
    evaluated = rows.dataset.splits[rows.split] if isinstance(rows, DatasetRows) else None
    if evaluated is None:
        notes.append("Distinct and missing values are not counted for raw logs.")
    try:
        training_dataset = Dataset.open(storage, dataset_folder(source.config.home, name)) if name else None
    except ClicklineError:
        training_dataset = None
    same = (
        training_dataset is not None
        and training_dataset.features == features
        and "train" in training_dataset.splits
    )
    drift = None
    if training_dataset is None or not same:
        notes.append("The training data of the model is no longer available, so drift cannot be measured.")
    elif sample_rows is not None:
        train_rows = DatasetRows(training_dataset, "train", storage, source.cache)
        before = sample(training_dataset, "train", train_rows.group)
        if before is not None:
            drift = drift_between(features, before, sample_rows, dataset_id_names(training_dataset, features))
    train = training_dataset.splits.get("train") if training_dataset is not None and same else None
    table = slot_table(features, train, evaluated, scored.slots, unseen_shares)
    return training_dataset, {"slot_table": table, "drift": drift}


def _evaluate_live(
    source: EvalSource, scored: ScoredModel, sliced: Collection[str], progress: Progress
) -> tuple[LiveEvaluation | None, str]:
    """Evaluate the live version on the same rows, encoded for it; without one, returns the reason."""
    config = source.config
    requested = config.gate.vs_current is not None

    def score(move: Move) -> LiveEvaluation | None:
        if move.version == scored.version and not requested:
            return None
        live = find_model(config, str(move.version))
        rows = source.open(live.features, progress)
        slot_indices = {
            slot.name: index for index, slot in enumerate(live.features.slots) if slot.name in sliced
        }
        return LiveEvaluation(
            move.version, evaluate_rows(live.score, rows.read(progress), slots=slot_indices)
        )

    current, why = with_live_version(registry_of(config), score, requested=requested)
    return current, why or ("" if current else f"version {scored.version} is the current version")


def _slot_indices(slices: Sequence[str], features: FeatureSpec) -> dict[str, int]:
    """The slots to slice by, with their indices in the rows."""
    slots = [slot.name for slot in features.slots]
    dense = [field.name for field in features.dense]
    mistakes = []
    for name in dict.fromkeys(slices):
        if name in slots:
            continue
        matches = get_close_matches(name, slots, n=1)
        problem = "is a dense field" if name in dense else "is not a slot of the model"
        mistakes.append(
            Mistake(
                "",
                0,
                f"--slice {name}",
                f"{problem}. Its slots: {', '.join(slots)}.",
                f"Did you mean {matches[0]}?" if matches else "Name one of them.",
            )
        )
    if mistakes:
        raise ConfigError(mistakes)
    return {name: slots.index(name) for name in dict.fromkeys(slices)}
