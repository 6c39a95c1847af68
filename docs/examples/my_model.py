"""A network of your own, named in clickline.yaml by `model: {file: my_model.py}`.

Only `forward` is required. The network weighs every slot by what the whole row looks like (the squeeze and
excitation of FiBiNET, Huang et al., RecSys 2019) before its hidden layers see it; the loss pays more attention to
rows that are hard to tell (Lin et al., "Focal Loss for Dense Object Detection", ICCV 2017).
"""

from dataclasses import replace

import numpy as np
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits


class SlotGate(nn.Module):
    """inputs: the slots' vectors side by side, then the dense floats; wide: the sum of the row's wide weights."""

    def __init__(self, spec):
        super().__init__()
        self.dims, self.dense = list(spec.dims), spec.dense
        squeezed = max(len(self.dims) // 3, 1)
        self.gate = nn.Sequential(
            nn.Linear(len(self.dims), squeezed), nn.ReLU(), nn.Linear(squeezed, len(self.dims)), nn.Sigmoid()
        )
        layers, width = [], spec.width
        for out in spec.hidden:
            layers += [nn.Linear(width, out), nn.ReLU(), nn.Dropout(spec.dropout)]
            width = out
        self.deep = nn.Sequential(*layers, nn.Linear(width, 1))

    def forward(self, inputs, wide):
        *vectors, dense = inputs.split([*self.dims, self.dense], dim=1)
        gates = 2 * self.gate(torch.stack([vector.mean(1) for vector in vectors], dim=1))
        weighed = [vector * gates[:, at : at + 1] for at, vector in enumerate(vectors)]
        return wide + self.deep(torch.cat([*weighed, dense], dim=1)).squeeze(1)


def forward(spec):
    """The network; spec has dims (one a slot), dense, width, hidden, dropout and batch_norm."""
    return SlotGate(spec)


def loss(labels, logits):
    """The loss of every row; the weights of rows are applied to it. One number for all would be taken as it is."""
    entropy = binary_cross_entropy_with_logits(logits, labels, reduction="none")
    return (1 - torch.exp(-entropy)) * entropy


def optimizer(params):
    """For the network's weights; the tables have their own, see `train`."""
    return torch.optim.AdamW(params, lr=2e-3, weight_decay=1e-4)


def metrics():
    """What to measure besides the usual, over the whole evaluation set, in NumPy arrays."""

    def clicks_in_top_tenth(labels, probabilities, weights):
        top = np.argsort(-probabilities, kind="stable")[: max(len(labels) // 10, 1)]
        return (labels * weights)[top].sum() / max((labels * weights).sum(), 1.0)

    return {"clicks_in_top_tenth": clicks_in_top_tenth}


def feed(batch):
    """The last word on a batch before it is learned: here no row counts for more than five others.

    It may change labels, weights, ids and dense values, but not how many rows, slots or dense fields there are.
    """
    return replace(batch, weight_B=np.minimum(batch.weight_B, np.float32(5)))
