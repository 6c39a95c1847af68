"""The serving table: building, opening, and lookups on one core; a base alone and with deltas.

python bench/frozen.py          10 M rows, dim 9 and a wide weight
python bench/frozen.py --try    1 M rows, and nothing is written to docs/benchmarks.md
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
from numba import njit

from clickline.embedding.index import mix
from clickline.embedding.jagged_ids import to_jagged
from clickline.embedding.serving import (
    GatherBatch,
    PartShape,
    RowBlock,
    ServingTable,
    delta_blocks,
    gather_plan,
    merged_blocks,
    write_shards,
)
from clickline.kernel_intrinsics import Int, i64_at, prefetch, u64_at
from clickline.records import SlotIds
from measure import Row, publish

PART = PartShape(9, True)
SLOTS, KEYS = 26, 2600  # a ranking request: 100 candidates with 26 ids each
SPREAD = np.uint64(0xD1342543DE82EF95)  # odd, so that distinct numbers give distinct ids
ROUNDS = 7
T = TypeVar("T")


def rows_of(ids: np.ndarray, seed: int, gone: float = 0.0) -> Iterator[RowBlock]:
    """Random rows with these ids, in order."""
    rng = np.random.default_rng(seed)
    ids = ids[np.argsort(mix_all(ids))]
    for first in range(0, ids.size, 1 << 15):
        piece = ids[first : first + (1 << 15)]
        wide, vector = rng.random(piece.size, np.float32), rng.random((piece.size, PART.dim), np.float32)
        yield RowBlock(0, piece, wide, vector, rng.random(piece.size) < gone)


def mix_all(ids: np.ndarray) -> np.ndarray:
    return ids * np.uint64(0x9E3779B97F4A7C15)


@njit(nogil=True)
def read_at_random(rows: Int, count: Int, stride: Int, ids_N: np.ndarray) -> np.uint64:
    """The limit: reads whole rows at known addresses, with the same number of concurrent cache misses."""
    total = np.uint64(0)
    ids, last = u64_at(ids_N.ctypes.data), ids_N.size
    for n in range(last + 16):
        if n < last:
            row = rows + stride * np.int64(
                ((mix(ids[n]) >> np.uint64(32)) * np.uint64(count)) >> np.uint64(32)
            )
            prefetch(row)
            prefetch(row + stride - 1)
        if n >= 16:
            row = rows + stride * np.int64(
                ((mix(ids[n - 16]) >> np.uint64(32)) * np.uint64(count)) >> np.uint64(32)
            )
            total += u64_at(row)[0] + np.uint64(i64_at(row + stride - 8)[0])
    return total


def rate(work: dict[str, Callable[[], object]], keys: int) -> dict[str, float]:
    """Keys/s of each, the best of several alternating rounds."""
    best = dict.fromkeys(work, float("inf"))
    for _ in range(ROUNDS):
        for name, run in work.items():
            began = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - began)
    return {name: keys / seconds for name, seconds in best.items()}


def lookups(tables: ServingTable, ids: np.ndarray, absent: np.ndarray, call: int) -> dict[str, float]:
    """Keys/s for calls of `call` keys: hits, misses, a mixture, pooling, and the limit."""
    rng = np.random.default_rng(call)
    calls = max(4, 2_000_000 // call)
    hits = [ids[rng.integers(0, ids.size, call)] for _ in range(calls)]
    misses = [absent[rng.integers(0, absent.size, call)] for _ in range(calls)]
    mixed = [np.where(rng.random(call) < 0.9, hit, miss) for hit, miss in zip(hits, misses, strict=True)]
    rows_NW, found_N = np.empty((call, tables.row_bytes(0)), np.uint8), np.empty(call, bool)
    rows = call // SLOTS
    plan = gather_plan([PART], [(0, PART.dim * s, "sum", 0.0, [0.0] * PART.dim) for s in range(SLOTS)])
    batches = [
        to_jagged([SlotIds(hit[s * rows : (s + 1) * rows]) for s in range(SLOTS)], rows) for hit in hits
    ]
    inputs_BI, wide_B = np.zeros((rows, SLOTS * PART.dim + 13), np.float32), np.zeros(rows, np.float32)
    misses_S = np.zeros(SLOTS, np.int64)
    packed_N = tables.levels[0][0].rows(0)

    def find(asked: list[np.ndarray]) -> Callable[[], object]:
        return lambda: [tables.find(0, ids_N, rows_NW, found_N) for ids_N in asked]

    return rate(
        {
            "limit": lambda: [read_at_random(packed_N.ctypes.data, packed_N.size, packed_N.dtype.itemsize, ids_N) for ids_N in hits],
            "hits": find(hits),
            "misses": find(misses),
            "mixed": find(mixed),
            "pooled": lambda: [tables.gather(GatherBatch(plan, bags, inputs_BI, wide_B, misses_S)) for bags in batches],
        },
        call * calls,
    )  # fmt: skip


def timed(work: Callable[..., T], *given: object) -> tuple[float, T]:
    began = time.perf_counter()
    result = work(*given)
    return time.perf_counter() - began, result


def main() -> None:
    trying = "--try" in sys.argv
    count = 1_000_000 if trying else 10_000_000
    numbers = np.arange(2 * count, dtype=np.uint64) * SPREAD
    ids, absent = numbers[:count], numbers[count:]
    lines = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for precision in ("fp32", "fp16", "int8"):
            (folder / precision).mkdir()
            blocks = list(rows_of(ids, 0))
            seconds, files = timed(write_shards, folder / precision, [PART], precision, 1, blocks)
            size = files[0].size
            lines.append(
                Row(
                    f"{precision}: build",
                    f"{count / seconds / 1e6:.1f} M rows/s, {size / count:.1f} bytes a row",
                )
            )
            opening, tables = timed(ServingTable.open, [folder / precision])
            lines.append(
                Row(
                    f"{precision}: open {size / 2**20:.0f} MiB",
                    f"{opening * 1e3:.1f} ms",
                    "",
                    "< 1 s for 1 GiB",
                )
            )
            lookups(tables, ids[:1000], absent, KEYS)  # loads the kernels and caches the file
            for call in (KEYS, 104_000):
                got = lookups(tables, ids, absent, call)
                for what in ("hits", "misses", "mixed", "pooled"):
                    title = {
                        "hits": "all hits",
                        "misses": "all misses",
                        "mixed": "1 in 10 a miss",
                        "pooled": "found and pooled",
                    }[what]
                    lines.append(
                        Row(
                            f"{precision}: {call} keys a call, {title}",
                            f"{got[what] / 1e6:.1f} M keys/s",
                            f"{got[what] / got['limit']:.2f} of bare reads",
                            "≥ 20 M" if what in ("hits", "mixed") else "",
                        )
                    )
            if precision == "fp32":
                lines += chain(folder, tables, ids, absent)
    publish(
        "frozen",
        "Serving table, one core",
        f"`python bench/frozen.py` ({count // 10**6} M rows, dim {PART.dim} and a wide weight, keys drawn uniformly; best of {ROUNDS} rounds in turns).",
        lines,
        "Bare reads fetch whole rows at known addresses: the limit of the memory.",
        write=not trying,
    )  # fmt: skip


def chain(folder: Path, base: ServingTable, ids: np.ndarray, absent: np.ndarray) -> list[Row]:
    """A base with 8 deltas of 100k ids: merging, lookups, delta computation, compaction."""
    rng, folders = np.random.default_rng(1), [folder / "fp32"]
    for n in range(8):
        chosen = np.unique(np.concatenate([rng.choice(ids, 90_000), rng.choice(absent, 10_000)]))
        folders.append(folder / f"delta{n}")
        folders[-1].mkdir()
        write_shards(folders[-1], [PART], "fp32", 1, rows_of(chosen, n, 0.05))
    first, tables = timed(lambda: ServingTable.open(folders, work=folder / "work"))
    again, _ = timed(lambda: ServingTable.open(folders, work=folder / "work"))
    got = lookups(tables, ids, absent, KEYS)
    one = lookups(ServingTable.open(folders[:2]), ids, absent, KEYS)
    same, _ = timed(lambda: sum(block.ids_N.size for block in delta_blocks(base, merged_blocks(base))))
    (folder / "compact").mkdir()
    compacting, _ = timed(lambda: write_shards(folder / "compact", [PART], "fp32", 1, merged_blocks(tables)))
    return [
        Row("8 deltas of 100k ids: first open, merging", f"{first * 1e3:.0f} ms"),
        Row("the same, opened again", f"{again * 1e3:.1f} ms"),
        Row(f"base and one delta: {KEYS} keys a call", f"{one['hits'] / 1e6:.1f} M keys/s", f"{one['hits'] / one['limit']:.2f} of bare reads"),
        Row(f"base and 8 deltas: {KEYS} keys a call", f"{got['hits'] / 1e6:.1f} M keys/s", f"{got['hits'] / got['limit']:.2f} of bare reads"),
        Row("what changed, nothing did", f"{ids.size / same / 1e6:.1f} M rows/s"),
        Row("base and 8 deltas into a new base", f"{ids.size / compacting / 1e6:.1f} M rows/s"),
    ]  # fmt: skip


if __name__ == "__main__":
    main()
