"""The sparse tables alone: find, pool and apply, on one thread and two, small and large.

python bench/embedding.py            1 M and 10 M ids
python bench/embedding.py 50000000   that size beside 1 M; 50 M needs 7 GiB
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

import numpy as np

from clickline.embedding import SlotShape, Tables
from clickline.records import SlotIds
from measure import Row, publish

SLOTS, ROWS, DIM, DENSE = 26, 4096, 9, 13
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
    """The best of some steps on uniformly drawn ids, the hardest case for caches."""
    tables = Tables([SlotShape(str(s), DIM) for s in range(SLOTS)], threads=threads)
    rng = np.random.default_rng(0)
    growth = []
    for first in range(0, ids, SLOTS * ROWS):
        slots = batch(np.arange(first, first + SLOTS * ROWS) % ids)
        began = time.perf_counter()
        tables.find(slots, ROWS, train=True)
        growth.append(time.perf_counter() - began)
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
    return Figures(find, pool, apply, max(growth), tables.memory_bytes / tables.size)


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
    publish(
        "embedding",
        "Sparse tables alone",
        f"`python bench/embedding.py` ({ROWS} rows x {SLOTS} slots, dim {DIM}, AdaGrad, FTRL for the wide part, "
        "ids drawn uniformly; best of 40 steps).",
        rows,
        "Finding counts shows and clicks and numbers the distinct ids; the dense part of a step is not in these.",
    )


if __name__ == "__main__":
    main()
