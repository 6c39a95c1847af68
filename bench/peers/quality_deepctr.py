"""DeepCTR-Torch's WDL on the real rows, with its own `fit`."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from deepctr_torch.inputs import DenseFeat, SparseFeat
from deepctr_torch.models import WDL
from turns import DIM, HIDDEN

from real_rows import Rows, contest, encode


@dataclass(frozen=True)
class Setting:
    numbers: str
    min_count: int
    l2: float  # beside a loss summed over the batch: 1e-5 is its default
    dropout: float
    init_std: float  # of vectors and hidden layers: 1e-4 is its default
    batch: int = 1024


SETTINGS = [
    Setting("log1p", 1, 1e-5, 0.0, 1e-4, 4096),
    Setting("log1p", 10, 5e-2, 0.2, 0.05),
    Setting("buckets", 2, 5e-2, 0.2, 0.05),
    Setting("buckets", 2, 0.5, 0.0, 0.05),
    Setting("buckets", 10, 5e-3, 0.2, 0.05),
    Setting("buckets", 10, 5e-2, 0.0, 1e-4),
    Setting("buckets", 10, 5e-2, 0.0, 0.05),
    Setting("buckets", 10, 0.5, 0.2, 0.05),
]


def learn(rows: Rows, setting: Setting, known: int, scored: slice, seed: int) -> Iterator[np.ndarray]:
    encoded = encode(rows, known, setting.numbers, setting.min_count)
    columns = [SparseFeat(f"C{f}", size, embedding_dim=DIM) for f, size in enumerate(encoded.sizes_F)]
    columns += [DenseFeat(f"I{d}", 1) for d in range(encoded.floats_ND.shape[1])]
    data = {f"C{f}": encoded.codes_NF[:, f] for f in range(len(encoded.sizes_F))}
    data |= {f"I{d}": encoded.floats_ND[:, d] for d in range(encoded.floats_ND.shape[1])}
    model = WDL(
        columns,
        columns,
        dnn_hidden_units=HIDDEN,
        l2_reg_linear=setting.l2,
        l2_reg_embedding=setting.l2,
        init_std=setting.init_std,
        dnn_dropout=setting.dropout,
        seed=seed,
    )
    model.compile("adam", "binary_crossentropy")
    while True:
        known_rows = {name: values_N[:known] for name, values_N in data.items()}
        model.fit(known_rows, rows.label_N[:known], batch_size=setting.batch, epochs=1, verbose=0)
        yield model.predict({name: values_N[scored] for name, values_N in data.items()}, 4096)


contest(SETTINGS, learn)
