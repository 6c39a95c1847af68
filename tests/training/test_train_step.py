"""The model learns what can be learned, and all of its state can be put away and taken up again."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
from training_doubles import model_plan

from clickline.embedding import (
    AdaGrad,
    Adam,
    Constant,
    Cosine,
    Ftrl,
    LinearTail,
    SlotShape,
    StepDrop,
)
from clickline.errors import ArtifactError, ClicklineError
from clickline.features import DenseField, FeatureSpec, SlotField
from clickline.models.model import Model, network_arrays
from clickline.models.model_plan import ModelPlan
from clickline.records import EncodedRows, LabelledRows, SlotIds
from clickline.training.train_step import TrainStep

FEATURES = FeatureSpec((DenseField("x", "x", "none"),), (SlotField("s", "s", 1), SlotField("t", "t", 2)))
PLAN = model_plan(embedding_optimizer=AdaGrad(0.1))


def train_step(**changes: object) -> TrainStep:
    return TrainStep(Model.build(FEATURES, dataclasses.replace(PLAN, **changes), threads=2))


def learn(one: TrainStep, rows: LabelledRows) -> float:
    return one.run(one.prepare(rows)).loss


def batch(rng: np.random.Generator, rows: int = 512) -> LabelledRows:
    """A click where exactly one of two ids is odd."""
    s, t = rng.integers(0, 8, (2, rows), dtype=np.uint64)
    x = rng.normal(size=(1, rows)).astype(np.float32)
    return labelled(((s ^ t) & np.uint64(1)).astype(np.float32), s, t, x)


def labelled(label, s, t, x) -> LabelledRows:
    rows = len(label)
    ones = np.ones(rows, dtype=np.uint32)
    encoded = EncodedRows(rows, x, (SlotIds(s + np.uint64(100)), SlotIds(t + np.uint64(200))))
    return LabelledRows(
        label, ones.astype(np.float32), ones, label.astype(np.uint32), np.zeros(rows, np.int32), encoded
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"precision": "bf16"},
        {"embedding_optimizer": Adam(0.01)},
        {"dropout": 0.1},
        {"batch_norm": True},
        {"network": "deepfm"},
    ],
    ids=str,
)
def test_interaction_between_two_slots_is_learned(changes):
    rng = np.random.default_rng(0)
    one = train_step(**changes)
    first = learn(one, batch(rng))
    for _ in range(300):
        last = learn(one, batch(rng))
    assert first > 0.6
    assert last < 0.2
    rows = batch(rng)
    assert ((one.model.score(rows) > 0.5) == (rows.label_B > 0.5)).mean() > 0.98


@pytest.mark.parametrize("schedule", [Constant(2), Cosine(6), LinearTail(6), StepDrop(2)])
def test_state_is_complete(schedule):
    rng = np.random.default_rng(1)
    one = train_step(schedule=schedule, row_schedule=schedule, dropout=0.3)
    rows = [batch(rng) for _ in range(6)]
    for part in rows[:3]:
        learn(one, part)
    state = one.dense.state()
    after = [learn(one, part) for part in rows[3:]]
    again = train_step(schedule=schedule, row_schedule=schedule, dropout=0.3)
    for part in rows[:3]:
        learn(again, part)
    torch.manual_seed(99)
    again.dense.load_state(state, step=3)
    assert [learn(again, part) for part in rows[3:]] == after


def test_non_finite_loss_raises_and_leaves_the_weights():
    rows = batch(np.random.default_rng(2))
    rows.encoded.dense_DB[0, 0] = np.inf
    one = train_step()
    before = network_arrays(one.model.network)
    with pytest.raises(ClicklineError, match=r"training has diverged\. Lower train\.learning_rate"):
        learn(one, rows)
    for name, value in network_arrays(one.model.network).items():
        assert np.array_equal(value, before[name])


@pytest.mark.parametrize("shows", [1, 10])
@pytest.mark.parametrize(
    "changes", [{"click_weight": 5.0}, {"no_click_weight": 0.2}, {"negative_sampling": 0.25}], ids=str
)
def test_scores_are_probabilities_despite_weights_and_sampling(changes, shows):
    """With `negative_sampling` the rows given to learn are already sampled, as the trainer does it."""
    rng = np.random.default_rng(3)
    true = np.array([0.05, 0.1, 0.2, 0.4, 0.05, 0.1, 0.2, 0.4])

    def draw(rows: int) -> LabelledRows:
        s, t = rng.integers(0, 8, (2, rows), dtype=np.uint64)
        click = rng.binomial(shows, true[s]).astype(np.uint32)
        single = labelled(click.astype(np.float32) / shows, s, t, np.zeros((1, rows), np.float32))
        show = np.full(rows, shows, dtype=np.uint32)
        return dataclasses.replace(single, weight_B=show.astype(np.float32), impression_B=show, click_B=click)

    one = train_step(**changes)
    for _ in range(400):
        rows = draw(1024)
        learn(
            one, rows.select((rows.click_B > 0) | (rng.random(rows.rows) < one.model.plan.negative_sampling))
        )
    fresh = draw(50_000)
    score_B = one.model.score(fresh)
    for value in range(4):
        mark_B = (fresh.encoded.slots[0].ids_N - np.uint64(100)) % np.uint64(4) == value
        assert score_B[mark_B].mean() == pytest.approx(true[value], rel=0.15)


def test_network_without_inputs_trains_wide_weights():
    features = FeatureSpec((), FEATURES.slots)
    one = TrainStep(
        Model.build(features, dataclasses.replace(PLAN, network="lr", wide_optimizer=Ftrl(0.5)), threads=1)
    )
    rng = np.random.default_rng(4)
    for _ in range(100):
        s, t = rng.integers(0, 8, (2, 256), dtype=np.uint64)
        label = (s > 3).astype(np.float32)
        last = learn(one, labelled(label, s, t, np.empty((0, 256), np.float32)))
    assert last < 0.2


def test_plan_round_trips_through_json():
    plan = dataclasses.replace(
        PLAN,
        slots=(SlotShape("s", 4, "mean"), SlotShape("t", 7)),
        schedule=Cosine(100, 0.1, 5),
        row_schedule=LinearTail(100),
        embedding_optimizer=Adam(0.002),
    )
    document = json.loads(json.dumps(plan.to_json()))
    assert document == plan.to_json()  # runs are told apart by it
    assert ModelPlan.from_json(document) == plan


def test_plan_of_another_release_is_refused():
    document = PLAN.to_json()
    del document["l2"]
    with pytest.raises(ArtifactError, match=r"written by another release or is damaged\. Train again"):
        ModelPlan.from_json(document)
