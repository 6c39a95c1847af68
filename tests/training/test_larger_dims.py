"""At the default step sizes a network learns as well with long vectors as with those of the default dim."""

from __future__ import annotations

import numpy as np
import pytest
from training_doubles import model_plan

from clickline.embedding import AdaGrad, Ftrl, SlotShape
from clickline.evaluation.binary_metrics import MetricCounts, Metrics
from clickline.features import DenseField, FeatureSpec, SlotField
from clickline.models.model import Model
from clickline.records import EncodedRows, LabelledRows, SlotIds
from clickline.training.train_step import TrainStep

SLOTS, DENSE, ROWS = 20, 6, 12_000
FEATURES = FeatureSpec(
    tuple(DenseField(f"x{d}", f"x{d}", "none") for d in range(DENSE)),
    tuple(SlotField(f"s{s}", f"s{s}", s) for s in range(SLOTS)),
)


def rows() -> LabelledRows:
    """Many rare ids, as logs have them; two slots and a number decide how often there is a click."""
    rng = np.random.default_rng(5)
    ids_SB = np.minimum(rng.zipf(1.3, (SLOTS, ROWS)), 5000).astype(np.uint64)
    dense_DB = np.log1p(rng.exponential(20, (DENSE, ROWS))).astype(np.float32)
    logit_B = -2.0 + 2.0 * (ids_SB[0] == 1) * (ids_SB[1] == 1) + 0.8 * (dense_DB[0] - 2.5)
    click_B = (rng.random(ROWS) < 1 / (1 + np.exp(-logit_B))).astype(np.uint32)
    ones = np.ones(ROWS, dtype=np.uint32)
    slots = tuple(SlotIds(ids_B + np.uint64(10_000 * s)) for s, ids_B in enumerate(ids_SB))
    label_B, weight_B = click_B.astype(np.float32), ones.astype(np.float32)
    return LabelledRows(
        label_B, weight_B, ones, click_B, np.zeros(ROWS, np.int32), EncodedRows(ROWS, dense_DB, slots)
    )


def learned(network: str, dim: int) -> Metrics:
    """How good the model is on the last sixth of the rows, having learned the others once."""
    plan = model_plan(
        network=network,
        slots=tuple(SlotShape(f"s{s}", dim) for s in range(SLOTS)),
        hidden=(16,),
        embedding_optimizer=AdaGrad(0.05, 0.001),
        wide_optimizer=Ftrl(0.05),
        learning_rate=0.001,
    )
    train_step = TrainStep(Model.build(FEATURES, plan, threads=2))
    whole, last = rows(), ROWS * 5 // 6
    for start in range(0, last, 100):
        train_step.run(train_step.prepare(whole.slice(start, start + 100)))
    unseen = whole.slice(last, ROWS)
    counts = MetricCounts()
    counts.add(unseen.label_B, unseen.weight_B, train_step.model.score(unseen))
    return counts.metrics()


@pytest.mark.slow
@pytest.mark.parametrize("network", ["fm", "deepfm"])
@pytest.mark.parametrize("dim", [64, 256])
def test_long_vectors_do_not_diverge_at_the_default_learning_rates(network, dim):
    usual, long = learned(network, 9), learned(network, dim)
    assert usual.normalised_entropy < 1
    assert long.normalised_entropy < 1
    assert long.logloss < 1.03 * usual.logloss
