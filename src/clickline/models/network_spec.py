"""The shape a network is built from, and the errors for shapes that a network does not support."""

from __future__ import annotations

from dataclasses import dataclass

from clickline.errors import ConfigError, Mistake


@dataclass(frozen=True)
class NetworkSpec:
    """The shape of a network: its inputs and the widths of its hidden layers."""

    dims: tuple[int, ...]  # dim of each slot's vector; 0 for a slot with only a wide weight
    dense: int  # dense floats per row
    hidden: tuple[int, ...]  # widths of the hidden layers; () for none
    dropout: float = 0.0  # share of a hidden layer's outputs that is dropped in training
    batch_norm: bool = False  # in every hidden layer

    @property
    def width(self) -> int:
        """Columns of `inputs_BI`: the slots' vectors, then the dense floats."""
        return sum(self.dims) + self.dense


def model_error(key: str, problem: str, remedy: str) -> ConfigError:
    """A ConfigError about `model.<key>` for a network that cannot be built."""
    return ConfigError([Mistake("clickline.yaml", 0, f"model.{key}", problem, remedy)])


def equal_dim(model: str, spec: NetworkSpec) -> int:
    """The common dim of all slots, for networks that multiply slots with each other."""
    distinct = sorted(set(spec.dims))
    if not distinct or distinct[0] < 1:
        problem = f"{model} multiplies the vectors of slots, and " + (
            "there is no slot." if not distinct else "there are slots without a vector (dim 0)."
        )
        raise model_error("name", problem, "Choose lr, wide_deep, dcn_v2, finalmlp or masknet.")
    if len(distinct) > 1:
        dims = ", ".join(map(str, distinct))
        problem = f"{model} needs the same dim for all slots, found {dims}."
        remedy = "Give all slots the same dim, or choose wide_deep, dcn_v2, finalmlp or masknet."
        raise model_error("embedding_dim", problem, remedy)
    return distinct[0]
