"""FinalMLP: Mao et al., "FinalMLP: An Enhanced Two-Stream MLP Model for CTR Prediction", AAAI 2023.

stream s = hidden layers over inputs * 2 sigmoid(gate_s)
logit = <w_1, stream 1> + <w_2, stream 2> + sum over heads of (stream 1)ᵀ W_h (stream 2)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from clickline.models.layers import HiddenLayers, Network, to_logit
from clickline.models.network_spec import NetworkSpec

HEADS = 4


class FinalMLP(Network):
    """Two MLP streams, each with its own gate on the inputs, fused by a bilinear form.

    In the paper a gate's input is a choice of fields, or a learned constant if none are chosen. Here it is always the
    constant, so a gate is one learned factor per input.
    """

    def __init__(self, spec: NetworkSpec) -> None:
        super().__init__(spec)
        self.gates_2I = nn.Parameter(torch.zeros(2, spec.width))  # every factor starts at 1
        self.first = HiddenLayers(spec.width, spec)
        self.second = HiddenLayers(spec.width, spec)
        out = self.first.out
        self.last = to_logit(2 * out)
        self.heads = math.gcd(out, HEADS)
        self.fusion_HPP = nn.Parameter(torch.empty(self.heads, out // self.heads, out // self.heads))
        for head_PP in self.fusion_HPP:
            nn.init.xavier_uniform_(head_PP)

    def forward(self, inputs_BI: Tensor, wide_B: Tensor) -> Tensor:
        gates_2I = 2.0 * torch.sigmoid(self.gates_2I)
        first_BP = self.first(inputs_BI * gates_2I[0])
        second_BP = self.second(inputs_BI * gates_2I[1])
        first_HBP = first_BP.unflatten(1, (self.heads, -1)).transpose(0, 1)
        second_HBP = second_BP.unflatten(1, (self.heads, -1)).transpose(0, 1)
        fused_B = ((first_HBP @ self.fusion_HPP) * second_HBP).sum((0, 2))
        logit_B: Tensor = fused_B + self.last(torch.cat((first_BP, second_BP), dim=1))
        return logit_B
