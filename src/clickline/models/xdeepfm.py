"""xDeepFM: Lian et al., "xDeepFM: Combining Explicit and Implicit Feature Interactions …", KDD 2018.

CIN: X_0 = the fields' vectors; map h of X_(l+1) = sum over (i, j) of w_hij (row i of X_l * row j of X_0)
logit = wide + <w, dense> + linear(all maps, summed over K) + MLP(inputs)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from clickline.models.layers import FieldVectors, FirstOrder, Mlp, Network, to_logit
from clickline.models.network_spec import NetworkSpec, equal_dim

MAPS = (16, 16)  # feature maps of each CIN layer; its cost grows with maps times fields
ROWS = 128  # processed at a time


class XDeepFM(Network):
    """Explicit products of two and three vectors (CIN) beside the MLP's implicit ones."""

    uses_wide = True

    def __init__(self, spec: NetworkSpec) -> None:
        super().__init__(spec)
        self.linear = FirstOrder(spec)
        self.vectors = FieldVectors(equal_dim("xdeepfm", spec), spec)
        fields = self.vectors.fields
        self.mixes = nn.ModuleList()
        for before, maps in zip((fields, *MAPS), MAPS, strict=False):
            mix = nn.Linear(before, maps * fields, bias=False)
            nn.init.xavier_uniform_(mix.weight.view(maps, fields * before))  # everything summed in a map
            self.mixes.append(mix)
        self.products = to_logit(sum(MAPS))
        self.deep = Mlp(spec.width, spec)

    def forward(self, inputs_BI: Tensor, wide_B: Tensor) -> Tensor:
        fields_BFK = self.vectors(inputs_BI)
        # Few rows at a time: intermediate results must fit the cache. The compiler tiles by itself.
        parts = [fields_BFK] if torch.compiler.is_compiling() else fields_BFK.split(ROWS)
        products_B = self.products(torch.cat([self._maps(part) for part in parts]))
        logit_B: Tensor = self.linear(inputs_BI, wide_B) + products_B + self.deep(inputs_BI)
        return logit_B

    def _maps(self, fields_BFK: Tensor) -> Tensor:
        """All maps of all layers, each summed over K. N runs over rows and K."""
        _, fields, dim = fields_BFK.shape
        fields_FN = fields_BFK.transpose(0, 1).flatten(1)
        x_HN = fields_FN
        sums: list[Tensor] = []
        for mix in self.mixes:
            # Sum over i first, then over j: the products of all pairs (i, j) would need too much memory.
            assert isinstance(mix, nn.Linear)
            mixed_HFN = (mix.weight @ x_HN).view(-1, fields, fields_FN.shape[1])
            x_HN = (mixed_HFN * fields_FN).sum(1)
            sums.append(x_HN.view(x_HN.shape[0], -1, dim).sum(2))
        return torch.cat(sums).t()
