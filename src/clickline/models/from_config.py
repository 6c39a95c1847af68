"""Builds the ModelPlan from the config. The only module of `models/` that uses config objects, so that `train` and
`plan` get the same model from the same config."""

from __future__ import annotations

import math
from hashlib import sha256
from pathlib import Path

from clickline.config import Config
from clickline.config.sections import (
    EmbeddingSection,
    EvictionSection,
    ModelSection,
    ScheduleSection,
    TrainSection,
    WideSection,
)
from clickline.embedding import (
    AdaGrad,
    Admission,
    Constant,
    Cosine,
    Eviction,
    Ftrl,
    LinearTail,
    RowWiseAdaGrad,
    Schedule,
    SlotShape,
    StepDrop,
)
from clickline.embedding.optimizers import RowOptimizer
from clickline.errors import ConfigError, Mistake
from clickline.features import FeatureSpec
from clickline.models.model_plan import OPTIMIZERS, ModelPlan
from clickline.models.networks import NETWORKS

_LARGEST_BATCH = 4096
_SMALLEST_BATCH = 128
_STEPS_PER_EPOCH = 200


def plan_of(config: Config, features: FeatureSpec, rows: int) -> ModelPlan:
    """The plan of a model that is trained on `rows` rows per epoch."""
    model, train = config.model, config.train
    _check_slots(model, features)
    steps = train.epochs * math.ceil(rows / batch_size_of(train, rows))
    return ModelPlan(
        network=model.name,
        network_sha256=None if model.file is None else _checksum(Path(model.file)),
        slots=_slots(model, features),
        hidden=model.hidden,
        dropout=model.dropout,
        batch_norm=model.batch_norm,
        embedding_optimizer=_embedding_optimizer(train.embedding),
        wide_optimizer=_wide_optimizer(train.wide),
        init_scale=train.embedding.init_scale,
        l2=train.embedding.l2,
        admission=Admission(train.admission.min_impressions, train.admission.probability),
        learning_rate=train.learning_rate,
        weight_decay=train.weight_decay,
        schedule=_schedule(train.schedule, steps),
        row_schedule=_schedule(train.embedding.schedule, steps),
        precision=train.precision,
        click_weight=train.class_weights.click,
        no_click_weight=train.class_weights.no_click,
        negative_sampling=train.negative_sampling,
        seed=train.seed,
    )


def eviction_of(rule: EvictionSection) -> Eviction:
    return Eviction(rule.threshold, rule.max_idle_hours, rule.click_weight, rule.nonclick_weight)


def _slots(model: ModelSection, features: FeatureSpec) -> tuple[SlotShape, ...]:
    # A network that ignores vectors still has its ids in the tables, with vectors of dim 1.
    default_dim = model.embedding_dim if model.name is None or NETWORKS[model.name].uses_vectors else 1
    shapes = []
    for slot in features.slots:
        override = model.slots.get(slot.name)
        dim = override.dim if override is not None and override.dim is not None else default_dim
        pooling = override.pooling if override is not None and override.pooling is not None else model.pooling
        shapes.append(SlotShape(slot.name, dim, pooling))
    return tuple(shapes)


def _check_slots(model: ModelSection, features: FeatureSpec) -> None:
    known = [slot.name for slot in features.slots]
    problem, remedy = "is not a slot of the prepared dataset.", f"Its slots are {', '.join(known)}."
    unknown = [f"model.slots.{name}" for name in model.slots if name not in known]
    if unknown:
        raise ConfigError([Mistake("clickline.yaml", 0, key, problem, remedy) for key in unknown])


def batch_size_of(train: TrainSection, rows: int) -> int:
    """Rows per step. With few rows a large batch would leave too few steps per epoch."""
    if train.batch_size != "auto":
        return train.batch_size
    size = _LARGEST_BATCH
    while size > _SMALLEST_BATCH and rows / size < _STEPS_PER_EPOCH:
        size //= 2
    return size


def holdout_share(train: TrainSection) -> float:
    """Share of the training rows that is held out to fit the calibration on."""
    return 0.0 if train.calibration is None else train.calibration.holdout


def expected_train_rows(train: TrainSection, rows: int, clicks: int) -> int:
    """The expected number of rows that an epoch trains on, of `rows` rows: the length of the schedules."""
    clicked = min(rows, clicks)
    return int((clicked + (rows - clicked) * train.negative_sampling) * (1 - holdout_share(train)))


def _embedding_optimizer(embedding: EmbeddingSection) -> RowOptimizer:
    kind = OPTIMIZERS[embedding.optimizer]
    if kind is Ftrl:
        return Ftrl(alpha=embedding.learning_rate)
    if kind in (AdaGrad, RowWiseAdaGrad):
        return kind(embedding.learning_rate, embedding.initial_accumulator)
    return kind(embedding.learning_rate)  # type: ignore[call-arg]


def _wide_optimizer(wide: WideSection) -> RowOptimizer:
    if wide.optimizer == "ftrl":
        return Ftrl(alpha=wide.learning_rate, l1=wide.l1, l2=wide.l2)
    return OPTIMIZERS[wide.optimizer](learning_rate=wide.learning_rate)  # type: ignore[call-arg]


def _schedule(schedule: ScheduleSection, steps: int) -> Schedule:
    floor, warmup = schedule.min_lr_ratio, schedule.warmup_steps
    if schedule.kind == "cosine":
        return Cosine(steps, 0.01 if floor is None else floor, warmup)
    if schedule.kind == "linear_tail":
        return LinearTail(steps, floor=0.1 if floor is None else floor, warmup=warmup)
    if schedule.kind == "step":
        assert schedule.step_size is not None  # the config has checked it
        return StepDrop(schedule.step_size, schedule.gamma, warmup)
    return Constant(warmup)


def _checksum(file: Path) -> str | None:
    # If there is no file, the loader reports it.
    return sha256(file.read_bytes()).hexdigest() if file.is_file() else None
