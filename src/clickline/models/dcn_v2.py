"""DCN-V2: Wang et al., "DCN V2: Improved Deep & Cross Network …", WWW 2021.

x_0 = inputs,  x_(l+1) = x_0 * (W_l x_l + b_l) + x_l
logit = linear(x_L beside the hidden layers' output)          the parallel form, full-rank W
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from clickline.models.fused_linear import affine
from clickline.models.layers import HiddenLayers, Network, to_logit
from clickline.models.network_spec import NetworkSpec

CROSSES = 3  # products of up to four inputs


class DCNv2(Network):
    """Every cross layer multiplies elementwise with the inputs, so the slots' dims may differ."""

    def __init__(self, spec: NetworkSpec) -> None:
        super().__init__(spec)
        self.crosses = nn.ModuleList(nn.Linear(spec.width, spec.width) for _ in range(CROSSES))
        for cross in self.crosses:
            assert isinstance(cross, nn.Linear)
            nn.init.xavier_uniform_(cross.weight)
            nn.init.zeros_(cross.bias)
        self.hidden = HiddenLayers(spec.width, spec) if spec.hidden else None
        self.last = to_logit(spec.width + (self.hidden.out if self.hidden is not None else 0))

    def forward(self, inputs_BI: Tensor, wide_B: Tensor) -> Tensor:
        x_BI = inputs_BI
        for cross in self.crosses:
            assert isinstance(cross, nn.Linear)
            x_BI = torch.addcmul(x_BI, inputs_BI, affine(x_BI, cross.weight, cross.bias))
        if self.hidden is not None:
            x_BI = torch.cat((x_BI, self.hidden(inputs_BI)), dim=1)
        logit_B: Tensor = self.last(x_BI)
        return logit_B
