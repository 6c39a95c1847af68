"""The arithmetic of a plan compared with actual values: growth of ids, bytes of tables and files, shards that fit."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clickline.embedding import (
    AdaGrad,
    Adam,
    Admission,
    Ftrl,
    RowOptimizer,
    RowWiseAdaGrad,
    SlotShape,
    Tables,
    save_snapshot,
    snapshot_bytes,
    table_bytes,
)
from clickline.embedding.serving import PartShape, RowBlock, files_bytes, write_shards
from clickline.embedding.serving.packed_rows import mix_ids
from clickline.pipeline.planning.fit import fit_plan
from clickline.pipeline.planning.id_growth import PREFIXES, extrapolate, occurrences
from clickline.pipeline.planning.plan_result import DenseMemory, MemoryPlan, ServingPlan, TablesMemory
from clickline.progress import human_size
from clickline.records import EncodedRows, LabelledRows, SlotIds


def labelled(slots: list[SlotIds], rows: int, random: np.random.Generator) -> LabelledRows:
    impression_B = random.integers(1, 4, rows).astype(np.uint32)
    click_B = random.integers(0, 2, rows).astype(np.uint32)
    return LabelledRows(
        np.zeros(rows, np.float32),
        impression_B.astype(np.float32),
        impression_B,
        click_B,
        np.zeros(rows, np.int32),
        EncodedRows(rows, np.zeros((0, rows), np.float32), tuple(slots)),
    )


# ── ids ────────────────────────────────────────────────────────────────────────────────────────


def test_impressions_and_clicks_per_id_equal_a_direct_count() -> None:
    random = np.random.default_rng(1)
    counts_B = random.integers(0, 4, 800)
    offsets_B1 = np.concatenate([[0], np.cumsum(counts_B)])
    several = SlotIds(random.integers(0, 90, offsets_B1[-1]).astype(np.uint64), offsets_B1)
    one = SlotIds(random.integers(0, 90, 800).astype(np.uint64))
    rows = labelled([several, one], 800, random)
    for slot, ids in enumerate(rows.encoded.slots):
        for part, (shows, clicks) in zip(PREFIXES, occurrences(rows, slot), strict=True):
            told: Counter[int] = Counter()
            clicked: Counter[int] = Counter()
            few = ids.slice(0, 800 // part)
            starts = range(801) if few.offsets_B1 is None else few.offsets_B1.tolist()
            for row in range(800 // part):
                for id in few.ids_N[starts[row] : starts[row + 1]].tolist():
                    told[id] += int(rows.impression_B[row])
                    clicked[id] += int(rows.click_B[row])
            assert shows.tolist() == [told[id] for id in sorted(told)]
            assert clicks.tolist() == [clicked[id] for id in sorted(told)]


@pytest.mark.parametrize(
    ("exponent", "vocabulary", "share"),
    [(1.2, 10**7, 16), (1.2, 3000, 4), (1.5, 10**7, 16), (1.5, 3000, 16), (2.0, 10**7, 16), (2.0, 3000, 16)],
)
def test_ids_are_extrapolated_from_few_rows(exponent: float, vocabulary: int, share: int) -> None:
    random = np.random.default_rng(7)
    ids_N = np.minimum(random.zipf(exponent, 400_000), vocabulary).astype(np.uint64)
    few = labelled([SlotIds(ids_N[: ids_N.size // share])], ids_N.size // share, random)
    seen = [float(shows.size) for shows, _ in occurrences(few, 0)]
    found = extrapolate(seen, share)
    real = np.unique(ids_N).size
    assert found.low <= found.expected <= found.high
    assert found.expected == pytest.approx(real, rel=0.2)


def test_complete_count_is_not_changed() -> None:
    assert extrapolate([10.0, 20.0, 30.0, 40.0], 1.0).expected == 40.0
    assert extrapolate([5.0, 5.0, 5.0, 5.0], 1000.0).high == 5.0
    assert extrapolate([0.0, 0.0, 0.0, 0.0], 8.0).expected == 0.0
    assert extrapolate([10.0, 20.0, 40.0, 80.0], 0.5).expected == pytest.approx(40.0)


# ── bytes ──────────────────────────────────────────────────────────────────────────────────────


def learned(tables: Tables, ids_N: np.ndarray[tuple[int], np.dtype[np.uint64]], batch: int) -> None:
    """Count ids without learning anything."""
    for first in range(0, ids_N.size, batch):
        part = ids_N[first : first + batch]
        inputs, wide = np.zeros((part.size, tables.width), np.float32), np.zeros(part.size, np.float32)
        lookup = tables.gather([SlotIds(part)], inputs, wide, train=True)
        tables.apply(lookup, inputs, wide)


@pytest.mark.parametrize(
    ("dim", "optimizer", "wide"), [(4, RowWiseAdaGrad(), Ftrl()), (9, AdaGrad(), Ftrl()), (16, Adam(), None)]
)
@pytest.mark.parametrize("ids", [5_000, 150_000])
def test_predicted_memory_and_snapshot_of_a_table(
    tmp_path: Path, dim: int, optimizer: RowOptimizer, wide: RowOptimizer | None, ids: int
) -> None:
    tables = Tables([SlotShape("a", dim)], embedding_optimizer=optimizer, wide_optimizer=wide)
    learned(tables, np.random.default_rng(0).integers(0, 2**64, ids, dtype=np.uint64), 4096)
    layout = tables.parts[0].layout
    assert table_bytes(layout, ids).total == pytest.approx(
        tables.memory_bytes, rel=0.1 if ids < 10_000 else 0.03
    )
    assert snapshot_bytes(layout, ids) == pytest.approx(
        save_snapshot(tables, tmp_path / "all").size, rel=0.01
    )


def test_predicted_memory_of_candidates(tmp_path: Path) -> None:
    tables = Tables([SlotShape("a", 8)], admission=Admission(min_impressions=2))
    random = np.random.default_rng(0)
    once, twice = random.integers(0, 2**64, (2, 60_000), dtype=np.uint64)
    learned(tables, random.permutation(np.concatenate([once, twice, twice])), 4096)
    layout = tables.parts[0].layout
    told = table_bytes(layout, 60_000, 60_000, batch_ids=4096)
    assert told.total == pytest.approx(tables.memory_bytes, rel=0.06)
    saved = save_snapshot(tables, tmp_path / "all").size
    assert snapshot_bytes(layout, 60_000, 60_000) == pytest.approx(saved, rel=0.01)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("shards", [1, 3])
def test_predicted_size_of_version_files(tmp_path: Path, precision: str, shards: int) -> None:
    ids_N = np.unique(np.random.default_rng(0).integers(0, 2**64, 20_000, dtype=np.uint64))
    ids_N = ids_N[np.argsort(mix_ids(ids_N))]
    parts = [PartShape(6, wide=True)]
    weights = np.ones((ids_N.size, 6), np.float32)
    block = RowBlock(0, ids_N, weights[:, 0].copy(), weights, np.zeros(ids_N.size, np.bool_))
    written = write_shards(tmp_path, parts, precision, shards, [block])  # type: ignore[arg-type]
    told = files_bytes(parts, precision, shards, [ids_N.size])  # type: ignore[arg-type]
    assert told == pytest.approx(sum(file.size for file in written), rel=0.01)


# ── what fits ──────────────────────────────────────────────────────────────────────────────────

MIB = 1 << 20


def sizes(tables: int, beside: int) -> tuple[MemoryPlan, ServingPlan]:
    memory = MemoryPlan(
        TablesMemory((128,), tables, 0, 0, 0, tables),
        DenseMemory(0, 0, 0),
        beside,
        0,
        0,
        beside + tables,
    )
    return memory, ServingPlan(tables, 50 * MIB, 2, 100 * MIB, 200 * MIB + 2 * tables)


@given(
    st.integers(1, 1 << 42),
    st.integers(1, 1 << 34),
    st.integers(64 * MIB, 1 << 36),
)
def test_number_of_shards_is_the_smallest_that_fits(tables: int, beside: int, machine: int) -> None:
    memory, serving = sizes(tables, beside)
    fit = fit_plan(machine, memory, serving, 4, ())
    assert fit.train_fits == (memory.peak <= fit.usable)
    if fit.train_shards is None:
        assert beside + tables / 4096 > fit.usable or beside >= fit.usable
    else:
        assert beside + tables / fit.train_shards <= fit.usable + 1
        if fit.train_shards > 1:
            assert beside + tables / (fit.train_shards - 1) > fit.usable
        assert fit.train_fits == (fit.train_shards == 1)
    if fit.serve_shards is not None and fit.serve_shards > 1:
        assert 150 * MIB + 2 * tables / (fit.serve_shards - 1) > fit.usable


def test_arithmetic_is_shown() -> None:
    fit = fit_plan(1000 * MIB, *sizes(3000 * MIB, 300 * MIB), 4, ())
    assert fit.train_shards == 5
    assert fit.arithmetic[0] == "usable: 1000.0 MiB x 0.9 = 900.0 MiB"
    assert fit.arithmetic[1] == (
        f"train: 300.0 MiB + {human_size(3000 * MIB)} of tables / 5 = 900.0 MiB ≤ 900.0 MiB"
    )
    assert fit.serve_shards == 8
    assert fit.serve_processes == 0
