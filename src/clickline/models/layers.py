"""Layers shared by several networks.

Shapes in names: B rows, I inputs, S slots, D dense floats, F = S + D fields, K vector components.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import Tensor, nn

from clickline.models.fused_linear import affine
from clickline.models.network_spec import NetworkSpec


class Network(nn.Module):
    """Base class of networks: maps rows of inputs and the sums of their wide weights to logits."""

    uses_wide: ClassVar[bool] = False  # False: wide_B is ignored, so the tables have no wide weights
    uses_vectors: ClassVar[bool] = True  # False: the slots' vectors are ignored, so `dims` may be ()

    def __init__(self, spec: NetworkSpec) -> None:
        super().__init__()

    def forward(self, inputs_BI: Tensor, wide_B: Tensor) -> Tensor:
        raise NotImplementedError


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed PyTorch's random numbers inside the context; the state outside is not changed."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


class HiddenLayers(nn.Sequential):
    """The hidden layers: linear, optional batch norm, ReLU, optional dropout."""

    def __init__(self, width: int, spec: NetworkSpec) -> None:
        layers: list[nn.Module] = []
        for out in spec.hidden:
            linear = nn.Linear(width, out)
            nn.init.kaiming_uniform_(linear.weight, nonlinearity="relu")
            nn.init.zeros_(linear.bias)
            layers.append(linear)
            if spec.batch_norm:
                layers.append(nn.BatchNorm1d(out))
            layers.append(nn.ReLU())
            if spec.dropout:
                layers.append(nn.Dropout(spec.dropout))
            width = out
        super().__init__(*layers)
        self.out = width
        self._fused = not spec.batch_norm  # nothing between linear and ReLU

    def forward(self, x_BI: Tensor) -> Tensor:
        for module in self:
            if self._fused and isinstance(module, nn.Linear):
                x_BI = affine(x_BI, module.weight, module.bias, relu=True)
            elif not (self._fused and isinstance(module, nn.ReLU)):
                x_BI = module(x_BI)
        return x_BI


def to_logit(width: int) -> nn.Sequential:
    """The last layer: one logit per row, (B, width) to (B,)."""
    linear = nn.Linear(width, 1)
    nn.init.xavier_uniform_(linear.weight)
    nn.init.zeros_(linear.bias)
    return nn.Sequential(linear, nn.Flatten(0))


class Mlp(nn.Sequential):
    """Hidden layers and the last layer; linear if there are no hidden layers."""

    def __init__(self, width: int, spec: NetworkSpec) -> None:
        hidden = HiddenLayers(width, spec)
        super().__init__(hidden, to_logit(hidden.out))


class FirstOrder(nn.Module):
    """The linear part: the sum of the row's wide weights, and a weight per dense float."""

    def __init__(self, spec: NetworkSpec) -> None:
        super().__init__()
        self.vectors = sum(spec.dims)
        # Start near 0, like the wide weights: larger values would have to be unlearned first.
        self.weight_D1 = nn.Parameter(0.01 * torch.randn(spec.dense, 1)) if spec.dense else None

    def forward(self, inputs_BI: Tensor, wide_B: Tensor) -> Tensor:
        if self.weight_D1 is None:
            return wide_B
        return wide_B + (inputs_BI[:, self.vectors :] @ self.weight_D1).squeeze(1)


class FieldVectors(nn.Module):
    """A vector for every field: that of the slot, and for dense float d its value times a learned v_d."""

    def __init__(self, dim: int, spec: NetworkSpec) -> None:
        super().__init__()
        self.dim = dim
        self.slots = len(spec.dims)
        self.fields = self.slots + spec.dense
        self.factors_DK = _factors(dim, spec)

    def forward(self, inputs_BI: Tensor) -> Tensor:
        vectors = self.slots * self.dim
        slots_BSK = inputs_BI[:, :vectors].reshape(-1, self.slots, self.dim)
        if self.factors_DK is None:
            return slots_BSK
        dense_BDK = inputs_BI[:, vectors:].unsqueeze(2) * self.factors_DK
        return torch.cat((slots_BSK, dense_BDK), dim=1)


DEFAULT_DIM = 9
"""The dim that step sizes and initial values are tuned for: the default of `model.embedding_dim`."""


class PairSum(nn.Module):
    """The sum of <v_i, v_j> over all pairs of fields, by ((sum of v)² - sum of v²) / 2, times 9 / dim.

    Every component of a vector takes its own step, so a plain product of K components would move K / 9 times as far as
    one of 9, and diverge at learning rates tuned for 9. The scaling makes the step sizes right at any dim, without
    changing what the model can represent.
    """

    def __init__(self, dim: int, spec: NetworkSpec) -> None:
        super().__init__()
        self.dim = dim
        self.scale = DEFAULT_DIM / dim
        self.slots = len(spec.dims)
        self.factors_DK = _factors(dim, spec)

    def forward(self, inputs_BI: Tensor) -> Tensor:
        vectors = self.slots * self.dim
        flat = inputs_BI[:, :vectors]
        sum_BK = flat.reshape(-1, self.slots, self.dim).sum(1)
        squares_B = flat.square().sum(1)
        if self.factors_DK is not None:
            dense_BD = inputs_BI[:, vectors:]
            sum_BK = sum_BK + dense_BD @ self.factors_DK
            squares_B = squares_B + dense_BD.square() @ self.factors_DK.square().sum(1)
        return 0.5 * self.scale * (sum_BK.square().sum(1) - squares_B)


def _factors(dim: int, spec: NetworkSpec) -> nn.Parameter | None:
    """Small initial values: products over many pairs of dense floats would start far from 0."""
    return nn.Parameter(torch.randn(spec.dense, dim) * 0.05) if spec.dense else None
