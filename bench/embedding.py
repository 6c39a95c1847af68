"""The embedding tables alone: find, pool and apply, with one and two threads, small and large; and training steps with a
dense network while a snapshot is written.

python bench/embedding.py            1 M and 10 M ids
python bench/embedding.py 50000000   that size and 1 M; 50 M needs 7 GiB
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import nn

from clickline.embedding import SlotShape, Tables, begin_snapshot
from clickline.records import SlotIds
from measure import Row, publish

SLOTS, ROWS, DIM, DENSE = 26, 4096, 9, 13
HIDDEN = (512, 256, 128, 32)
SHARE = 0.05  # of a core, for the writer of a snapshot
SPREAD = np.uint64(0xD1342543DE82EF95)  # odd: different numbers give different ids


@dataclass
class Figures:
    find: float
    pool: float
    apply: float
    slowest_growth: float  # the longest find while the table was filled
    bytes_per_id: float

    @property
    def step(self) -> float:
        return self.find + self.pool + self.apply


def batch(numbers: np.ndarray) -> list[SlotIds]:
    ids = numbers.astype(np.uint64).reshape(SLOTS, ROWS) * SPREAD
    return [SlotIds(ids[s]) for s in range(SLOTS)]


def measure(ids: int, threads: int, steps: int = 40) -> Figures:
    """The best of several steps on uniformly drawn ids, the worst case for caches."""
    tables, slowest = filled(ids, threads)
    rng = np.random.default_rng(0)
    inputs, wide = np.zeros((ROWS, SLOTS * DIM + DENSE), np.float32), np.zeros(ROWS, np.float32)
    gradient = rng.normal(scale=1e-3, size=inputs.shape).astype(np.float32)
    times = []
    for _ in range(steps):
        slots = batch(rng.integers(0, ids, SLOTS * ROWS))
        clock = [time.perf_counter()]
        found = tables.find(slots, ROWS, train=True)
        clock.append(time.perf_counter())
        tables.pool(found, inputs, wide)
        clock.append(time.perf_counter())
        tables.apply(found, gradient, wide)
        clock.append(time.perf_counter())
        times.append(np.diff(clock))
    find, pool, apply = np.min(times, axis=0)
    return Figures(find, pool, apply, slowest, tables.memory_bytes / tables.size)


def filled(ids: int, threads: int) -> tuple[Tables, float]:
    """Tables filled with `ids` ids, and the longest find meanwhile."""
    tables = Tables([SlotShape(str(s), DIM) for s in range(SLOTS)], threads=threads)
    inputs, wide = np.zeros((ROWS, SLOTS * DIM), np.float32), np.zeros(ROWS, np.float32)
    growth = []
    for first in range(0, ids, SLOTS * ROWS):
        slots = batch(np.arange(first, first + SLOTS * ROWS) % ids)
        began = time.perf_counter()
        found = tables.find(slots, ROWS, train=True)
        growth.append(time.perf_counter() - began)
        tables.apply(found, inputs, wide)
    return tables, max(growth)


@dataclass
class SnapshotCost:
    alone: float  # seconds per step
    beside: float
    slowest: float  # the longest step while writing
    seconds: float  # duration of writing
    shadows: float  # peak memory of copied rows, as a share of the tables' memory


def time_snapshot(ids: int, skew: float, steps: int = 100) -> SnapshotCost:
    """Whole training steps before, during and after writing a snapshot."""
    tables, _ = filled(ids, 2)
    own = tables.memory_bytes
    step = trainer(tables, ids, skew)
    for _ in range(10):
        step()
    before = seconds_per_step(step, steps)
    beside, shadows = [], 0
    with tempfile.TemporaryDirectory() as folder:
        snapshot = begin_snapshot(tables, share=SHARE)
        writer = threading.Thread(target=snapshot.write, args=(Path(folder, "tables"),))
        writer.start()
        while writer.is_alive():
            began = time.perf_counter()
            step()
            beside.append(time.perf_counter() - began)
            shadows = max(shadows, tables.memory_bytes - own)
    alone = (before + seconds_per_step(step, steps)) / 2
    return SnapshotCost(alone, float(np.mean(beside)), max(beside), sum(beside), shadows / own)


def trainer(tables: Tables, ids: int, skew: float) -> Callable[[], None]:
    """A training step of Wide & Deep on ids drawn as ids · u^skew: 1 is uniform, larger values are skewed."""
    torch.set_num_threads(2)
    rng = np.random.default_rng(0)
    widths = (SLOTS * DIM + DENSE, *HIDDEN)
    layers = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
    network = nn.Sequential(*layers, nn.Linear(HIDDEN[-1], 1))
    adam = torch.optim.Adam(network.parameters(), fused=True)
    labels = torch.from_numpy((rng.random(ROWS) < 0.25).astype(np.float32))
    inputs_BI, wide_B = np.zeros((ROWS, widths[0]), np.float32), np.zeros(ROWS, np.float32)

    def step() -> None:
        found = tables.gather(
            batch((ids * rng.random(SLOTS * ROWS) ** skew).astype(np.int64)), inputs_BI, wide_B, train=True
        )
        inputs, wide = (torch.from_numpy(array).requires_grad_() for array in (inputs_BI, wide_B))
        logits = network(inputs).squeeze(1) + wide
        adam.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(logits, labels).backward()
        adam.step()
        tables.apply(found, inputs.grad.numpy(), wide.grad.numpy())

    return step


def seconds_per_step(step: Callable[[], None], steps: int) -> float:
    began = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - began) / steps


def main() -> None:
    sizes = (1_000_000, int(sys.argv[1]) if len(sys.argv) > 1 else 10_000_000)
    measure(10_000, 2, steps=2)  # loads the compiled kernels
    rows = []
    keys = SLOTS * ROWS
    small = {threads: measure(sizes[0], threads) for threads in (1, 2)}
    for ids in sizes:
        for threads in (1, 2):
            got = small[threads] if ids == sizes[0] else measure(ids, threads)
            rate = f"{ROWS / got.step:,.0f} rows/s: find {keys / got.find / 1e6:.0f}, pool {keys / got.pool / 1e6:.0f}, apply {keys / got.apply / 1e6:.0f} M ids/s"
            ratio = (
                ""
                if ids == sizes[0]
                else f"{small[threads].step / got.step:.2f} of {sizes[0] // 10**6} M ids"
            )
            rows.append(
                Row(f"{ids // 10**6} M ids, {threads} thread{'s' if threads > 1 else ''}", rate, ratio)
            )
        rows.append(Row(f"{ids // 10**6} M ids, memory", f"{got.bytes_per_id:.0f} bytes an id", "", "≤ 171"))
        rows.append(Row(f"{ids // 10**6} M ids, longest step while growing", f"{got.slowest_growth:.2f} s", "", "< 1 s"))  # fmt: skip
    for skew, name in ((1.0, "uniform ids"), (4.0, "skewed ids")):
        cost = time_snapshot(10_000_000, skew)
        figure = (
            f"{cost.beside * 1e3:.1f} ms a step instead of {cost.alone * 1e3:.1f}, longest {cost.slowest * 1e3:.0f} ms; "
            f"{cost.seconds:.0f} s to write, {cost.shadows:.0%} more memory meanwhile"
        )
        rows.append(
            Row(f"10 M ids, steps while a snapshot is written, {name}", figure, f"{cost.alone / cost.beside:.2f}", "≥ 0.95")
        )  # fmt: skip
    publish(
        "embedding",
        "Embedding tables alone",
        f"`python bench/embedding.py` ({ROWS} rows x {SLOTS} slots, dim {DIM}, AdaGrad, FTRL for the wide part, "
        "ids drawn uniformly; best of 40 steps).",
        rows,
        "Finding counts impressions and clicks and numbers the distinct ids; the dense part of a step is not included.",
    )


if __name__ == "__main__":
    main()
