"""Clickline: the training step of `clickline train` with its defaults, on a table that already has all ids."""

import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from itertools import cycle, islice
from pathlib import Path

import numpy as np
from turns import DENSE, DIM, HIDDEN, ROWS, SLOTS, Batch, batches, serve, values_of_a_slot

from clickline.config import load_config
from clickline.embedding import Tables
from clickline.features import FeatureSpec
from clickline.features.feature_spec import DenseField, SlotField
from clickline.models.from_config import plan_of
from clickline.models.model import Model
from clickline.records import EncodedRows, LabelledRows, SlotIds
from clickline.training.train_step import TrainStep

FILLED_ROWS = 1 << 16  # at a time


def train_step_of(precision: str) -> TrainStep:
    features = FeatureSpec(
        dense=tuple(DenseField(f"I{n + 1}", f"I{n + 1}", "none") for n in range(DENSE)),
        slots=tuple(SlotField(f"C{n + 1}", f"C{n + 1}", n + 1) for n in range(SLOTS)),
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "clickline.yaml")
        file.write_text(
            f"data: {{format: criteo, train: rows.tsv}}\n"
            f"model: {{name: wide_deep, embedding_dim: {DIM}, hidden: {list(HIDDEN)}}}\n"
            f"train: {{batch_size: {ROWS}, precision: {precision}}}\n"
        )
        config = load_config(file)
    plan = plan_of(config, features, rows=ROWS)
    return TrainStep(Model.build(features, plan, len(os.sched_getaffinity(0))))


def train_all(train_step: TrainStep, rows: Iterable[LabelledRows]) -> None:
    """As the trainer does on two cores."""
    for batch in rows:
        train_step.run(train_step.prepare(batch))


def ids_of(values_BS: np.ndarray) -> tuple[SlotIds, ...]:
    """64-bit ids that look as drawn at random, a different one for each value of each slot."""
    ids_BS = (values_BS * SLOTS + np.arange(SLOTS)).astype(np.uint64)
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        ids_BS = (ids_BS ^ (ids_BS >> np.uint64(33))) * np.uint64(factor)
    ids_BS ^= ids_BS >> np.uint64(33)
    return tuple(SlotIds(np.ascontiguousarray(ids_BS[:, s])) for s in range(SLOTS))


def rows_of(batch: Batch) -> LabelledRows:
    return LabelledRows(
        label_B=batch.label_B,
        weight_B=np.ones(ROWS, np.float32),
        impression_B=np.ones(ROWS, np.uint32),
        click_B=batch.label_B.astype(np.uint32),
        event_hour_B=np.full(ROWS, -1, np.int32),
        encoded=EncodedRows(ROWS, np.ascontiguousarray(batch.dense_BD.T), ids_of(batch.values_BS)),
    )


def fill(tables: Tables, ids: int) -> float:
    """Give every id its row; returns the longest step of it, in seconds."""
    longest = 0.0
    for start in range(0, values_of_a_slot(ids), FILLED_ROWS):
        values_B = np.arange(start, min(start + FILLED_ROWS, values_of_a_slot(ids)))
        slots = ids_of(np.repeat(values_B[:, None], SLOTS, axis=1))
        inputs_BI = np.zeros((values_B.size, tables.width), np.float32)
        wide_B = np.zeros(values_B.size, np.float32)
        began = time.perf_counter()
        lookup = tables.gather(slots, inputs_BI, wide_B, train=True)
        longest = max(longest, time.perf_counter() - began)
        inputs_BI[:], wide_B[:] = 0, 0
        tables.apply(lookup, inputs_BI, wide_B)
    return longest


def main() -> None:
    ids, precision = int(sys.argv[1]), sys.argv[2]
    train_step = train_step_of(precision)
    tables = train_step.model.tables
    longest = fill(tables, ids)
    data: Iterator[LabelledRows] = cycle([rows_of(batch) for batch in batches(ids)])
    serve(
        lambda steps: train_all(train_step, islice(data, steps)),
        ids=tables.size,
        table_bytes=tables.memory_bytes,
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        longest_growth=longest,
    )


main()
