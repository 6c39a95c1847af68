"""Impressions and clicks of every id: counted over the rows, and as a checkpoint has them. They are equal if every row was
trained exactly once."""

from __future__ import annotations

from collections import Counter

import numpy as np

from clickline.artifacts.checkpoint import Checkpoint
from clickline.artifacts.dataset import Dataset
from clickline.embedding.snapshot import SnapshotReader

Counters = dict[int, tuple[float, float]]


def direct_count(*datasets: Dataset, epochs: int = 1) -> Counters:
    """Counted over the training rows of prepared datasets."""
    impressions: Counter[int] = Counter()
    clicks: Counter[int] = Counter()
    for dataset in datasets:
        for rows in dataset.read_split("train"):
            for slot in rows.encoded.slots:
                impressions.update(dict(zip(*np.unique(slot.ids_N, return_counts=True), strict=True)))
                clicked = slot.ids_N[rows.click_B == 1]
                clicks.update(dict(zip(*np.unique(clicked, return_counts=True), strict=True)))
    return {int(one): (epochs * count, epochs * clicks[one]) for one, count in impressions.items()}


def counters_in(checkpoint: Checkpoint) -> Counters:
    """As the tables of a checkpoint have them, all ids being admitted."""
    reader = SnapshotReader(checkpoint.tables)
    found: Counters = {}
    for table in range(len(reader.tables)):
        for row in (row for rows in reader.rows(table) for row in rows):
            assert int(row["id"]) not in found, "an id is in two places"
            found[int(row["id"])] = float(row["impression"]), float(row["click"])
    return found
