"""DLRM: Naumov et al., "Deep Learning Recommendation Model for Personalization …", arXiv 1906.00091, 2019.

bottom = hidden layers over the dense floats, with the dim of a slot's vector
logit  = MLP(bottom beside <v_i, v_j> for all pairs of slots and bottom)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from clickline.models.layers import HiddenLayers, Mlp, Network
from clickline.models.network_spec import NetworkSpec, equal_dim, model_error


class DLRM(Network):
    """Uses the bottom vector and the inner products of all vectors; `hidden` are the widths of both MLPs."""

    pairs_P: Tensor

    def __init__(self, spec: NetworkSpec) -> None:
        super().__init__(spec)
        self.dim = equal_dim("dlrm", spec)
        self.slots = len(spec.dims)
        fields = self.slots + (spec.dense > 0)
        if fields < 2:
            problem = "dlrm needs at least two fields to multiply, found one slot and no dense field."
            raise model_error("name", problem, "Choose another network, such as wide_deep.")
        if spec.dense:
            hidden = HiddenLayers(spec.dense, spec)
            vector = nn.Linear(hidden.out, self.dim)
            nn.init.kaiming_uniform_(vector.weight, nonlinearity="relu")
            nn.init.zeros_(vector.bias)
            self.bottom: nn.Module | None = nn.Sequential(hidden, vector, nn.ReLU())
        else:
            self.bottom = None
        # Each pair once: the triangle below the diagonal of all products, as positions in the flat matrix.
        below_2P = torch.tril_indices(fields, fields, offset=-1)
        self.register_buffer("pairs_P", below_2P[0] * fields + below_2P[1], persistent=False)
        self.top = Mlp(self.pairs_P.numel() + (self.dim if spec.dense else 0), spec)

    def forward(self, inputs_BI: Tensor, wide_B: Tensor) -> Tensor:
        vectors = self.slots * self.dim
        fields_BFK = inputs_BI[:, :vectors].reshape(-1, self.slots, self.dim)
        if self.bottom is None:
            features_BX = self._products(fields_BFK)
        else:
            bottom_BK = self.bottom(inputs_BI[:, vectors:])
            fields_BFK = torch.cat((fields_BFK, bottom_BK.unsqueeze(1)), dim=1)
            features_BX = torch.cat((bottom_BK, self._products(fields_BFK)), dim=1)
        logit_B: Tensor = self.top(features_BX)
        return logit_B

    def _products(self, fields_BFK: Tensor) -> Tensor:
        return (fields_BFK @ fields_BFK.transpose(1, 2)).flatten(1).index_select(1, self.pairs_P)
