"""Evaluates the model of a run on the eval rows of its dataset, and analyzes its fields."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from clickline.artifacts.checkpoint import Checkpoint
from clickline.artifacts.dataset import Dataset
from clickline.evaluation.evaluator import Evaluation, evaluate_rows
from clickline.evaluation.importance import FieldImportance
from clickline.evaluation.report.report_document import (
    measure_importance,
    sample,
    slots_to_slice,
    unseen_shares_in_files,
)
from clickline.features import FeatureSpec
from clickline.progress import Progress
from clickline.records import LabelledRows

if TYPE_CHECKING:
    from clickline.training.training_run import Trainer


@dataclass(frozen=True)
class FieldAnalysis:
    """Importance and coverage of the fields, measured on a sample of the eval rows."""

    importance: tuple[FieldImportance, ...]
    importance_rows: int
    # By slot: share of the values without a vector; None: the tables are too large to be read.
    unseen: Sequence[float] | None


@dataclass(frozen=True)
class ModelEvaluation:
    """The evaluation of a model, and the sizes of its tables."""

    evaluation: Evaluation | None  # None without eval rows
    slots: Sequence[Mapping[str, Any]]
    fields: FieldAnalysis | None = None  # None without eval rows, and until it is needed: it takes a while


class EpochEvaluator:
    """Evaluates a trainer's model, once per step."""

    def __init__(self, dataset: Dataset, trainer: Trainer, progress: Progress) -> None:
        self._dataset = dataset
        self._trainer = trainer
        self._progress = progress
        self._evaluations: dict[int, ModelEvaluation] = {}  # by step: the newest and the best
        self._samples: dict[str, LabelledRows | None] = {}
        self.sliced_slots = slots_to_slice(dataset, dataset.features)

    @property
    def features(self) -> FeatureSpec:
        return self._dataset.features

    def forget(self) -> None:
        """Forget all evaluations: steps are trained again."""
        self._evaluations = {}

    def has(self, step: int) -> bool:
        return step in self._evaluations

    def evaluate(
        self, evicted: Mapping[str, int], *, keep: Collection[int] = (), analyze_fields: bool = False
    ) -> Evaluation | None:
        """Evaluate the current model on all eval rows. The evaluations of the steps `keep` remain."""
        trainer = self._trainer
        step, custom = trainer.step, trainer.model.custom
        if step not in self._evaluations:
            evaluation = None
            if "eval" in self._dataset.splits:
                evaluation = evaluate_rows(
                    trainer.score,
                    self.eval_rows(),
                    slots=self.sliced_slots,
                    custom_metrics=None if custom is None else custom.metrics,
                )
            slots = [{**asdict(slot), "evicted": evicted.get(slot.name, 0)} for slot in trainer.slots()]
            self._evaluations = {known: self._evaluations[known] for known in keep if self.has(known)}
            self._evaluations[step] = ModelEvaluation(evaluation, slots)
            if analyze_fields:
                self._analyze_fields()
        return self._evaluations[step].evaluation

    def result(self, step: int, evicted: Mapping[str, int], checkpoint: Checkpoint) -> ModelEvaluation:
        """The complete evaluation of the model at `step`: the current one, or one that was kept."""
        if step == self._trainer.step:
            self.evaluate(evicted)
            self._analyze_fields()
        result, rows = self._evaluations[step], self.sample("eval")
        if result.fields is None or result.fields.unseen is not None or rows is None:
            return result
        unseen = unseen_shares_in_files(checkpoint.tables, rows)
        return replace(result, fields=replace(result.fields, unseen=unseen))

    def _analyze_fields(self) -> None:
        """Measure the importance of the fields to the current model, once."""
        rows, evaluated = self.sample("eval"), self._evaluations[self._trainer.step]
        if evaluated.fields is not None or evaluated.evaluation is None or rows is None:
            return
        self._progress.begin("field importance")
        importance, count = measure_importance(self._score_with_progress, rows, self._dataset.features)
        self._progress.end()
        fields = FieldAnalysis(importance, count, self._trainer.unseen_shares(rows))
        self._evaluations[self._trainer.step] = replace(evaluated, fields=fields)

    def _score_with_progress(self, rows: LabelledRows) -> NDArray[np.float32]:
        self._progress.advance(rows=rows.rows)
        return self._trainer.score(rows)

    def sample(self, split: str) -> LabelledRows | None:
        """A sample of a split's rows; None if it has none."""
        if split not in self._samples:
            self._samples[split] = sample(self._dataset, split, partial(self._dataset.read_group, split))
        return self._samples[split]

    def eval_rows(self) -> Iterator[LabelledRows]:
        """All rows of the eval split."""
        self._progress.begin("evaluate", total_rows=self._dataset.splits["eval"].rows)
        for rows in self._dataset.read_split("eval"):
            yield rows
            self._progress.advance(rows=rows.rows)
        self._progress.end()
