"""What the config says about a model, as the plan it is built from. The one module of `training/` that sees config
objects: `train` and `plan` must mean the same model by the same config."""

from __future__ import annotations

import math
from hashlib import sha256
from pathlib import Path

from clickline.config import Config
from clickline.config.sections import (
    EmbeddingSection,
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
    Ftrl,
    RowWiseAdaGrad,
    Schedule,
    Settle,
    SlotShape,
    StepDrop,
)
from clickline.embedding.optimizers import RowOptimizer
from clickline.errors import ConfigError, Mistake
from clickline.features import FeatureSpec
from clickline.models.model_plan import OPTIMIZERS, ModelPlan
from clickline.models.registry import NETWORKS

_LARGEST_BATCH = 4096
_SMALLEST_BATCH = 128
_STEPS_AN_EPOCH = 200


def plan_of(config: Config, features: FeatureSpec, rows: int) -> ModelPlan:
    """The plan of a model that learns so many rows an epoch."""
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
        embedding_optimizer=_embedding(train.embedding),
        wide_optimizer=_wide(train.wide),
        init_scale=train.embedding.init_scale,
        l2=train.embedding.l2,
        admission=Admission(train.admission.shows, train.admission.probability),
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


def _slots(model: ModelSection, features: FeatureSpec) -> tuple[SlotShape, ...]:
    # A network that ignores vectors still keeps its ids in the tables, with the shortest vector there is.
    usual = model.embedding_dim if model.name is None or NETWORKS[model.name].uses_vectors else 1
    shapes = []
    for slot in features.slots:
        own = model.slots.get(slot.name)
        dim = own.dim if own is not None and own.dim is not None else usual
        pooling = own.pooling if own is not None and own.pooling is not None else model.pooling
        shapes.append(SlotShape(slot.name, dim, pooling))
    return tuple(shapes)


def _check_slots(model: ModelSection, features: FeatureSpec) -> None:
    known = [slot.name for slot in features.slots]
    unknown = [name for name in model.slots if name not in known]
    if unknown:
        raise ConfigError(
            [
                Mistake(
                    "clickline.yaml",
                    0,
                    f"model.slots.{name}",
                    "is no slot of the prepared dataset.",
                    f"Its slots are {', '.join(known)}.",
                )
                for name in unknown
            ]
        )


def batch_size_of(train: TrainSection, rows: int) -> int:
    """Rows a step. On few rows a large batch leaves too few steps to learn from them in one epoch."""
    if train.batch_size != "auto":
        return train.batch_size
    size = _LARGEST_BATCH
    while size > _SMALLEST_BATCH and rows / size < _STEPS_AN_EPOCH:
        size //= 2
    return size


def held_out_of(train: TrainSection) -> float:
    """Share of the training rows that is never learned, because calibration is fitted on it."""
    return 0.0 if train.calibration is None else train.calibration.share


def learned_rows(train: TrainSection, rows: int, clicks: int) -> int:
    """How many of so many rows an epoch is expected to learn: the schedules end with the last of them."""
    clicked = min(rows, clicks)
    return int((clicked + (rows - clicked) * train.negative_sampling) * (1 - held_out_of(train)))


def _embedding(embedding: EmbeddingSection) -> RowOptimizer:
    kind = OPTIMIZERS[embedding.optimizer]
    if kind is Ftrl:
        return Ftrl(alpha=embedding.learning_rate)
    if kind in (AdaGrad, RowWiseAdaGrad):
        return kind(embedding.learning_rate, embedding.initial_accumulator)
    return kind(embedding.learning_rate)  # type: ignore[call-arg]


def _wide(wide: WideSection) -> RowOptimizer:
    if wide.optimizer == "ftrl":
        return Ftrl(alpha=wide.learning_rate, l1=wide.l1, l2=wide.l2)
    return OPTIMIZERS[wide.optimizer](learning_rate=wide.learning_rate)  # type: ignore[call-arg]


def _schedule(schedule: ScheduleSection, steps: int) -> Schedule:
    if schedule.kind == "cosine":
        return Cosine(steps, 0.01 if schedule.floor is None else schedule.floor, schedule.warmup)
    if schedule.kind == "settle":
        return Settle(steps, floor=0.1 if schedule.floor is None else schedule.floor, warmup=schedule.warmup)
    if schedule.kind == "step":
        assert schedule.every is not None  # the config has checked it
        return StepDrop(schedule.every, schedule.drop, schedule.warmup)
    return Constant(schedule.warmup)


def _checksum(file: Path) -> str | None:
    return sha256(file.read_bytes()).hexdigest() if file.is_file() else None  # the loader says what is wrong
