"""DeepCTR-Torch's WDL. `fit`: its own loop with its defaults, as its users call it. `step`: the body of that loop
without its data loader and without L2, which by default covers all weights of all tables."""

import sys
from itertools import cycle, islice

import numpy as np
import torch
from deepctr_torch.inputs import DenseFeat, SparseFeat, get_feature_names
from deepctr_torch.models import WDL
from turns import DENSE, DIM, HIDDEN, ROWS, SLOTS, batches, serve, values_of_a_slot

ids, how = int(sys.argv[1]), sys.argv[2]
numbers = [f"I{n + 1}" for n in range(DENSE)]
slots = [f"C{n + 1}" for n in range(SLOTS)]
columns = [SparseFeat(name, values_of_a_slot(ids), embedding_dim=DIM) for name in slots]
columns += [DenseFeat(name, 1) for name in numbers]
without = {} if how == "fit" else {"l2_reg_linear": 0, "l2_reg_embedding": 0}
model = WDL(columns, columns, dnn_hidden_units=HIDDEN, **without)
model.compile("adam", "binary_crossentropy")
data = batches(ids)


def fit(steps: int) -> None:
    taken = list(islice(cycle(data), steps))
    values_NS = np.concatenate([batch.values_BS for batch in taken])
    dense_ND = np.concatenate([batch.dense_BD for batch in taken])
    named = {name: values_NS[:, n] for n, name in enumerate(slots)}
    named |= {name: dense_ND[:, n] for n, name in enumerate(numbers)}
    label_N = np.concatenate([batch.label_B for batch in taken])
    inputs = {name: named[name] for name in get_feature_names(columns)}
    model.fit(inputs, label_N, batch_size=ROWS, epochs=1, verbose=0)


ready = cycle(
    [
        (
            torch.from_numpy(np.concatenate((batch.values_BS, batch.dense_BD), axis=1, dtype=np.float32)),
            torch.from_numpy(batch.label_B),
        )
        for batch in data
    ]
)


def step(steps: int) -> None:
    model.train()
    for inputs_BI, label_B in islice(ready, steps):
        probability_B = model(inputs_BI).squeeze(1)
        model.optim.zero_grad()
        loss = model.loss_func(probability_B, label_B, reduction="sum")
        (loss + model.get_regularization_loss() + model.aux_loss).backward()
        model.optim.step()
        loss.item()


serve(fit if how == "fit" else step)
