"""Logistic regression: McMahan et al., "Ad Click Prediction: a View from the Trenches", KDD 2013.

logit = bias + wide + <w, dense>
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from clickline.models.layers import FirstOrder, Network
from clickline.models.network_spec import NetworkSpec


class LogisticRegression(Network):
    """Logistic regression; it uses neither the slots' vectors nor hidden layers."""

    uses_wide = True
    uses_vectors = False

    def __init__(self, spec: NetworkSpec) -> None:
        super().__init__(spec)
        self.linear = FirstOrder(spec)
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, inputs_BI: Tensor, wide_B: Tensor) -> Tensor:
        logit_B: Tensor = self.bias + self.linear(inputs_BI, wide_B)
        return logit_B
