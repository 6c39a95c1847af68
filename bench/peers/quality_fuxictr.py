"""FuxiCTR's Wide & Deep on the real rows, with its own training step."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from fuxictr.pytorch.torch_utils import seed_everything
from turns import DIM, HIDDEN
from widedeep_fuxictr import WideDeep, feature_map

from real_rows import Encoded, Rows, contest, encode


@dataclass(frozen=True)
class Setting:
    numbers: str
    min_count: int
    embedding_l2: float
    dropout: float
    batch: int = 1024


SETTINGS = [
    Setting("log1p", 1, 0.0, 0.0, 4096),
    Setting("log1p", 10, 1e-4, 0.2),
    Setting("buckets", 2, 1e-4, 0.2),
    Setting("buckets", 2, 1e-3, 0.0),
    Setting("buckets", 10, 1e-5, 0.2),
    Setting("buckets", 10, 1e-4, 0.0),
    Setting("buckets", 10, 1e-3, 0.0),
    Setting("buckets", 10, 1e-3, 0.2),
]


def columns(encoded: Encoded, label_N: np.ndarray) -> dict[str, torch.Tensor]:
    named = {f"C{f}": torch.from_numpy(encoded.codes_NF[:, f].copy()) for f in range(len(encoded.sizes_F))}
    for d in range(encoded.floats_ND.shape[1]):
        named[f"I{d}"] = torch.from_numpy(encoded.floats_ND[:, d].copy())
    return named | {"label": torch.from_numpy(label_N)}


def learn(rows: Rows, setting: Setting, known: int, scored: slice, seed: int) -> Iterator[np.ndarray]:
    seed_everything(seed)
    encoded = encode(rows, known, setting.numbers, setting.min_count)
    data = columns(encoded, rows.label_N)
    features = feature_map(
        [name for name in data if name.startswith("I")],
        {f"C{f}": size for f, size in enumerate(encoded.sizes_F)},
    )
    model = WideDeep(
        features,
        dim=DIM,
        hidden=HIDDEN,
        dropout=setting.dropout,
        embedding_l2=setting.embedding_l2 or None,
    )
    while True:
        model.train()
        for places_B in torch.randperm(known).split(setting.batch):
            model.train_step({name: values_N[places_B] for name, values_N in data.items()})
        yield model.predict([{name: values_N[scored] for name, values_N in data.items()}])


contest(SETTINGS, learn)
