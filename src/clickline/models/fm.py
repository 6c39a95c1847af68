"""Factorization machine: Rendle, "Factorization Machines", ICDM 2010.

logit = bias + wide + <w, dense> + 9 / dim · sum over pairs of fields of <v_i, v_j>
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from clickline.models.layers import FirstOrder, Network, PairSum
from clickline.models.network_spec import NetworkSpec, equal_dim


class FactorizationMachine(Network):
    """A factorization machine; it has no hidden layers."""

    uses_wide = True

    def __init__(self, spec: NetworkSpec) -> None:
        super().__init__(spec)
        self.linear = FirstOrder(spec)
        self.pairs = PairSum(equal_dim("fm", spec), spec)
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, inputs_BI: Tensor, wide_B: Tensor) -> Tensor:
        logit_B: Tensor = self.bias + self.linear(inputs_BI, wide_B) + self.pairs(inputs_BI)
        return logit_B
