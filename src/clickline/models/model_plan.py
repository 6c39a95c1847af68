"""Everything that defines a model besides its data: stored with each checkpoint, so that it can be rebuilt."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from clickline.embedding import (
    AdaGrad,
    Adam,
    Admission,
    Constant,
    Cosine,
    Ftrl,
    LinearTail,
    RowWiseAdaGrad,
    Schedule,
    Sgd,
    SlotShape,
    StepDrop,
)
from clickline.embedding.optimizers import RowOptimizer
from clickline.errors import ArtifactError

OPTIMIZERS: dict[str, type[RowOptimizer]] = {
    "sgd": Sgd,
    "adagrad": AdaGrad,
    "rowwise_adagrad": RowWiseAdaGrad,
    "adam": Adam,
    "ftrl": Ftrl,
}
SCHEDULES: dict[str, type[Schedule]] = {
    "constant": Constant,
    "cosine": Cosine,
    "settle": LinearTail,
    "step": StepDrop,
}


@dataclass(frozen=True)
class ModelPlan:
    """The shape of a model and how it is trained."""

    network: str | None  # the name of a built-in network; None: the user's file
    network_sha256: str | None  # of the user's file
    slots: tuple[SlotShape, ...]
    hidden: tuple[int, ...]
    dropout: float
    batch_norm: bool
    embedding_optimizer: RowOptimizer
    wide_optimizer: RowOptimizer
    init_scale: float  # vectors start uniform within ± this / √dim
    l2: float  # on vectors
    admission: Admission
    learning_rate: float
    weight_decay: float
    schedule: Schedule  # of the network's learning rate
    row_schedule: Schedule  # of the tables' learning rates
    precision: Literal["fp32", "bf16"]
    click_weight: float
    no_click_weight: float
    negative_sampling: float  # share of the rows without a click that is trained on
    seed: int

    @property
    def logit_shift(self) -> float:
        """Undoes what class weights and sampling do to the odds, so that scores are probabilities for all rows."""
        return math.log(self.negative_sampling * self.no_click_weight / self.click_weight)

    def tables(self, uses_wide: bool) -> dict[str, Any]:
        """The arguments of the model's `Tables`, local or sharded."""
        return {
            "slots": self.slots,
            "embedding_optimizer": self.embedding_optimizer,
            "wide_optimizer": self.wide_optimizer if uses_wide else None,
            "seed": self.seed,
            "init_scale": self.init_scale,
            "l2": self.l2,
            "admission": self.admission,
        }

    def to_json(self) -> dict[str, Any]:
        """As plain values; fields with several possible classes get a `kind`."""
        document = asdict(self)
        for part, kinds in _KINDS.items():
            kind = type(getattr(self, part))
            name = next(name for name, candidate in kinds.items() if candidate is kind)
            document[part] = {"kind": name, **document[part]}
        return {**document, "slots": list(document["slots"]), "hidden": list(self.hidden)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> ModelPlan:
        """A plan as `to_json` wrote it."""
        try:
            values = dict(document)
            for part, kinds in _KINDS.items():
                settings = dict(values[part])
                values[part] = kinds[settings.pop("kind")](**settings)
            values["slots"] = tuple(SlotShape(**slot) for slot in values["slots"])
            values["hidden"] = tuple(values["hidden"])
            values["admission"] = Admission(**values["admission"])
            return cls(**values)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ArtifactError(
                f"the model's plan is invalid: {error!r}. It was written by another release or is damaged. Train again."
            ) from error


_KINDS: dict[str, Mapping[str, type[Any]]] = {
    "embedding_optimizer": OPTIMIZERS,
    "wide_optimizer": OPTIMIZERS,
    "schedule": SCHEDULES,
    "row_schedule": SCHEDULES,
}
