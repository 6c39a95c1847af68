"""Wide & Deep in plain PyTorch: sparse gradients, SparseAdam for the tables, Adam for the rest.

One table for all slots, which is faster than one per slot.
"""

import sys
from itertools import cycle, islice

import torch
from torch import nn
from turns import DENSE, DIM, HIDDEN, SLOTS, batches, serve, values_of_a_slot

torch.manual_seed(0)
ids = int(sys.argv[1])
values = values_of_a_slot(ids)
vectors = nn.Embedding(values * SLOTS, DIM, sparse=True)
wide = nn.EmbeddingBag(values * SLOTS, 1, mode="sum", sparse=True)
widths = (SLOTS * DIM + DENSE, *HIDDEN)
hidden = [part for pair in zip(widths, HIDDEN) for part in (nn.Linear(*pair), nn.ReLU())]  # noqa: B905
network = nn.Sequential(*hidden, nn.Linear(HIDDEN[-1], 1), nn.Flatten(0))
dense_optimizer = torch.optim.Adam(network.parameters())
sparse_optimizer = torch.optim.SparseAdam([*vectors.parameters(), *wide.parameters()])
first_of_slot_S = torch.arange(SLOTS) * values
data = cycle(
    [
        (
            torch.from_numpy(batch.values_BS) + first_of_slot_S,
            torch.from_numpy(batch.dense_BD),
            torch.from_numpy(batch.label_B),
        )
        for batch in batches(ids)
    ]
)


def learn(steps: int) -> None:
    for ids_BS, dense_BD, label_B in islice(data, steps):
        inputs_BI = torch.cat((vectors(ids_BS).flatten(1), dense_BD), dim=1)
        logit_B = network(inputs_BI) + wide(ids_BS).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logit_B, label_B)
        dense_optimizer.zero_grad()
        sparse_optimizer.zero_grad()
        loss.backward()
        dense_optimizer.step()
        sparse_optimizer.step()


serve(learn)
