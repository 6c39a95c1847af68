"""DeepFM: Guo et al., "DeepFM: A Factorization-Machine based Neural Network for CTR Prediction", IJCAI 2017.

logit = wide + <w, dense> + 9 / dim · sum over pairs of fields of <v_i, v_j> + MLP(inputs)
"""

from __future__ import annotations

from torch import Tensor

from clickline.models.layers import FirstOrder, Mlp, Network, PairSum
from clickline.models.network_spec import NetworkSpec, equal_dim


class DeepFM(Network):
    """A factorization machine and an MLP over the same vectors."""

    uses_wide = True

    def __init__(self, spec: NetworkSpec) -> None:
        super().__init__(spec)
        self.linear = FirstOrder(spec)
        self.pairs = PairSum(equal_dim("deepfm", spec), spec)
        self.deep = Mlp(spec.width, spec)

    def forward(self, inputs_BI: Tensor, wide_B: Tensor) -> Tensor:
        logit_B: Tensor = self.linear(inputs_BI, wide_B) + self.pairs(inputs_BI) + self.deep(inputs_BI)
        return logit_B
