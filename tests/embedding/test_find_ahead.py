"""Finding ahead in another thread, also while a snapshot is written, changes no bit."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from clickline.embedding import (
    Admission,
    BatchLookup,
    Eviction,
    SlotShape,
    Tables,
    begin_snapshot,
    save_snapshot,
)
from clickline.records import SlotIds

SLOTS = [SlotShape("a", 9), SlotShape("b", 4, "mean"), SlotShape("c", 9, "max"), SlotShape("d", 4)]
ADMISSIONS = {"all": Admission(), "third impression": Admission(3), "by chance": Admission(2, 0.4)}


@dataclass(frozen=True)
class Batch:
    slots: Sequence[SlotIds]
    impressions_B: np.ndarray
    clicks_B: np.ndarray
    hours_B: np.ndarray

    @property
    def rows(self) -> int:
        return self.impressions_B.size


def make_batches(count: int, rows: int, vocabulary: int) -> list[Batch]:
    """Ids that recur in later batches; slots b and c have several per row, possibly the same id twice."""
    rng = np.random.default_rng(11)
    result = []
    for n in range(count):
        slots = []
        for s in range(len(SLOTS)):
            offsets = None
            size = rows
            if s in (1, 2):
                offsets = np.concatenate([[0], np.cumsum(rng.integers(0, 4, rows))]).astype(np.int64)
                size = int(offsets[-1])
            drawn = (vocabulary * rng.random(size) ** 2).astype(np.uint64)  # some often, many rarely
            slots.append(SlotIds(drawn * np.uint64(64) + np.uint64(s), offsets))
        impressions, clicks = rng.integers(1, 3, rows), rng.integers(0, 2, rows)
        result.append(Batch(slots, impressions.astype(np.uint32), clicks.astype(np.uint32), np.full(rows, n, np.int32)))  # fmt: skip
    return result


def find(tables: Tables, batch: Batch) -> BatchLookup:
    return tables.find(
        batch.slots,
        batch.rows,
        impressions_B=batch.impressions_B,
        clicks_B=batch.clicks_B,
        hours_B=batch.hours_B,
        train=True,
    )


def train(tables: Tables, lookup: BatchLookup) -> bytes:
    """Pool, "the network", apply. Gradients depend on the pooled inputs, so that a wrong bit propagates."""
    inputs, wide = np.empty((lookup.rows, tables.width), np.float32), np.empty(lookup.rows, np.float32)
    tables.pool(lookup, inputs, wide)
    pooled = inputs.tobytes() + wide.tobytes()
    tables.apply(lookup, np.sin(37 * inputs) + wide[:, None], wide + inputs.sum(axis=1))
    return pooled


def make_tables(admission: Admission, threads: int = 1) -> Tables:
    return Tables(SLOTS, seed=3, init_scale=0.5, admission=admission, threads=threads)


def content(tables: Tables, folder: Path) -> bytes:
    save_snapshot(tables, folder / "content")
    return (folder / "content").read_bytes()


def found_ahead(tables: Tables, batches: Sequence[Batch]) -> Iterator[BatchLookup]:
    """Lookups from a thread that finds as far ahead as it can, whatever the other threads do."""
    ready: queue.Queue[BatchLookup] = queue.Queue()
    finder = threading.Thread(target=lambda: [ready.put(find(tables, batch)) for batch in batches])
    finder.start()
    for _ in batches:
        yield ready.get(timeout=60)
    finder.join()


@pytest.mark.parametrize("admission", ADMISSIONS.values(), ids=list(ADMISSIONS))
@pytest.mark.parametrize("writing", [False, True], ids=["alone", "beside a snapshot"])
def test_finding_as_far_ahead_as_possible_changes_no_bit(
    admission: Admission, writing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = make_batches(60, 150, 2500)
    plain, tables = make_tables(admission), make_tables(admission, threads=2)
    want = [train(plain, find(plain, batch)) for batch in batches[:20]]
    expected_snapshot = content(plain, tmp_path)
    want += [train(plain, find(plain, batch)) for batch in batches[20:]]

    got = [train(tables, lookup) for lookup in found_ahead(tables, batches[:20])]
    writer = None
    if writing:
        monkeypatch.setattr("clickline.embedding.table._SLICE_ROWS", 5)  # many slices of few rows
        snapshot = begin_snapshot(tables, share=0.2)
        writer = threading.Thread(target=snapshot.write, args=(tmp_path / "beside",))
        writer.start()
    got += [train(tables, lookup) for lookup in found_ahead(tables, batches[20:])]
    if writer is not None:
        writer.join()
        assert (tmp_path / "beside").read_bytes() == expected_snapshot
    assert got == want
    assert content(tables, tmp_path) == content(plain, tmp_path)
    assert tables.report() == plain.report()


def test_an_id_admitted_ahead_is_still_a_candidate_for_the_batch_before() -> None:
    """Batch 0 has the id twice; finding batch 1 before batch 0 is pooled and applied admits it."""
    ids = [SlotIds(np.array([7, 7], np.uint64))]
    inputs, wide = np.empty((2, 3), np.float32), np.empty(2, np.float32)
    results = []
    for ahead in (False, True):
        tables = Tables([SlotShape("a", 3)], init_scale=0.5, admission=Admission(3))
        first = tables.find(ids, 2, train=True)
        second = tables.find(ids, 2, train=True) if ahead else None
        tables.pool(first, inputs, wide)
        assert not inputs.any()  # the default row starts at zero
        tables.apply(first, np.ones_like(inputs), np.ones_like(wide))
        second = second or tables.find(ids, 2, train=True)
        tables.pool(second, inputs, wide)
        own = inputs.copy()
        tables.apply(second, np.ones_like(inputs), np.ones_like(wide))
        tables.gather([SlotIds(np.array([7, 999], np.uint64))], inputs, wide, train=False)
        results.append((own, inputs.copy()))
        assert own.all()
    np.testing.assert_array_equal(results[0], results[1])
    own, (trained, default) = results[1][0][0], results[1][1]
    assert (trained < own).all() and (default < 0).all()  # batch 1 trained the id, batch 0 the default row


def test_a_trainer_finds_ahead_except_before_a_checkpoint(tmp_path: Path) -> None:
    batches = make_batches(30, 100, 1500)
    plain, tables = make_tables(Admission(2)), make_tables(Admission(2), threads=2)
    cuts = {9, 10, 22}
    want = {}
    for n, batch in enumerate(batches):
        train(plain, find(plain, batch))
        if n in cuts:
            want[n] = content(plain, tmp_path)
    ahead: Future[BatchLookup] | None = None
    got = {}
    with ThreadPoolExecutor(1) as finder:
        for n, batch in enumerate(batches):
            lookup = ahead.result() if ahead else find(tables, batch)
            ahead = None
            if n not in cuts and n + 1 < len(batches):
                ahead = finder.submit(find, tables, batches[n + 1])
            train(tables, lookup)
            if n in cuts:
                got[n] = content(tables, tmp_path)
    assert got == want
    assert content(tables, tmp_path) == content(plain, tmp_path)


@pytest.mark.parametrize(
    "act",
    [lambda t: begin_snapshot(t), lambda t: t.evict(Eviction()), lambda t: t.decay(0.5)],
    ids=["snapshot", "evict", "decay"],
)
def test_snapshot_evict_and_decay_fail_while_a_batch_is_in_flight(
    act: Callable[[Tables], object],
) -> None:
    tables = make_tables(Admission())
    batches = make_batches(2, 20, 50)
    first, second = find(tables, batches[0]), find(tables, batches[1])
    train(tables, first)
    with pytest.raises(RuntimeError, match=r"find and its apply|in flight"):
        act(tables)
    train(tables, second)
    act(tables)
