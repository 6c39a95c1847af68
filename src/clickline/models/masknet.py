"""MaskNet: Wang et al., "MaskNet: Introducing Feature-Wise Multiplication to CTR Ranking Models …", DLP-KDD 2021.

block = ReLU(LayerNorm(W (normed inputs * mask))),  mask = W_2 ReLU(W_1 inputs)
logit = MLP(all blocks side by side)                           the parallel form
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from clickline.models.fused_linear import affine
from clickline.models.layers import Mlp, Network
from clickline.models.network_spec import NetworkSpec

BLOCKS = 3
BLOCK_WIDTH = 64


class MaskNet(Network):
    """Every block multiplies the inputs by a mask that depends on the whole row."""

    def __init__(self, spec: NetworkSpec) -> None:
        super().__init__(spec)
        self.norm = _SlotNorm(spec)
        self.blocks = nn.ModuleList(_MaskBlock(spec.width) for _ in range(BLOCKS))
        self.deep = Mlp(BLOCKS * BLOCK_WIDTH, spec)

    def forward(self, inputs_BI: Tensor, wide_B: Tensor) -> Tensor:
        normed_BI = self.norm(inputs_BI)
        blocks = [block(inputs_BI, normed_BI) for block in self.blocks]
        logit_B: Tensor = self.deep(torch.cat(blocks, dim=1))
        return logit_B


class _MaskBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.aggregate = nn.Linear(width, width)
        self.project = nn.Linear(width, width)
        self.out = nn.Linear(width, BLOCK_WIDTH, bias=False)  # the norm after it has a bias
        self.norm = nn.LayerNorm(BLOCK_WIDTH)
        nn.init.kaiming_uniform_(self.aggregate.weight, nonlinearity="relu")
        nn.init.zeros_(self.aggregate.bias)
        nn.init.xavier_uniform_(self.project.weight)
        nn.init.zeros_(self.project.bias)
        nn.init.kaiming_uniform_(self.out.weight, nonlinearity="relu")

    def forward(self, inputs_BI: Tensor, normed_BI: Tensor) -> Tensor:
        hidden_BI = affine(inputs_BI, self.aggregate.weight, self.aggregate.bias, relu=True)
        mask_BI = affine(hidden_BI, self.project.weight, self.project.bias)
        return torch.relu(self.norm(affine(normed_BI * mask_BI, self.out.weight)))


class _SlotNorm(nn.Module):
    """Layer norm of each slot's vector separately; dims may differ.

    A single number has no variance to divide by, so dense floats and slots of dim 1 are not normalized.
    """

    mean_IS: Tensor
    spread_SI: Tensor
    plain_I: Tensor

    def __init__(self, spec: NetworkSpec) -> None:
        super().__init__()
        slot_of_I = torch.repeat_interleave(
            torch.arange(len(spec.dims)), torch.tensor(spec.dims, dtype=torch.int64)
        )
        member_IS = nn.functional.one_hot(slot_of_I, max(len(spec.dims), 1)).float()
        member_IS = torch.cat((member_IS, torch.zeros(spec.dense, member_IS.shape[1])))
        sizes_S = member_IS.sum(0)
        normed_S = sizes_S > 1
        member_IS = member_IS * normed_S
        self.register_buffer("mean_IS", member_IS / sizes_S.clamp(min=1), persistent=False)
        self.register_buffer("spread_SI", member_IS.T.contiguous(), persistent=False)
        self.register_buffer("plain_I", member_IS.sum(1) == 0, persistent=False)
        self.scale_I = nn.Parameter(torch.ones(spec.width))
        self.shift_I = nn.Parameter(torch.zeros(spec.width))

    def forward(self, inputs_BI: Tensor) -> Tensor:
        centred_BI = inputs_BI - inputs_BI @ self.mean_IS @ self.spread_SI
        inverse_BS = torch.rsqrt(centred_BI.square() @ self.mean_IS + 1e-5)
        normed_BI = centred_BI * (inverse_BS @ self.spread_SI)
        return torch.where(self.plain_I, inputs_BI, normed_BI) * self.scale_I + self.shift_I
