"""A serving table gives bit for bit the inputs of the tables it was made from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from table_model import blocks_of, packed_rows, random_content, write_content

from clickline.embedding import (
    AdaGrad,
    Admission,
    Eviction,
    Ftrl,
    Sgd,
    SlotShape,
    Tables,
    begin_snapshot,
    save_snapshot,
)
from clickline.embedding.jagged_ids import to_jagged
from clickline.embedding.serving import (
    GatherBatch,
    PartShape,
    ServingTable,
    gather_plan,
    pool,
    shards_of,
    snapshot_blocks,
    snapshot_parts,
    write_shards,
)
from clickline.embedding.snapshot import SnapshotReader
from clickline.errors import ArtifactError
from clickline.records import SlotIds

SLOTS = [
    SlotShape("a", 9),
    SlotShape("b", 4, "mean"),
    SlotShape("c", 9, "max"),
    SlotShape("d", 1, "sum"),
    SlotShape("e", 4, "max"),
    SlotShape("f", 9, "mean"),
]


def draw(rng: np.random.Generator, rows: int, vocabulary: int = 60) -> list[SlotIds]:
    """One id per row in the first and the fourth slot, 0 to 4 in the others."""
    slots = []
    for s in range(len(SLOTS)):
        salt = np.uint64((s + 1) << 40)
        if s in (0, 3):
            slots.append(SlotIds(rng.integers(0, vocabulary, rows).astype(np.uint64) + salt))
            continue
        offsets = np.concatenate([[0], np.cumsum(rng.integers(0, 5, rows))]).astype(np.int64)
        slots.append(SlotIds(rng.integers(0, vocabulary, offsets[-1]).astype(np.uint64) + salt, offsets))
    return slots


def train(tables: Tables, rng: np.random.Generator, steps: int = 4, vocabulary: int = 40) -> None:
    for _ in range(steps):
        rows = int(rng.integers(1, 80))
        inputs, wide = np.empty((rows, tables.width), np.float32), np.empty(rows, np.float32)
        lookup = tables.gather(draw(rng, rows, vocabulary), inputs, wide, train=True)
        gradient = rng.normal(size=inputs.shape).astype(np.float32)
        tables.apply(lookup, gradient, rng.normal(size=rows).astype(np.float32))


def write_serving_table(path: Path, folder: Path, shards: int, precision: str = "fp32") -> None:
    reader = SnapshotReader(path)
    folder.mkdir()
    write_shards(folder, snapshot_parts(reader), precision, shards, snapshot_blocks(reader))  # type: ignore[arg-type]


def plan_of(path: Path, chosen: list[int], columns: dict[int, int]):  # type: ignore[no-untyped-def]
    """The plan for some slots, with the default rows of the snapshot."""
    reader = SnapshotReader(path)
    slots = {}
    for part, members in enumerate(reader.slots_by_table):
        for s, row in zip(members, reader.tables[part].defaults_S, strict=True):
            wide = row["wide"] if snapshot_parts(reader)[part].wide else 0
            slots[s] = (part, columns[s], SLOTS[s].pooling, float(wide), row["vector"].tolist())
    return gather_plan(snapshot_parts(reader), [slots[s] for s in chosen])


@pytest.mark.parametrize("seed", range(6))
def test_gather_equals_the_tables_it_was_made_from(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    wide = [None, Ftrl(l1=0.01), AdaGrad()][seed % 3]
    tables = Tables(
        SLOTS,
        embedding_optimizer=AdaGrad(0.3),
        wide_optimizer=wide,
        admission=Admission(1 + seed % 2),
        seed=seed,
    )
    train(tables, rng)
    save_snapshot(tables, tmp_path / "snapshot")
    write_serving_table(tmp_path / "snapshot", tmp_path / "table", shards=[1, 3, 16][seed % 3])
    columns = dict(enumerate(np.cumsum([0, *(slot.dim for slot in SLOTS)]).tolist()))
    plan = plan_of(tmp_path / "snapshot", list(range(len(SLOTS))), columns)
    with ServingTable.open([tmp_path / "table"]) as opened:
        for rows in (1, 2, 127, 128, 129, 300):
            batch = draw(rng, rows)  # a third of the ids are unknown
            expected, expected_wide = (
                np.full((2, rows, tables.width + 3), 7, np.float32)[0],
                np.empty(rows, np.float32),
            )
            tables.gather(batch, expected, expected_wide, train=False)
            inputs, wide_B = np.full((rows, tables.width + 3), 7, np.float32), np.full(rows, 5, np.float32)
            misses = np.full(len(SLOTS), 100, np.int64)
            opened.gather(GatherBatch(plan, to_jagged(batch, rows), inputs, wide_B, misses))
            assert inputs.tobytes() == expected.tobytes()
            assert wide_B.tobytes() == expected_wide.tobytes()
            for s, ids in enumerate(batch):
                part = next(p for p, members in enumerate(tables.slots_by_table) if s in members)
                rows_found = packed_rows(opened, part, ids.ids_N.tolist())
                assert misses[s] == 100 + rows_found.count(None)


def test_a_plan_may_have_some_slots_in_any_column(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    tables = Tables(SLOTS, embedding_optimizer=Sgd(0.1))
    train(tables, rng)
    save_snapshot(tables, tmp_path / "snapshot")
    write_serving_table(tmp_path / "snapshot", tmp_path / "table", 2)
    chosen, columns = [4, 0, 5], {4: 20, 0: 2, 5: 11, 1: 0, 2: 0, 3: 0}
    plan = plan_of(tmp_path / "snapshot", chosen, columns)
    assert plan.width == 24
    batch = draw(rng, 50)
    expected, wide = np.empty((50, tables.width), np.float32), np.empty(50, np.float32)
    tables.gather(batch, expected, wide, train=False)
    inputs, misses = np.full((50, 30), -1, np.float32), np.zeros(3, np.int64)
    with ServingTable.open([tmp_path / "table"]) as opened:
        jagged = to_jagged([batch[s] for s in chosen], 50)
        opened.gather(GatherBatch(plan, jagged, inputs, wide, misses))
    starts = np.cumsum([0, *(slot.dim for slot in SLOTS)])
    unchanged = np.ones(30, bool)
    for s in chosen:
        own = slice(columns[s], columns[s] + SLOTS[s].dim)
        unchanged[own] = False
        assert np.array_equal(inputs[:, own], expected[:, starts[s] : starts[s] + SLOTS[s].dim])
    assert (inputs[:, unchanged] == -1).all()


@pytest.mark.parametrize(("precision", "bound"), [("fp16", 2**-11), ("int8", 0.5 / 126)])
def test_lower_precision_costs_at_most_its_rounding(precision: str, bound: float, tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    parts = [PartShape(9, True), PartShape(2, False)]
    content = random_content(rng, parts, 300)
    content[0][5] = (1.5, (0.0,) * 9)
    content[0][6] = (-2.5, (1e-41, -1e-7, 3e-6, 2e-5, 6.1e-5, -6e-5, 0, 0, 0))  # below the normal halves
    write_content(tmp_path / "exact", parts, content)
    write_content(tmp_path / "packed", parts, content, 2, precision)
    plan = gather_plan(parts, [(0, 0, "sum", 0.25, [0.1] * 9), (1, 9, "max", 0.5, [0.2, 0.3])])
    slots = [SlotIds(np.array([*content[part], 12345], dtype=np.uint64)) for part in (0, 1)]
    slots = [SlotIds(slots[0].ids_N[:301]), SlotIds(slots[1].ids_N[-301:])]
    got = {}
    for name in ("exact", "packed"):
        inputs, wide, misses = (
            np.zeros((301, 11), np.float32),
            np.zeros(301, np.float32),
            np.zeros(2, np.int64),
        )
        with ServingTable.open([tmp_path / name]) as opened:
            assert opened.rows == sum(map(len, content))
            opened.gather(GatherBatch(plan, to_jagged(slots, 301), inputs, wide, misses))
        got[name] = inputs, wide
        assert misses.tolist() == [0, 1]
    assert got["exact"][1].tobytes() == got["packed"][1].tobytes()  # wide weights stay exact
    exact, packed = got["exact"][0], got["packed"][0]
    for columns in (slice(0, 9), slice(9, 11)):
        largest = np.abs(exact[:, columns]).max(axis=1, keepdims=True)
        assert (np.abs(exact[:, columns] - packed[:, columns]) <= bound * largest + 2**-25).all()
    assert exact[-1, 9:].tobytes() == packed[-1, 9:].tobytes()  # default rows are not packed
    assert not np.array_equal(exact, packed)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
def test_rows_fetched_from_another_machine_pool_the_same(precision: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    parts = [PartShape(9, True), PartShape(3, True)]
    content = random_content(rng, parts, 200)
    write_content(tmp_path / "t", parts, content, 3, precision)
    plan = gather_plan(parts, [(1, 9, "mean", 0.5, [1, 2, 3]), (0, 0, "sum", 0.25, [0.1] * 9)])
    offsets = np.arange(0, 121, 3)
    slots = [
        SlotIds(np.array([*list(content[1])[:100], *range(20)], dtype=np.uint64), offsets),
        SlotIds(np.array([*list(content[0])[:30], *range(10)], dtype=np.uint64)),
    ]
    jagged = to_jagged(slots, 40)
    with ServingTable.open([tmp_path / "t"]) as opened:
        inputs, wide, misses = np.zeros((40, 12), np.float32), np.zeros(40, np.float32), np.zeros(2, np.int64)
        opened.gather(GatherBatch(plan, jagged, inputs, wide, misses))
    shard_N = np.empty(jagged.ids_N.size, np.int64)
    shards_of(jagged.ids_N, 3, shard_N)
    assert set(shard_N) == {0, 1, 2}
    address_N, buffers = np.zeros(jagged.ids_N.size, np.int64), []
    for shard in range(3):
        with ServingTable.open([tmp_path / "t"], shards=[shard]) as server:
            for s, part in ((0, 1), (1, 0)):
                own = np.flatnonzero(shard_N == shard)
                own = own[(own >= jagged.starts_S1[s]) & (own < jagged.starts_S1[s + 1])]
                width = server.row_bytes(part)
                buffer = np.empty(3 + own.size * width, np.uint8)  # as in a frame: not aligned
                rows_NW, found_N = buffer[3:].reshape(-1, width), np.empty(own.size, np.bool_)
                ids = np.frombuffer(b"x" + jagged.ids_N[own].tobytes(), np.uint64, offset=1)
                server.find(part, ids, rows_NW, found_N)
                buffers.append(buffer)
                address_N[own[found_N]] = rows_NW.ctypes.data + np.flatnonzero(found_N) * width
    again, wide_again, misses_again = np.zeros_like(inputs), np.zeros_like(wide), np.zeros_like(misses)
    pool(parts, precision, GatherBatch(plan, jagged, again, wide_again, misses_again), address_N)  # type: ignore[arg-type]
    assert again.tobytes() == inputs.tobytes() and wide_again.tobytes() == wide.tobytes()
    assert misses_again.tolist() == misses.tolist() == [20, 10]


def test_deltas_of_snapshots_follow_training(tmp_path: Path) -> None:
    """Rows are created, changed, evicted and created again; only admitted ids are in the table."""
    rng = np.random.default_rng(6)
    tables = Tables(SLOTS, embedding_optimizer=Sgd(0.1), admission=Admission(2))
    train(tables, rng)
    snapshot = begin_snapshot(tables)
    snapshot.write(tmp_path / "0")
    folders = [tmp_path / "table0"]
    write_serving_table(tmp_path / "0", folders[0], 3)
    generation = snapshot.generation
    for turn in range(1, 5):
        train(tables, rng, 2, 20 + 20 * turn)
        tables.evict(Eviction(threshold=0.8 * turn))
        train(tables, rng, 1)
        snapshot = begin_snapshot(tables, since=generation)
        generation = snapshot.generation
        snapshot.write(tmp_path / str(turn))
        folders.append(tmp_path / f"table{turn}")
        write_serving_table(tmp_path / str(turn), folders[-1], 3)
        blocks = list(snapshot_blocks(tmp_path / str(turn)))
        assert any(block.tombstone_N.any() for block in blocks)
        columns = dict(enumerate(np.cumsum([0, *(slot.dim for slot in SLOTS)]).tolist()))
        plan = plan_of(tmp_path / str(turn), list(range(len(SLOTS))), columns)
        batch = draw(rng, 200, 120)
        expected, expected_wide = np.empty((200, tables.width), np.float32), np.empty(200, np.float32)
        tables.gather(batch, expected, expected_wide, train=False)
        inputs, wide, misses = np.empty_like(expected), np.empty_like(expected_wide), np.zeros(6, np.int64)
        with ServingTable.open(folders, work=tmp_path / "work") as opened:
            opened.gather(GatherBatch(plan, to_jagged(batch, 200), inputs, wide, misses))
            assert opened.rows == sum(report.ids for report in tables.report())
        assert inputs.tobytes() == expected.tobytes() and wide.tobytes() == expected_wide.tobytes()


def test_a_damaged_snapshot_gives_no_rows(tmp_path: Path) -> None:
    tables = Tables(SLOTS)
    train(tables, np.random.default_rng(7))
    save_snapshot(tables, tmp_path / "snapshot")
    payload = (tmp_path / "snapshot").read_bytes()
    for damaged in (payload[:-1], payload[: len(payload) // 2], payload[:5000] + b"\1" + payload[5001:], b""):
        (tmp_path / "torn").write_bytes(damaged)
        with pytest.raises(ArtifactError, match="damaged"):
            list(snapshot_blocks(tmp_path / "torn"))


def test_invalid_buffers_are_rejected(tmp_path: Path) -> None:
    parts = [PartShape(2, True)]
    write_content(tmp_path / "t", parts, [{1: (1.0, (2.0, 3.0))}])
    plan = gather_plan(parts, [(0, 1, "sum", 0.0, [0.0, 0.0])])
    jagged = to_jagged([SlotIds(np.array([1, 2], np.uint64))], 2)

    batch = GatherBatch(
        plan, jagged, np.zeros((2, 3), np.float32), np.zeros(2, np.float32), np.zeros(1, np.int64)
    )
    opened = ServingTable.open([tmp_path / "t"])
    opened.gather(batch)
    for wrong in (
        {"inputs_BI": np.zeros((2, 2), np.float32)},
        {"inputs_BI": np.zeros((3, 3), np.float32)},
        {"inputs_BI": np.zeros((2, 3), np.float64)},
        {"inputs_BI": np.zeros((2, 6), np.float32)[:, ::2]},
        {"wide_B": np.zeros(3, np.float32)},
        {"misses_S": np.zeros(2, np.int64)},
        {"jagged": to_jagged([SlotIds(np.array([1], np.uint64))], 1)},
        {"jagged": to_jagged([SlotIds(np.array([1], np.uint64), np.array([0, 1]))], 1)},
        {"jagged": to_jagged([SlotIds(np.array([1, 2], np.uint64))] * 2, 2)},
    ):
        with pytest.raises(ValueError, match=r"required|expected|got|ids"):
            opened.gather(batch._replace(**wrong))
    with pytest.raises(ValueError, match="expected"):
        opened.find(0, np.zeros(1, np.uint64), np.zeros((1, 8), np.uint8), np.zeros(1, bool))
    with pytest.raises(ValueError, match="column"):
        gather_plan(parts, [(0, 1, "sum", 0.0, [0.0])])
    opened.close()
    with pytest.raises(ValueError, match="closed"):
        opened.gather(batch)


def test_blocks_come_in_the_order_of_the_table(tmp_path: Path) -> None:
    """So do the blocks of these tests' helper: write_shards would reject them otherwise."""
    content = random_content(np.random.default_rng(0), [PartShape(1, False)], 100)
    blocks = list(blocks_of([PartShape(1, False)], content))
    assert len(blocks) == 15 and sum(block.ids_N.size for block in blocks) == 100
