"""LightGBM on the real rows: raw numbers, categorical features. An epoch is a number of trees."""

from collections.abc import Iterator
from dataclasses import dataclass

import lightgbm
import numpy as np

from real_rows import Rows, contest, encode

TREES = 50


@dataclass(frozen=True)
class Setting:
    leaves: int
    min_count: int  # of a category, and below it all are one
    rate: float = 0.05
    leaf_rows: int = 20


SETTINGS = [
    Setting(31, 10, 0.1),
    Setting(31, 10),
    Setting(15, 10),
    Setting(63, 10),
    Setting(31, 2),
    Setting(15, 50),
    Setting(31, 50),
    Setting(7, 10, 0.05, 100),
    Setting(15, 10, 0.02, 100),
]


def learn(rows: Rows, setting: Setting, known: int, scored: slice, seed: int) -> Iterator[np.ndarray]:
    encoded = encode(rows, known, "log1p", setting.min_count)
    inputs_NF = np.concatenate((encoded.codes_NF.astype(np.float64), rows.numbers_ND), axis=1)
    categories = list(range(len(encoded.sizes_F)))
    data = lightgbm.Dataset(inputs_NF[:known], rows.label_N[:known], categorical_feature=categories)
    settings = {
        "objective": "binary",
        "num_leaves": setting.leaves,
        "learning_rate": setting.rate,
        "min_data_in_leaf": setting.leaf_rows,
        "feature_fraction": 0.8,
        "bagging_fraction": 0.8,
        "bagging_freq": 1,
        "seed": seed,
        "num_threads": 1,
        "verbose": -1,
    }
    model = lightgbm.Booster(settings, data)
    while True:
        for _ in range(TREES):
            model.update()
        yield model.predict(inputs_NF[scored])


contest(SETTINGS, learn)
