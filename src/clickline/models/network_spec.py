"""What a network must know before it is built, and what it says when it cannot be."""

from __future__ import annotations

from dataclasses import dataclass

from clickline.errors import ConfigError, Mistake


@dataclass(frozen=True)
class NetworkSpec:
    """The shape of a network: what comes in, and how wide its hidden layers are."""

    dims: tuple[int, ...]  # length of each slot's vector; 0 for a slot that has only a wide weight
    dense: int  # dense floats a row
    hidden: tuple[int, ...]  # widths of the hidden layers; () leaves them out
    dropout: float = 0.0  # share of a hidden layer's outputs that is dropped while learning
    batch_norm: bool = False  # in every hidden layer

    @property
    def width(self) -> int:
        """Floats a row of `inputs_BI`: the slots' vectors side by side, then the dense floats."""
        return sum(self.dims) + self.dense


def refusal(key: str, problem: str, remedy: str) -> ConfigError:
    """The config asks for a network that cannot be built."""
    return ConfigError([Mistake("clickline.yaml", 0, f"model.{key}", problem, remedy)])


def equal_dim(model: str, spec: NetworkSpec) -> int:
    """The one dim of all slots, for networks that multiply slots with each other."""
    found = sorted(set(spec.dims))
    if not found or found[0] < 1:
        problem = f"{model} multiplies the vectors of slots, and " + (
            "there is no slot." if not found else "there are slots without a vector (dim 0)."
        )
        raise refusal("name", problem, "Choose lr, wide_deep, dcn_v2, finalmlp or masknet.")
    if len(found) > 1:
        dims = ", ".join(map(str, found))
        problem = f"{model} needs the same dim for all slots, found {dims}."
        remedy = "Give all slots one dim, or choose wide_deep, dcn_v2, finalmlp or masknet."
        raise refusal("embedding_dim", problem, remedy)
    return found[0]
