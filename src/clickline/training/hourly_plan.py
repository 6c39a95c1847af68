"""The plan of continuous training, and what of it may change between two starts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clickline.artifacts.checkpoint import Checkpoint
from clickline.config import Config
from clickline.config.sections import ScheduleSection
from clickline.errors import ArtifactError
from clickline.features import ENCODER_FORMAT, FeatureSpec
from clickline.models.from_config import plan_of
from clickline.models.model_plan import ModelPlan

_SHAPE_KEYS = (
    "network",
    "network_sha256",
    "slots",
    "hidden",
    "batch_norm",
    "embedding_optimizer",
    "wide_optimizer",
)


def hourly_plan(config: Config, features: FeatureSpec) -> ModelPlan:
    """The plan of continuous training: constant learning rates."""
    train, rate = config.train, config.follow.lr_scale
    constant_lr = train.model_copy(
        update={
            "learning_rate": train.learning_rate * rate,
            "schedule": ScheduleSection(kind="constant", warmup_steps=train.schedule.warmup_steps),
            "embedding": train.embedding.model_copy(
                update={
                    "learning_rate": train.embedding.learning_rate * rate,
                    "schedule": ScheduleSection(
                        kind="constant", warmup_steps=train.embedding.schedule.warmup_steps
                    ),
                }
            ),
            "wide": train.wide.model_copy(update={"learning_rate": train.wide.learning_rate * rate}),
        }
    )
    return plan_of(config.model_copy(update={"train": constant_lr}), features, 1)


def check_format(checkpoint: Checkpoint, run: Path) -> None:
    """Refuse a checkpoint with another id format: its embeddings would belong to other values."""
    before = checkpoint.manifest.features.get("encoder_format")
    if before != ENCODER_FORMAT:
        raise ArtifactError(
            f"the hourly model in {run} uses feature format {before!r}; this release of Clickline uses format "
            f"{ENCODER_FORMAT}, in which some values have other ids. Use the release that wrote it, or start over: "
            f"choose another home, or remove {run}."
        )


def check_shape(checkpoint: Checkpoint, plan: ModelPlan, run: Path) -> None:
    """Learning rates may change between starts; the shapes of rows and weights may not."""
    before, now = checkpoint.manifest.plan, plan.to_json()

    def kind(value: Any) -> Any:
        return value["kind"] if isinstance(value, Mapping) else value

    changed = [
        f"{key} was {kind(before[key])}, now {kind(now[key])}"
        for key in _SHAPE_KEYS
        if kind(before[key]) != kind(now[key])
    ]
    if changed:
        raise ArtifactError(
            f"the hourly model in {run} differs from the config: {'; '.join(changed)}. "
            f"Change the config back, or start over: choose another home, or remove {run}."
        )
