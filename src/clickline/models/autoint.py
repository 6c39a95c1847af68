"""AutoInt+: Song et al., "AutoInt: Automatic Feature Interaction Learning via Self-Attentive …", CIKM 2019.

E_0 = the fields' vectors,  E_(l+1) = ReLU(multi-head attention over fields(E_l) + W_l E_l)
logit = linear(E_L) + MLP(inputs)                              without hidden layers: plain AutoInt
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from clickline.models.fused_linear import affine
from clickline.models.layers import FieldVectors, Mlp, Network, to_logit
from clickline.models.network_spec import NetworkSpec, equal_dim

LAYERS = 3
HEADS = 2
HEAD_DIM = 16


class AutoInt(Network):
    """Self-attention over the fields: each field attends to the others."""

    def __init__(self, spec: NetworkSpec) -> None:
        super().__init__(spec)
        dim = equal_dim("autoint", spec)
        self.vectors = FieldVectors(dim, spec)
        out = HEADS * HEAD_DIM
        self.attentions = nn.Sequential(*(_Attention(dim if at == 0 else out) for at in range(LAYERS)))
        self.last = to_logit(self.vectors.fields * out)
        self.deep = Mlp(spec.width, spec) if spec.hidden else None

    def forward(self, inputs_BI: Tensor, wide_B: Tensor) -> Tensor:
        logit_B: Tensor = self.last(self.attentions(self.vectors(inputs_BI)).flatten(1))
        return logit_B if self.deep is None else logit_B + self.deep(inputs_BI)


class _Attention(nn.Module):
    """One attention layer over the fields; as in the paper, scores are not scaled."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.project = nn.Linear(dim, 4 * HEADS * HEAD_DIM, bias=False)  # query, key, value, residual
        for weight in self.project.weight.chunk(4):
            nn.init.xavier_uniform_(weight)

    def forward(self, x_BFK: Tensor) -> Tensor:
        x_NK = x_BFK.flatten(0, 1)  # N runs over rows and fields
        query_NK, key_NK, value_NK, residual_NK = (
            affine(x_NK, weight) for weight in self.project.weight.chunk(4)
        )
        query_BHFK, key_BHFK, value_BHFK = (
            part.view(-1, x_BFK.shape[1], HEADS, HEAD_DIM).transpose(1, 2)
            for part in (query_NK, key_NK, value_NK)
        )
        attended_BHFK = nn.functional.scaled_dot_product_attention(
            query_BHFK, key_BHFK, value_BHFK, scale=1.0
        )
        attended_BFK = attended_BHFK.transpose(1, 2).flatten(2)
        return torch.relu(attended_BFK + residual_NK.view_as(attended_BFK))
