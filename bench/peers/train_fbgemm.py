"""Wide & Deep over FBGEMM's CPU tables with row-wise AdaGrad, which is fused into their backward pass.

Dims must be a multiple of 4, so a row has 12 numbers: 9 for the embedding, one wide weight, 2 unused. That saves
a second set of tables for the wide part.
"""

import sys
from itertools import cycle, islice

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import nn
from turns import DENSE, DIM, HIDDEN, ROWS, SLOTS, batches, serve, values_of_a_slot

PADDED = 12

torch.manual_seed(0)
ids = int(sys.argv[1])
tables = SplitTableBatchedEmbeddingBagsCodegen(
    [(values_of_a_slot(ids), PADDED, EmbeddingLocation.HOST, ComputeDevice.CPU)] * SLOTS,
    optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    learning_rate=0.05,
    bounds_check_mode=BoundsCheckMode.NONE,
)
tables.init_embedding_weights_uniform(-0.003, 0.003)
widths = (SLOTS * DIM + DENSE, *HIDDEN)
hidden = [part for pair in zip(widths, HIDDEN) for part in (nn.Linear(*pair), nn.ReLU())]  # noqa: B905
network = nn.Sequential(*hidden, nn.Linear(HIDDEN[-1], 1), nn.Flatten(0))
optimizer = torch.optim.Adam(network.parameters())
offsets = torch.arange(SLOTS * ROWS + 1)
data = cycle(
    [
        (
            torch.from_numpy(batch.values_BS).t().flatten(),
            torch.from_numpy(batch.dense_BD),
            torch.from_numpy(batch.label_B),
        )
        for batch in batches(ids)
    ]
)


def learn(steps: int) -> None:
    for ids_SB, dense_BD, label_B in islice(data, steps):
        rows_BSP = tables(ids_SB, offsets).view(ROWS, SLOTS, PADDED)
        inputs_BI = torch.cat((rows_BSP[..., :DIM].flatten(1), dense_BD), dim=1)
        logit_B = network(inputs_BI) + rows_BSP[..., DIM].sum(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logit_B, label_B)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


serve(learn)
