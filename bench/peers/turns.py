"""Shared by all contestants of the training benchmark: the network, the batches, and the protocol of turns.

A contestant runs in a separate process. It prints `ready` with its facts; then, for each number it reads, it trains on that many
batches and prints the seconds taken. Needs only NumPy.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

ROWS, SLOTS, DENSE, DIM, HIDDEN = 4096, 26, 13, 9, (512, 256, 128, 32)


@dataclass(frozen=True)
class Batch:
    """B rows: the number of each slot's value, 13 floats, and whether it was clicked."""

    values_BS: np.ndarray
    dense_BD: np.ndarray
    label_B: np.ndarray


def values_of_a_slot(ids: int) -> int:
    """Every slot has its share of the ids."""
    return ids // SLOTS


def batches(ids: int, count: int = 32) -> list[Batch]:
    """The same for everyone. Values are drawn uniformly, the hardest case for caches."""
    rng = np.random.default_rng(0)
    return [
        Batch(
            rng.integers(0, values_of_a_slot(ids), (ROWS, SLOTS)),
            rng.random((ROWS, DENSE), dtype=np.float32),
            (rng.random(ROWS) < 0.25).astype(np.float32),
        )
        for _ in range(count)
    ]


def serve(learn: Callable[[int], None], **facts: object) -> None:
    """Take turns until the input ends. What the contestant prints goes to stderr."""
    answers, sys.stdout = sys.stdout, sys.stderr
    print("ready", json.dumps(facts), file=answers, flush=True)
    for line in sys.stdin:
        began = time.perf_counter()
        learn(int(line))
        print(time.perf_counter() - began, file=answers, flush=True)
