"""The cost of a number of ids, each part in a separate process; the last line is the result as JSON.

python scale_ids.py learn FOLDER IDS DIM     a table with those ids, a checkpoint and a published version of it
python scale_ids.py resume FOLDER IDS DIM    reads the checkpoint into a new table
python scale_ids.py serve FOLDER IDS DIM     the version opened as a server does, from disk, and asked
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from clickline.artifacts.checkpoint import CheckpointState, latest_checkpoint, write_checkpoint
from clickline.artifacts.version import VersionModel
from clickline.config import Config, load_config
from clickline.embedding import begin_snapshot
from clickline.embedding.jagged_ids import to_jagged
from clickline.embedding.serving import GatherBatch, PartShape, ServingTable, gather_plan
from clickline.features import DenseField, FeatureSpec, SlotField
from clickline.machine import cores
from clickline.models.from_config import plan_of
from clickline.models.model import Model, network_arrays
from clickline.progress import Progress
from clickline.publishing.release import Release
from clickline.publishing.run import publish_release
from clickline.records import EncodedRows, LabelledRows, SlotIds
from clickline.serving.version_loading import open_version

SLOTS, DENSE, ROWS = 8, 4, 8192
SPREAD = np.uint64(0xD1342543DE82EF95)  # odd: different numbers give different ids
STEPS = 20  # measured; the middle one is told
FEATURES = FeatureSpec(
    dense=tuple(DenseField(f"I{n}", f"I{n}", "log1p") for n in range(1, DENSE + 1)),
    slots=tuple(SlotField(f"C{n}", f"C{n}", n) for n in range(1, SLOTS + 1)),
)


def batch(numbers: np.ndarray) -> tuple[SlotIds, ...]:
    ids = numbers.astype(np.uint64).reshape(SLOTS, -1) * SPREAD
    return tuple(SlotIds(ids[s]) for s in range(SLOTS))


def drawn(ids: int, seed: int) -> Iterator[tuple[SlotIds, ...]]:
    """Batches of ids that are there, drawn uniformly: the hardest case for caches."""
    rng = np.random.default_rng(seed)
    while True:
        yield batch(rng.integers(0, ids, SLOTS * ROWS))


def seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def resident() -> int:
    """Bytes of this process in memory, pages of mapped files included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def forget(folder: Path) -> None:
    """Have the next reader of these files read them from disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def config_in(folder: Path, dim: int) -> Config:
    file = folder / "clickline.yaml"
    file.write_text(
        f"name: scale\ndata: {{train: none.csv}}\ncache: {{dir: cache}}\nmodel: {{embedding_dim: {dim}, hidden: [128, 64]}}\n"
    )
    return load_config(file)


def learn(folder: Path, ids: int, dim: int) -> dict[str, Any]:
    config = config_in(folder, dim)
    model = Model.build(FEATURES, plan_of(config, FEATURES, ids), cores())
    tables = model.tables
    inputs_BI, wide_B = np.zeros((ROWS, model.spec.width), np.float32), np.zeros(ROWS, np.float32)
    gradient = np.random.default_rng(0).normal(scale=1e-3, size=inputs_BI.shape).astype(np.float32)

    def step(slots: tuple[SlotIds, ...]) -> np.ndarray:
        clock = [time.perf_counter()]
        found = tables.find(slots, ROWS, train=True)
        clock.append(time.perf_counter())
        tables.pool(found, inputs_BI, wide_B)
        clock.append(time.perf_counter())
        tables.apply(found, gradient, wide_B)
        clock.append(time.perf_counter())
        return np.diff(clock)

    # Each slot has its share of the numbers, so that all slots together have `ids` of them.
    growing = [step(batch(np.arange(at, at + SLOTS * ROWS) % ids)) for at in range(0, ids, SLOTS * ROWS)]
    draws = drawn(ids, 1)
    find, pool, apply = np.median([step(next(draws)) for _ in range(STEPS)], axis=0)
    keys = SLOTS * ROWS
    run = folder / "run"
    snapshot = begin_snapshot(tables)
    state = CheckpointState({}, {}, None, -1)
    began = time.perf_counter()
    checkpoint = write_checkpoint(run, 1, snapshot.write, network_arrays(model.network), state)
    checkpointed = time.perf_counter() - began

    ones_B, zeros_B = np.ones(ROWS, np.float32), np.zeros(ROWS, np.uint32)
    dense_DB = np.zeros((DENSE, ROWS), np.float32)
    sample = LabelledRows(
        ones_B, ones_B, zeros_B + 1, zeros_B, np.full(ROWS, -1, np.int32), EncodedRows(ROWS, dense_DB, next(draws))
    )  # fmt: skip
    origin = VersionModel("scale", 1, dataset="scale", tables_sha256="")
    release = Release(model, checkpoint.tables, origin, "", None, sample)
    began_publish = time.monotonic()
    published = publish_release(
        config, release, iter(()), Progress(), base=True, reason="scale", started=began_publish
    )
    version = next(Path(config.home, "registry").rglob("table-*.bin")).parent
    return {
        "ids": tables.size,
        "table_bytes": tables.memory_bytes,
        "new_ns": float(np.sum(growing)) / ids * 1e9,
        "longest_growth": float(np.sum(growing, axis=1).max()),
        "find_ns": find / keys * 1e9,
        "pool_ns": pool / keys * 1e9,
        "update_ns": apply / keys * 1e9,
        "checkpoint_seconds": checkpointed,
        "checkpoint_bytes": size_of(run),
        "publish_seconds": published.seconds,
        "version_bytes": size_of(version),
        "version": str(version),
    }


def resume(folder: Path, ids: int, dim: int) -> dict[str, Any]:
    config = config_in(folder, dim)
    checkpoint = latest_checkpoint(folder / "run")
    assert checkpoint is not None
    forget(checkpoint.folder)
    model = Model.build(FEATURES, plan_of(config, FEATURES, ids), cores())
    took = seconds(lambda: model.restore(checkpoint))
    assert model.tables.size == ids
    return {"resume_seconds": took}


def serve(folder: Path, ids: int, dim: int) -> dict[str, Any]:
    version = next((folder / ".clickline" / "registry").rglob("table-*.bin")).parent
    forget(version)
    work = folder / "work"
    work.mkdir()
    before = resident()
    began = time.perf_counter()
    scorer = open_version([version], load_config(folder / "clickline.yaml").serve, work)
    opened = time.perf_counter() - began
    after = resident()
    scorer.close()
    tables = ServingTable.open([version])
    part = PartShape(dim, True)
    plan = gather_plan([part], [(0, dim * s, "sum", 0.0, [0.0] * dim) for s in range(SLOTS)])
    inputs_BI, wide_B = np.zeros((ROWS, SLOTS * dim), np.float32), np.zeros(ROWS, np.float32)
    misses_S = np.zeros(SLOTS, np.int64)

    def ask(bags: Any) -> float:
        return seconds(lambda: tables.gather(GatherBatch(plan, bags, inputs_BI, wide_B, misses_S)))

    draws = drawn(ids, 2)
    first = ask(to_jagged(next(draws), ROWS))
    for path in version.glob("table-*.bin"):  # until the file is in memory, the disk is what is measured
        with path.open("rb") as file:
            while file.read(1 << 24):
                pass
    for _ in range(STEPS):
        ask(to_jagged(next(draws), ROWS))
    middle = float(np.median([ask(to_jagged(next(draws), ROWS)) for _ in range(STEPS)]))
    assert not misses_S.any(), f"{misses_S.sum()} ids of the table are not in the version"
    return {
        "open_seconds": opened,
        "open_bytes": after - before,
        "cold_batch_seconds": first,
        "lookup_ns": middle / (SLOTS * ROWS) * 1e9,
        "served_bytes": resident(),
    }


if __name__ == "__main__":
    part, folder, ids, dim = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    folder.mkdir(parents=True, exist_ok=True)
    print(json.dumps({"learn": learn, "resume": resume, "serve": serve}[part](folder, ids, dim)))
