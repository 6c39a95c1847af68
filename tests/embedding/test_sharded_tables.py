"""Sharded tables train like local tables: bit for bit with one part, up to the order of sums with several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sharded_world import Batch, ShardedTables, as_sent, batch_of, train_locally

from clickline.embedding import (
    OPTIMIZERS,
    Admission,
    Eviction,
    RemoteTables,
    RowGradients,
    SlotShape,
    Tables,
    begin_snapshot,
    inner_shards,
    load_snapshot,
    packed_messages,
    save_snapshot,
)
from clickline.embedding.snapshot import SnapshotReader
from clickline.records import SlotIds

SLOTS = (
    SlotShape("one", 4),
    SlotShape("mean", 4, "mean"),
    SlotShape("max", 8, "max"),
    SlotShape("largest", 4, "max"),
    SlotShape("wider", 8),
    SlotShape("sum", 4, "sum"),
)
MULTI = (1, 2, 3, 5)
STRICT = Admission(min_impressions=4, probability=0.8)


def tables(**changes: Any) -> Tables:
    settings: dict[str, Any] = {"seed": 3, "l2": 0.01, "init_scale": 0.5, "admission": STRICT}
    return Tables(**{"slots": SLOTS, **settings, **changes})


def batches(seed: int, count: int, strays: float = 0.1) -> list[Batch]:
    rng = np.random.default_rng(seed)
    return [batch_of(rng, SLOTS, 60, 150, MULTI, strays) for _ in range(count)]


def content(many: Sequence[Tables], folder: Path) -> list[np.ndarray[Any, Any]]:
    """All content of the tables, through the parts they save: the bytes of a full snapshot."""
    paths = [folder / f"part-{number}.bin" for number in range(len(many))]
    for one, path in zip(many, paths, strict=True):
        save_snapshot(one, path)
    merged = Tables(
        many[0].slots,
        embedding_optimizer=many[0].embedding_optimizer,
        wide_optimizer=many[0].wide_optimizer,
    )
    load_snapshot(merged, paths)
    save_snapshot(merged, folder / "merged.bin")
    return [np.fromfile(folder / "merged.bin", dtype=np.uint8)]


def same(one: Sequence[np.ndarray[Any, Any]], other: Sequence[np.ndarray[Any, Any]]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("shards", [1, 2, 3, pytest.param(64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("threads", [1, 2])
def test_one_part_trains_bit_for_bit_like_local_tables(shards: int, threads: int, tmp_path: Path) -> None:
    local = tables()
    sharded = ShardedTables([tables(threads=threads) for _ in range(shards)], threads=threads)
    for number, batch in enumerate(batches(1, 6)):
        assert same(train_locally(local, batch, 0.9**number), sharded.train(batch, factor=0.9**number))
    assert same(content([local], tmp_path), content([shard.tables for shard in sharded.shards], tmp_path))
    by_slot = np.sum([[(s.ids, s.candidates) for s in one.tables.report()] for one in sharded.shards], axis=0)
    assert by_slot.tolist() == [[slot.ids, slot.candidates] for slot in local.report()]
    assert all(slot.ids and slot.candidates for slot in local.report())  # both kinds occurred


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("admission", [Admission(), STRICT])
def test_every_optimizer_with_and_without_wide_weights(
    name: str, wide: bool, admission: Admission, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {
        "embedding_optimizer": OPTIMIZERS[name](),
        "wide_optimizer": OPTIMIZERS[name]() if wide else None,
        "l2": 0.1 if wide else 0.0,
        "admission": admission,
    }
    local, sharded = tables(**settings), ShardedTables([tables(**settings) for _ in range(2)])
    for batch in batches(2, 4):
        assert same(train_locally(local, batch), sharded.train(batch))
    assert same(content([local], tmp_path), content([shard.tables for shard in sharded.shards], tmp_path))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32), rows=st.integers(0, 30), shards=st.integers(1, 9), same_slot=st.booleans())
def test_any_batch_even_an_empty_one(seed: int, rows: int, shards: int, same_slot: bool) -> None:
    rng = np.random.default_rng(seed)
    slots = (SlotShape("a", 2, "max"), SlotShape("b", 2, "mean"), SlotShape("c", 3))
    settings: dict[str, Any] = {"slots": slots, "admission": STRICT, "seed": seed}
    local, sharded = Tables(**settings), ShardedTables([Tables(**settings) for _ in range(shards)])
    for _ in range(3):
        batch = batch_of(rng, slots, rows, 8, multi=(0, 1))
        if same_slot:  # an id in several slots of a row
            batch = batch._replace(slots=[batch.slots[0], batch.slots[0], batch.slots[2]])
        assert same(train_locally(local, batch), sharded.train(batch))
    assert local.size == sum(shard.tables.size for shard in sharded.shards)


@pytest.mark.parametrize(("parts", "shards"), [(2, 2), (3, 1), (5, 4)])
def test_several_parts_count_exactly_and_train_nearly_the_same(
    parts: int, shards: int, tmp_path: Path
) -> None:
    local, sharded = tables(), ShardedTables([tables() for _ in range(shards)])
    for batch in batches(3, 6, strays=0.0):  # local tables assign an id of two slots by slot order
        expected, actual = train_locally(local, batch), sharded.train(batch, parts)
        for one, other in zip(expected, actual, strict=True):
            np.testing.assert_allclose(one, other, atol=2e-5)
    heads = ["id", "impression", "click", "hour", "slot"]
    content([shard.tables for shard in sharded.shards], tmp_path)
    paths = [tmp_path / f"part-{number}.bin" for number in range(shards)]
    save_snapshot(local, tmp_path / "local.bin")
    local_reader, sharded_reader = SnapshotReader(tmp_path / "local.bin"), SnapshotReader(paths)
    for t in range(2):
        rows, others = (
            np.concatenate(list(local_reader.rows(t))),
            np.concatenate(list(sharded_reader.rows(t))),
        )
        assert rows[heads].tolist() == others[heads].tolist()
        for field in ("vector", "vector_state", "wide", "wide_state"):
            np.testing.assert_allclose(rows[field], others[field], rtol=2e-3, atol=2e-4)
        np.testing.assert_allclose(
            local_reader.tables[t].defaults_S["vector"],
            sharded_reader.tables[t].defaults_S["vector"],
            atol=2e-5,
        )
        assert np.abs(local_reader.tables[t].defaults_S["vector"]).min() > 0
    assert sharded.shards[0].newest_hour >= 400_000
    assert max(shard.newest_hour for shard in sharded.shards) == 400_008


def test_an_id_in_two_parts_is_admitted_by_the_sum_of_impressions() -> None:
    slots = [SlotShape("a", 2)]
    sharded = ShardedTables([Tables(slots, admission=Admission(min_impressions=2)) for _ in range(2)])
    rng = np.random.default_rng(0)
    batch = batch_of(rng, slots, 2, 1)
    batch = batch._replace(
        slots=[SlotIds(np.full(2, 77, dtype=np.uint64))], impressions_B=np.ones(2, dtype=np.uint32)
    )
    inputs_BI, _ = sharded.train(batch, parts=2)
    assert np.abs(inputs_BI).min() > 0  # its own vector; the default row is zero
    assert [shard.tables.report()[0].ids for shard in sharded.shards].count(1) == 1


def test_an_id_belongs_to_the_first_slot_of_any_part() -> None:
    slots = [SlotShape("a", 2), SlotShape("b", 2)]
    local, sharded = Tables(slots), ShardedTables([Tables(slots) for _ in range(2)])
    batch = batch_of(np.random.default_rng(0), slots, 2, 1)
    ids = np.array([[1, 7], [7, 2]], dtype=np.uint64)  # 7: slot b of the first row, slot a of the second
    batch = batch._replace(slots=[SlotIds(ids[0]), SlotIds(ids[1])])
    train_locally(local, batch)
    sharded.train(batch, parts=2)
    by_slot = np.sum([[slot.ids for slot in shard.tables.report()] for shard in sharded.shards], axis=0)
    assert by_slot.tolist() == [slot.ids for slot in local.report()] == [2, 1]


def test_a_repeated_batch_is_trained_but_not_counted_again(tmp_path: Path) -> None:
    first, second, *_ = batches(4, 2)
    local, sharded = tables(), ShardedTables([tables() for _ in range(2)])
    train_locally(local, first)
    sharded.train(first)
    expected = train_locally(local, second)
    _, pending = sharded.begin_lookup(second)
    sharded.find(pending)  # its worker is lost before it pushes
    with pytest.raises(RuntimeError, match="in flight"):
        begin_snapshot(sharded.shards[0].tables)
    pieces, pending = sharded.begin_lookup(second)
    lookups = sharded.find(pending, count=False)
    assert same(expected, sharded.pool(pending, lookups))
    with pytest.raises(RuntimeError, match="between a batch's find and its apply"):
        sharded.shards[1].tables.evict(Eviction())
    sharded.apply(pieces, pending, lookups)
    assert [shard.tables.in_flight for shard in sharded.shards] == [0, 0]
    assert same(content([local], tmp_path), content([shard.tables for shard in sharded.shards], tmp_path))


def test_lookup_changes_nothing(tmp_path: Path) -> None:
    trained, scored = batches(5, 2)
    local, sharded = tables(), ShardedTables([tables() for _ in range(3)])
    train_locally(local, trained)
    sharded.train(trained)
    before = content([shard.tables for shard in sharded.shards], tmp_path)
    hours = [shard.newest_hour for shard in sharded.shards]
    inputs_BI, wide_B = np.empty((60, local.width), np.float32), np.empty(60, np.float32)
    local.gather(scored.slots, inputs_BI, wide_B, train=False)
    pending = sharded.remote.begin_lookup(scored.slots, 60, count=False)
    assert all(request.impressions_N.size == request.slots_N.size == 0 for request in pending.requests)
    replies = [
        as_sent(shard.lookup(as_sent(request)))
        for shard, request in zip(sharded.shards, pending.requests, strict=True)
    ]
    assert any(reply.defaults_N.any() for reply in replies)
    found_BI, found_B = np.empty_like(inputs_BI), np.empty_like(wide_B)
    sharded.remote.pool(pending, replies, found_BI, found_B)
    assert same([inputs_BI, wide_B], [found_BI, found_B])
    assert same(before, content([shard.tables for shard in sharded.shards], tmp_path))
    assert hours == [shard.newest_hour for shard in sharded.shards]


def test_finding_ahead_changes_no_bit(tmp_path: Path) -> None:
    many = batches(6, 5)
    local, sharded = tables(), ShardedTables([tables() for _ in range(2)])
    expected = [train_locally(local, batch) for batch in many]
    ahead = sharded.begin_lookup(many[0])
    ahead_lookups = sharded.find(ahead[1])
    for number, batch in enumerate(many):
        (pieces, pending), lookups = ahead, ahead_lookups
        if number + 1 < len(many):
            ahead = sharded.begin_lookup(many[number + 1])
            ahead_lookups = sharded.find(ahead[1])  # admits ids that are candidates in this batch
        assert same(expected[number], sharded.pool(pending, lookups))
        assert batch.rows == pending[0].rows
        sharded.apply(pieces, pending, lookups)
    assert same(content([local], tmp_path), content([shard.tables for shard in sharded.shards], tmp_path))


def test_rows_of_a_reply_beyond_one_chunk() -> None:
    """More distinct ids of one table and shard than a chunk of the packed view holds."""
    rows = (1 << 18) + 1000
    slots = [SlotShape("a", 1)]
    ids = np.arange(rows, dtype=np.uint64)
    sharded = ShardedTables([Tables(slots) for _ in range(1)])
    pending = sharded.remote.begin_lookup([SlotIds(ids)], rows, count=True)
    lookups = sharded.find([pending])
    inputs_BI, _ = sharded.pool([pending], lookups)
    local = Tables(slots)
    expected_BI, wide_B = np.empty((rows, 1), np.float32), np.empty(rows, np.float32)
    local.gather([SlotIds(ids)], expected_BI, wide_B, train=True)
    assert same([expected_BI], [inputs_BI])


def test_read_only_messages_do_not_recompile_kernels() -> None:
    sharded = ShardedTables([tables() for _ in range(2)])
    batch = batches(7, 1)[0]
    sharded.train(batch)
    kernels: list[Any] = [
        kernel for kernel in vars(packed_messages).values() if hasattr(kernel, "signatures")
    ]
    before = [len(kernel.signatures) for kernel in kernels]
    _, pending = sharded.begin_lookup(batch)
    lookups = [shard.find([pending[0].requests[n]], count=True) for n, shard in enumerate(sharded.shards)]
    replies = [shard.replies(one)[0] for shard, one in zip(sharded.shards, lookups, strict=True)]
    inputs_BI, wide_B = np.empty((60, sharded.width), np.float32), np.empty(60, np.float32)
    sharded.remote.pool(pending[0], replies, inputs_BI, wide_B)
    for shard, one, mine in zip(
        sharded.shards,
        lookups,
        sharded.remote.gradients(pending[0], batch.grad_BI, batch.grad_wide_B),
        strict=True,
    ):
        shard.apply(one, [mine])
    assert len(kernels) >= 9
    assert before == [len(kernel.signatures) for kernel in kernels]


def test_inner_shards_match_the_computed_owner() -> None:
    for of in range(1, 65):
        owned = [h for number in range(of) for h in inner_shards(number, of)]
        assert owned == list(range(64))
        assert all(h * of // 64 == number for number in range(of) for h in inner_shards(number, of))
    for number, of in ((0, 65), (2, 2), (-1, 2), (0, 0)):
        with pytest.raises(ValueError, match="1 to 64 shards"):
            inner_shards(number, of)


def test_invalid_messages_are_rejected_before_anything_is_counted() -> None:
    batch = batches(8, 1)[0]
    sharded = ShardedTables([tables() for _ in range(2)])
    shard = sharded.shards[0]
    _, (pending,) = sharded.begin_lookup(batch)
    request = pending.requests[0]
    wrong = sharded.remote.begin_lookup(batch.slots, batch.rows, count=False).requests[0]
    rejected = [
        (pending.requests[1], "ids of other shards"),
        (wrong, "not as many counts"),
        (request._replace(ids_N=request.ids_N[:-1]), "do not split"),
        (request._replace(slots_N=request.slots_N + np.uint16(9)), "has slot"),
    ]
    for bad_request, message in rejected:
        with pytest.raises(ValueError, match=message):
            shard.find([bad_request], count=True)
    assert shard.tables.size == 0
    assert shard.tables.in_flight == 0
    with pytest.raises(ValueError, match="gradients before pool"):
        sharded.remote.gradients(pending, batch.grad_BI, batch.grad_wide_B)
    lookups = sharded.find([pending])
    replies = [one.replies(mine)[0] for one, mine in zip(sharded.shards, lookups, strict=True)]
    inputs_BI, wide_B = np.empty((60, sharded.width), np.float32), np.empty(60, np.float32)
    for bad, message in (
        (replies[:1], "got 1 replies"),
        (replies[::-1], "reply"),
        ([replies[0]._replace(default_rows=replies[1].default_rows), replies[1]], "default rows"),
        ([replies[0]._replace(rows=replies[0].rows.astype(np.float64)), replies[1]], "float64"),
    ):
        with pytest.raises(ValueError, match=message):
            sharded.remote.pool(pending, bad, inputs_BI, wide_B)
    sharded.remote.pool(pending, replies, inputs_BI, wide_B)
    gradients = sharded.remote.gradients(pending, batch.grad_BI, batch.grad_wide_B)
    with pytest.raises(ValueError, match="gradients of part 0"):
        shard.apply(lookups[0], [gradients[1]])
    with pytest.raises(ValueError, match="gradients of 2 parts"):
        shard.apply(lookups[0], [gradients[0], gradients[0]])
    short = RowGradients(gradients[0].rows, gradients[0].default_rows[1:], gradients[0].defaults_used_S)
    with pytest.raises(ValueError, match="default rows"):
        shard.apply(lookups[0], [short])
    assert shard.tables.in_flight == 1
    shard.apply(lookups[0], [gradients[0]])
    assert shard.tables.in_flight == 0


def test_impressions_beyond_32_bits_are_rejected() -> None:
    remote = RemoteTables([SlotShape("a", 2)], wide=True, shards=2)
    ids = [SlotIds(np.zeros(2, dtype=np.uint64))]
    impressions = np.full(2, 1 << 31, dtype=np.uint32)
    with pytest.raises(ValueError, match="smaller batches"):
        remote.begin_lookup(ids, 2, impressions_B=impressions, count=True)
    pending = remote.begin_lookup(ids, 2, impressions_B=impressions - np.uint32(1), count=True)
    assert sum(int(request.impressions_N.sum()) for request in pending.requests) == 2**32 - 2


def test_a_shard_snapshot_is_consistent_while_training_continues(tmp_path: Path) -> None:
    """A repeated batch also copies rows before it changes them."""
    first, second, third = batches(9, 3)
    sharded, other = ShardedTables([tables()]), ShardedTables([tables()])
    sharded.train(first)
    other.train(first)
    save_snapshot(other.shards[0].tables, tmp_path / "then.bin")
    snapshot = begin_snapshot(sharded.shards[0].tables)
    sharded.train(second)
    _, pending = sharded.begin_lookup(third)
    sharded.find(pending)
    pieces, pending = sharded.begin_lookup(third)
    lookups = sharded.find(pending, count=False)
    sharded.pool(pending, lookups)
    sharded.apply(pieces, pending, lookups)
    snapshot.write(tmp_path / "now.bin")
    assert (tmp_path / "now.bin").read_bytes() == (tmp_path / "then.bin").read_bytes()


def test_only_shard_0_has_default_rows() -> None:
    batch = batches(10, 1)[0]
    sharded = ShardedTables([tables() for _ in range(2)])
    _, pending = sharded.begin_lookup(batch)
    lookups = sharded.find(pending)
    replies = [shard.replies(one)[0] for shard, one in zip(sharded.shards, lookups, strict=True)]
    assert [reply.default_rows.size for reply in replies] == [4 * 5 + 2 * 9, 0]
    sharded.pool(pending, lookups)
    gradients = sharded.remote.gradients(pending[0], batch.grad_BI, batch.grad_wide_B)
    assert [one.default_rows.size for one in gradients] == [4 * 5 + 2 * 9, 0]
    assert gradients[0].defaults_used_S.any()
