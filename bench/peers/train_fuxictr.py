"""FuxiCTR's Wide & Deep with its own `train_step`, without its data loader. It also embeds numbers."""

import sys
from itertools import cycle, islice

import torch
from turns import DENSE, DIM, HIDDEN, SLOTS, batches, serve, values_of_a_slot
from widedeep_fuxictr import WideDeep, feature_map

torch.manual_seed(0)
ids = int(sys.argv[1])
numbers = [f"I{n + 1}" for n in range(DENSE)]
slots = [f"C{n + 1}" for n in range(SLOTS)]
model = WideDeep(
    feature_map(numbers, dict.fromkeys(slots, values_of_a_slot(ids))), dim=DIM, hidden=HIDDEN
).train()
data = cycle(
    [
        {name: torch.from_numpy(batch.dense_BD[:, n].copy()) for n, name in enumerate(numbers)}
        | {name: torch.from_numpy(batch.values_BS[:, n].copy()) for n, name in enumerate(slots)}
        | {"label": torch.from_numpy(batch.label_B)}
        for batch in batches(ids)
    ]
)


def learn(steps: int) -> None:
    for batch in islice(data, steps):
        model.train_step(batch).item()


serve(learn)
