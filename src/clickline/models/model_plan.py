"""Everything a model follows from besides its data: stored with each checkpoint, so that it can be built again."""

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
    RowWiseAdaGrad,
    Schedule,
    Settle,
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
    "settle": Settle,
    "step": StepDrop,
}


@dataclass(frozen=True)
class ModelPlan:
    """The shape of a model and how it learns."""

    network: str | None  # a built-in one; None: the user's file
    network_sha256: str | None  # of the user's file
    slots: tuple[SlotShape, ...]
    hidden: tuple[int, ...]
    dropout: float
    batch_norm: bool
    embedding_optimizer: RowOptimizer
    wide_optimizer: RowOptimizer
    init_scale: float  # vectors start uniform within ± this / √dim
    l2: float  # of vectors
    admission: Admission
    learning_rate: float
    weight_decay: float
    schedule: Schedule  # of the network's rate
    row_schedule: Schedule  # of the tables' rates
    precision: Literal["fp32", "bf16"]
    click_weight: float
    no_click_weight: float
    negative_sampling: float  # share of the rows without a click that is learned
    seed: int

    @property
    def logit_shift(self) -> float:
        """Takes back what weights and sampling did to the odds, so that scores are probabilities on all rows."""
        return math.log(self.negative_sampling * self.no_click_weight / self.click_weight)

    def tables(self, uses_wide: bool) -> dict[str, Any]:
        """What the model's `Tables` are made from, wherever they live."""
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
        """As plain values; a part that may be of several kinds names its own."""
        document = asdict(self)
        for part, kinds in _PARTS.items():
            kind = type(getattr(self, part))
            name = next(name for name, known in kinds.items() if known is kind)
            document[part] = {"kind": name, **document[part]}
        return {**document, "slots": list(document["slots"]), "hidden": list(self.hidden)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> ModelPlan:
        """A plan as `to_json` wrote it."""
        try:
            values = dict(document)
            for part, kinds in _PARTS.items():
                settings = dict(values[part])
                values[part] = kinds[settings.pop("kind")](**settings)
            values["slots"] = tuple(SlotShape(**slot) for slot in values["slots"])
            values["hidden"] = tuple(values["hidden"])
            values["admission"] = Admission(**values["admission"])
            return cls(**values)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ArtifactError(
                f"the model's plan lacks or misnames a part: {error!r}. It was written by another release, "
                "or damaged: train again."
            ) from error


_PARTS: dict[str, Mapping[str, type[Any]]] = {
    "embedding_optimizer": OPTIMIZERS,
    "wide_optimizer": OPTIMIZERS,
    "schedule": SCHEDULES,
    "row_schedule": SCHEDULES,
}
