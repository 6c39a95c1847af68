"""A base and its deltas equal a dict after the same changes."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from table_model import (
    Part,
    blocks_of,
    content_of,
    fp32_row,
    packed_rows,
    random_content,
    random_weights,
    write_content,
)

from clickline.embedding.serving import PartShape, ServingTable, delta_blocks, merged_blocks, write_shards
from clickline.errors import ArtifactError

PARTS = [PartShape(2, True), PartShape(1, False)]
IDS = st.integers(0, 12) | st.sampled_from([2**64 - 1, 2**63, 0x9E3779B97F4A7C15])
WEIGHTS = st.floats(-4, 4, width=32)
CHANGES = st.dictionaries(IDS, st.none() | st.tuples(WEIGHTS, st.tuples(WEIGHTS, WEIGHTS)), max_size=10)


def rows_of(changes: list[Part]) -> list[Part]:
    """Weights with the dim of each part."""
    return [
        {
            id: weights and (weights[0] if shape.wide else 0.0, weights[1][: shape.dim])
            for id, weights in part.items()
        }
        for shape, part in zip(PARTS, changes, strict=True)
    ]


def assert_holds(tables: ServingTable, model: list[Part]) -> None:
    every = [*range(14), 2**64 - 1, 2**63, 0x9E3779B97F4A7C15]
    for part, shape in enumerate(PARTS):
        expected = [fp32_row(shape, row) if (row := model[part].get(id)) else None for id in every]
        assert packed_rows(tables, part, every) == expected
    assert tables.rows == sum(len(part) for part in model)


@settings(max_examples=60)
@given(
    changes=st.lists(st.tuples(CHANGES, CHANGES), min_size=1, max_size=6),
    shards=st.sampled_from([1, 2, 5]),
)
def test_a_chain_equals_a_dict(changes, shards, tmp_path_factory) -> None:  # type: ignore[no-untyped-def]
    """Base, deltas with updates, tombstones and returning ids; then compacted, then split into deltas again."""
    folder: Path = tmp_path_factory.mktemp("chain")
    model: list[Part] = [{}, {}]
    folders: list[Path] = []
    for n, drawn in enumerate(changes):
        delta = rows_of(list(drawn))
        for part, rows in enumerate(delta):
            model[part].update(rows)
            model[part] = {id: row for id, row in model[part].items() if row is not None}
        folders.append(write_content(folder / str(n), PARTS, delta, shards))
        with ServingTable.open(folders, work=[None, folder / "work"][n % 2]) as tables:
            assert_holds(tables, model)
    with ServingTable.open(folders) as tables:
        assert content_of(PARTS, merged_blocks(tables)) == model
        (folder / "compact").mkdir()
        files = write_shards(folder / "compact", PARTS, "fp32", shards + 1, merged_blocks(tables))
        assert sum(file.rows for file in files) == tables.rows and not any(file.tombstones for file in files)
        wanted = rows_of([dict(part) for part in changes[0]])
        wanted = [{id: row for id, row in part.items() if row is not None} for part in wanted]
        delta = list(delta_blocks(tables, blocks_of(PARTS, wanted)))
        changed = content_of(PARTS, iter(delta))
        for part in range(2):  # no equal rows, no needless tombstones
            old, new = (
                {id: str(row) for id, row in rows[part].items()} for rows in (model, wanted)
            )  # -0.0 is not 0.0
            assert changed[part].keys() == {
                id for id in old.keys() | new.keys() if old.get(id) != new.get(id)
            }
        (folder / "difference").mkdir()
        write_shards(folder / "difference", PARTS, "fp32", shards, delta)
    with ServingTable.open([folder / "compact"]) as tables:
        assert_holds(tables, model)
    with ServingTable.open([*folders, folder / "difference"]) as tables:
        assert_holds(tables, wanted)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
def test_compaction_changes_no_bit_and_an_equal_model_gives_no_delta(precision, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(1)
    parts = [PartShape(9, True), PartShape(4, False)]
    content = random_content(rng, parts, 2000)
    scales = np.exp(rng.uniform(-70, 12, 2000))
    for part, rows in enumerate(content):
        for scale, (id, (wide, vector)) in zip(scales, list(rows.items()), strict=False):
            rows[id] = (
                wide,
                tuple(np.clip(np.float32(scale) * np.array(vector, np.float32), -6e4, 6e4).tolist()),
            )
        rows[part] = (0.5 * (1 - part), (0.0,) * parts[part].dim)
    base = write_content(tmp_path / "base", parts, content, 2, precision)
    update = [
        {id: random_weights(rng, shape) for id in list(rows)[:500]}
        for shape, rows in zip(parts, content, strict=True)
    ]
    removed_rows: list[Part] = [dict.fromkeys(list(rows)[400:600]) for rows in content]
    folders = [base, write_content(tmp_path / "1", parts, update, 2, precision)]
    folders.append(write_content(tmp_path / "2", parts, removed_rows, 2, precision))
    (tmp_path / "compact").mkdir()
    with ServingTable.open(folders) as chain:
        write_shards(tmp_path / "compact", parts, precision, 2, merged_blocks(chain))
        with ServingTable.open([tmp_path / "compact"]) as compact:
            assert compact.rows == chain.rows == 2 * (2001 - 200)
            for part, rows in enumerate(content):
                assert packed_rows(chain, part, list(rows)) == packed_rows(compact, part, list(rows))
        assert list(delta_blocks(chain, merged_blocks(chain))) == []
        full = [{**rows, **changed} for rows, changed in zip(content, update, strict=True)]
        full = [
            {id: row for id, row in rows.items() if id not in removed}
            for rows, removed in zip(full, removed_rows, strict=True)
        ]
        assert list(delta_blocks(chain, blocks_of(parts, full))) == []  # compared as packed


@pytest.mark.slow
def test_large_deltas_merge_in_pieces(tmp_path: Path) -> None:
    """More rows than fit in one piece of a merge or of the row count; many deltas."""
    rng = np.random.default_rng(2)
    parts = [PartShape(1, True)]
    base = rng.integers(0, 2**64, 60_000, dtype=np.uint64)
    model: Part = {}
    folders = []
    for n in range(5):
        chosen = base if n == 0 else rng.choice(base, 25_000, replace=False)
        delta: Part = {
            int(id): (float(n), (float(k),)) if n == 0 or k % 5 else None for k, id in enumerate(chosen)
        }
        model.update(delta)
        folders.append(write_content(tmp_path / str(n), parts, [delta], 3))
    live = {id: row for id, row in model.items() if row}
    with ServingTable.open(folders) as tables:
        assert tables.rows == len(live)
        expected = [fp32_row(parts[0], row) if row else None for row in model.values()]
        assert packed_rows(tables, 0, list(model)) == expected
        assert content_of(parts, merged_blocks(tables)) == [live]


def test_an_overlay_is_built_once_and_reused(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    parts = [PartShape(3, True)]
    folders = [write_content(tmp_path / str(n), parts, random_content(rng, parts, 50), 2) for n in range(3)]
    work = tmp_path / "work"
    for chain in (folders[:1], folders[:2]):
        ServingTable.open(chain, work=work).close()
        assert not work.exists()  # nothing to merge
    first = ServingTable.open(folders, work=work)
    (delta_merge,) = work.glob("overlay-*")
    files = {path.name: path.stat().st_ino for path in delta_merge.iterdir()}
    (work / ".overlay-1.0123456789abcdef").mkdir()  # left by a killed process; ignored
    second = ServingTable.open(folders, work=work)
    assert {path.name: path.stat().st_ino for path in delta_merge.iterdir()} == files and len(files) == 2
    maps = Path("/proc/self/maps").read_text().splitlines()
    assert all("r--s" in line for line in maps if str(delta_merge) in line)
    assert sum(str(delta_merge) in line for line in maps) == 4
    ServingTable.open(folders, work=work, shards=[1]).close()  # a lookup server's shard has its own overlay
    assert len(list(work.glob("overlay-*"))) == 2
    torn = sorted(delta_merge.iterdir())[0]
    torn.unlink()
    torn.write_bytes(b"torn")
    third = ServingTable.open(folders, work=work)
    ids = [id for folder in range(3) for id in range(folder)] + [1, 2, 3]
    assert packed_rows(first, 0, ids) == packed_rows(second, 0, ids) == packed_rows(third, 0, ids)
    for tables in (first, second, third):
        tables.close()
    for n in range(3, 9):  # old ones are removed
        folders.append(write_content(tmp_path / str(n), parts, random_content(rng, parts, 5), 2))
        ServingTable.open(folders, work=work).close()
    assert len(list(work.glob("overlay-*"))) == 4
    assert not list(work.glob(".overlay-*"))


def _open_and_report(folders: list[Path], work: Path, ids: list[int], queue, go) -> None:  # type: ignore[no-untyped-def]
    go.wait(30)
    with ServingTable.open(folders, work=work) as tables:
        rows = packed_rows(tables, 0, ids)
        overlay = next(level for level in reversed(tables.levels))
        queue.put((rows, sorted(mapped.path.stat().st_ino for mapped in overlay.values())))


@pytest.mark.slow
def test_processes_that_open_at_once_share_one_overlay(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    parts = [PartShape(3, True)]
    contents = [random_content(rng, parts, 3000) for _ in range(3)]
    folders = [write_content(tmp_path / str(n), parts, content, 2) for n, content in enumerate(contents)]
    ids = [id for content in contents for id in list(content[0])[:100]]
    context = multiprocessing.get_context("spawn")
    queue, go = context.Queue(), context.Barrier(3)
    children = [
        context.Process(target=_open_and_report, args=(folders, tmp_path / "work", ids, queue, go))
        for _ in range(3)
    ]
    for child in children:
        child.start()
    try:
        reports = [queue.get(timeout=90) for _ in children]
    finally:
        for child in children:
            child.join(30)
            child.kill()
    assert reports[0] == reports[1] == reports[2]
    assert all(row is not None for row in reports[0][0])


def _die_while_merging(folders: list[Path], work: Path) -> None:
    from clickline.embedding.serving import delta_merge

    written = delta_merge.write_packed

    def write_and_die(*args, **options):  # type: ignore[no-untyped-def]
        written(*args, **options)
        os.kill(os.getpid(), signal.SIGKILL)

    delta_merge.write_packed = write_and_die  # type: ignore[assignment]
    ServingTable.open(folders, work=work)


def test_kill_while_writing_the_overlay(tmp_path: Path) -> None:
    """The partial overlay is neither used nor kept, and the lock is free."""
    parts = [PartShape(3, True)]
    contents = [random_content(np.random.default_rng(n), parts, 100) for n in range(3)]
    folders = [write_content(tmp_path / str(n), parts, content) for n, content in enumerate(contents)]
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=_die_while_merging, args=(folders, tmp_path / "work"))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    assert list((tmp_path / "work").glob(".overlay-*")) and not list((tmp_path / "work").glob("overlay-*"))
    with ServingTable.open(folders, work=tmp_path / "work") as tables:
        assert tables.rows == 300
    assert not list((tmp_path / "work").glob(".overlay-*"))


def test_deltas_that_do_not_match_their_base_are_rejected(tmp_path: Path) -> None:
    def folder(name: str, shape: PartShape, shards: int, precision: str) -> Path:
        return write_content(tmp_path / name, [shape], [{1: (0.0, (1.0,) * shape.dim)}], shards, precision)

    base = folder("base", PartShape(2, False), 2, "fp32")
    for delta in (
        folder("dim", PartShape(3, False), 2, "fp32"),
        folder("wide", PartShape(2, True), 2, "fp32"),
        folder("shards", PartShape(2, False), 3, "fp32"),
        folder("precision", PartShape(2, False), 2, "int8"),
    ):
        with pytest.raises(ArtifactError, match="new base"):
            ServingTable.open([base, delta])
    with ServingTable.open([base], shards=[1]) as some, pytest.raises(ValueError, match="all are required"):
        next(merged_blocks(some))
