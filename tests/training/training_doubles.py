"""What several tests of training need: a progress that keeps what was said, and a small plan."""

from __future__ import annotations

from typing import Any

from clickline.embedding import AdaGrad, Admission, Constant, Ftrl, SlotShape
from clickline.models.model_plan import ModelPlan
from clickline.progress import Progress


class Heard(Progress):
    """Keeps what was said."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.notes: list[str] = []

    def log(self, message: str) -> None:
        self.said.append(message)

    def note(self, figures: str) -> None:
        self.notes.append(figures)


def model_plan(**changes: Any) -> ModelPlan:
    """A small model of two slots, at constant learning rates."""
    values: dict[str, Any] = {
        "network": "wide_deep",
        "network_sha256": None,
        "slots": (SlotShape("s", 4), SlotShape("t", 4)),
        "hidden": (8,),
        "dropout": 0.0,
        "batch_norm": False,
        "embedding_optimizer": AdaGrad(),
        "wide_optimizer": Ftrl(),
        "init_scale": 0.01,
        "l2": 0.0,
        "admission": Admission(),
        "learning_rate": 0.01,
        "weight_decay": 0.0,
        "schedule": Constant(),
        "row_schedule": Constant(),
        "precision": "fp32",
        "click_weight": 1.0,
        "no_click_weight": 1.0,
        "negative_sampling": 1.0,
        "seed": 0,
    }
    return ModelPlan(**(values | changes))
