"""The networks that are a sum of well-known parts: wide weights and dense floats, products of pairs, an MLP."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from clickline.models.layers import FirstOrder, Mlp, Network, PairSum
from clickline.models.network_spec import NetworkSpec, equal_dim


class LogisticRegression(Network):
    """Logistic regression: McMahan et al., "Ad Click Prediction: a View from the Trenches", KDD 2013.

    logit = bias + wide + <w, dense>

    It uses neither the slots' vectors nor hidden layers."""

    uses_wide = True
    uses_vectors = False

    def __init__(self, spec: NetworkSpec) -> None:
        super().__init__(spec)
        self.linear = FirstOrder(spec)
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, inputs_BI: Tensor, wide_B: Tensor) -> Tensor:
        logit_B: Tensor = self.bias + self.linear(inputs_BI, wide_B)
        return logit_B


class FactorizationMachine(Network):
    """Factorization machine: Rendle, "Factorization Machines", ICDM 2010.

    logit = bias + wide + <w, dense> + 9 / dim · sum over pairs of fields of <v_i, v_j>

    It has no hidden layers."""

    uses_wide = True

    def __init__(self, spec: NetworkSpec) -> None:
        super().__init__(spec)
        self.linear = FirstOrder(spec)
        self.pairs = PairSum(equal_dim("fm", spec), spec)
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, inputs_BI: Tensor, wide_B: Tensor) -> Tensor:
        logit_B: Tensor = self.bias + self.linear(inputs_BI, wide_B) + self.pairs(inputs_BI)
        return logit_B


class WideDeep(Network):
    """Wide & Deep: Cheng et al., "Wide & Deep Learning for Recommender Systems", DLRS 2016.

    logit = wide + MLP(inputs)

    The wide weights memorize single ids, the hidden layers generalize over vectors and dense floats."""

    uses_wide = True

    def __init__(self, spec: NetworkSpec) -> None:
        super().__init__(spec)
        self.deep = Mlp(spec.width, spec)

    def forward(self, inputs_BI: Tensor, wide_B: Tensor) -> Tensor:
        logit_B: Tensor = wide_B + self.deep(inputs_BI)
        return logit_B


class DeepFM(Network):
    """DeepFM: Guo et al., "DeepFM: A Factorization-Machine based Neural Network for CTR Prediction", IJCAI 2017.

    logit = wide + <w, dense> + 9 / dim · sum over pairs of fields of <v_i, v_j> + MLP(inputs)

    A factorization machine and an MLP over the same vectors."""

    uses_wide = True

    def __init__(self, spec: NetworkSpec) -> None:
        super().__init__(spec)
        self.linear = FirstOrder(spec)
        self.pairs = PairSum(equal_dim("deepfm", spec), spec)
        self.deep = Mlp(spec.width, spec)

    def forward(self, inputs_BI: Tensor, wide_B: Tensor) -> Tensor:
        logit_B: Tensor = self.linear(inputs_BI, wide_B) + self.pairs(inputs_BI) + self.deep(inputs_BI)
        return logit_B
