"""The dense network alone in eager PyTorch, without a sparse part and without input gradients: the limit of a step."""

import sys
from itertools import cycle, islice

import torch
from torch import nn
from turns import DENSE, DIM, HIDDEN, SLOTS, batches, serve

torch.manual_seed(0)
widths = (SLOTS * DIM + DENSE, *HIDDEN)
hidden = [part for pair in zip(widths, HIDDEN) for part in (nn.Linear(*pair), nn.ReLU())]  # noqa: B905
network = nn.Sequential(*hidden, nn.Linear(HIDDEN[-1], 1), nn.Flatten(0))
optimizer = torch.optim.Adam(network.parameters())
data = cycle(
    [
        (torch.randn(len(batch.label_B), widths[0]), torch.from_numpy(batch.label_B))
        for batch in batches(int(sys.argv[1]))
    ]
)


def learn(steps: int) -> None:
    for inputs_BI, label_B in islice(data, steps):
        loss = nn.functional.binary_cross_entropy_with_logits(network(inputs_BI), label_B)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


serve(learn)
