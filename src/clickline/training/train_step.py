"""The training step of a model on one machine: one call per batch, and all of its state."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from clickline.config import Config
from clickline.embedding import BatchLookup
from clickline.features import FeatureSpec
from clickline.models.model import Model
from clickline.models.model_plan import ModelPlan
from clickline.models.onnx_export import check_export
from clickline.records import LabelledRows
from clickline.training.dense_optimizer import DenseOptimizer, Diverged


@dataclass(frozen=True)
class PreparedBatch:
    """A batch whose ids have been looked up and counted."""

    rows: LabelledRows
    lookup: BatchLookup


@dataclass(frozen=True)
class StepResult:
    """Loss and predictions of a batch before the update."""

    loss: float
    probability_B: NDArray[np.float32]


class TrainStep:
    """Trains a model batch by batch. It is deterministic: the result follows from its plan and its batches."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.dense = DenseOptimizer(model.network, model.plan, model.custom)
        self._feed = model.custom.feed if model.custom is not None else None

    @property
    def step(self) -> int:
        """Number of batches trained."""
        return self.dense.step

    def prepare(self, rows: LabelledRows) -> PreparedBatch:
        """Look up a batch's ids and count its impressions and clicks. May run in another thread while the batch before
        is being trained; batches must be prepared in the order in which they are trained."""
        if self._feed is not None:
            rows = self._feed(rows)
        lookup = self.model.tables.find(
            rows.encoded.slots,
            rows.rows,
            impressions_B=rows.impression_B,
            clicks_B=rows.click_B,
            hours_B=rows.event_hour_B,
            train=True,
        )
        return PreparedBatch(rows, lookup)

    def run(self, batch: PreparedBatch) -> StepResult:
        """Train on one prepared batch."""
        inputs_BI, wide_B = self.model.pool(batch.lookup, batch.rows)
        computed = self.dense.compute(batch.rows, inputs_BI, wide_B)
        if not computed.finite:
            raise Diverged(computed.mean_loss, batch.rows)
        factor = self.model.plan.row_schedule.factor(self.step)
        self.dense.update(None, computed.total_weight)
        # A row's optimizer sees the gradient of its own impressions, not their share in the batch: what it
        # learns must not depend on the batch size.
        self.model.tables.apply(batch.lookup, computed.grad_inputs_BI, computed.grad_wide_B, factor)
        return StepResult(computed.mean_loss, self.model.probabilities(torch.from_numpy(computed.logit_B)))


def build_train_step(config: Config, features: FeatureSpec, plan: ModelPlan, threads: int) -> TrainStep:
    """The training step of a new model. Refuses a network that could not be published: it is not worth training."""
    file = None if config.model.file is None else Path(config.model.file)
    model = Model.build(features, plan, threads, file)
    check_export(model.network, model.spec)
    return TrainStep(model)
