"""Wide & Deep: Cheng et al., "Wide & Deep Learning for Recommender Systems", DLRS 2016.

logit = wide + MLP(inputs)
"""

from __future__ import annotations

from torch import Tensor

from clickline.models.layers import Mlp, Network
from clickline.models.network_spec import NetworkSpec


class WideDeep(Network):
    """The wide weights memorize single ids, the hidden layers generalize over vectors and dense floats."""

    uses_wide = True

    def __init__(self, spec: NetworkSpec) -> None:
        super().__init__(spec)
        self.deep = Mlp(spec.width, spec)

    def forward(self, inputs_BI: Tensor, wide_B: Tensor) -> Tensor:
        logit_B: Tensor = wide_B + self.deep(inputs_BI)
        return logit_B
