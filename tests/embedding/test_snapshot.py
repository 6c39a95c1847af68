"""Snapshots: full ones and deltas restore the exact content, and damage is detected."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clickline.embedding import (
    OPTIMIZERS,
    Admission,
    Eviction,
    Sgd,
    SlotShape,
    Tables,
    begin_snapshot,
    load_snapshot,
    save_snapshot,
)
from clickline.errors import ArtifactError
from clickline.records import SlotIds

SLOTS = [SlotShape("a", 9), SlotShape("b", 4, "mean"), SlotShape("c", 9)]


def make(**settings):  # type: ignore[no-untyped-def]
    return Tables(SLOTS, **{"seed": 3, "admission": Admission(2), **settings})


def content(tables: Tables, folder: Path) -> bytes:
    return (save_snapshot(tables, folder / "content"), (folder / "content").read_bytes())[1]


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=list(OPTIMIZERS))
@pytest.mark.parametrize("wide", [True, False], ids=["wide", "no wide"])
def test_training_resumes_exactly_from_a_snapshot(optimizer, wide, train, draw_ids, tmp_path) -> None:  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(1)
    batches = [draw_ids(rng, 3, 200, 500) for _ in range(8)]
    rules = {"embedding_optimizer": optimizer(), "wide_optimizer": optimizer() if wide else None}
    undisturbed = make(**rules)
    for n, batch in enumerate(batches):
        train(undisturbed, batch, n)
    first = make(**rules)
    for n in range(4):
        train(first, batches[n], n)
    save_snapshot(first, tmp_path / "snapshot")
    second = make(**rules, threads=2)
    load_snapshot(second, tmp_path / "snapshot")
    for n in range(4, 8):
        train(second, batches[n], n)
    assert content(second, tmp_path) == content(undisturbed, tmp_path)
    assert second.report() == undisturbed.report()


def test_the_same_content_gives_the_same_bytes_in_any_order(tmp_path: Path) -> None:
    ids = np.arange(1, 30_000, dtype=np.uint64) * np.uint64(0xD1342543DE82EF95)
    written = []
    for order, pieces in ((ids, 3), (ids[::-1], 40), (np.random.default_rng(1).permutation(ids), 7)):
        tables = Tables([SlotShape("a", 3)])
        for piece in np.array_split(order, pieces):
            tables.find([SlotIds(piece)], piece.size, train=True)
        tables.in_flight = 0
        written.append(content(tables, tmp_path))
    assert written[0] == written[1] == written[2]


@pytest.mark.slow
@settings(max_examples=40)
@given(data=st.data())
def test_a_chain_of_deltas_equals_the_full_snapshot(data, train, draw_ids, tmp_path_factory) -> None:  # type: ignore[no-untyped-def]
    folder = tmp_path_factory.mktemp("chain")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    tables = make(threads=2)
    replica = make()
    since = None
    for link in range(data.draw(st.integers(1, 4))):
        for step in range(data.draw(st.integers(0, 4))):
            what = data.draw(st.sampled_from(["train", "train", "decay", "evict"]))
            if what == "train":
                train(tables, draw_ids(rng, 3, 50, 100), 10 * link + step)
            elif what == "decay":
                tables.decay(0.7)
            else:
                tables.evict(Eviction(threshold=data.draw(st.floats(0.0, 2.0))), now_hour=0)
        snapshot = begin_snapshot(tables, since)
        snapshot.write(folder / f"{link}")
        since = snapshot.generation
        load_snapshot(replica, folder / f"{link}")
    assert content(replica, folder) == content(tables, folder)
    assert replica.report() == tables.report()


def test_a_delta_holds_only_changed_rows(train, draw_ids, tmp_path) -> None:  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(1)
    tables = make(admission=Admission())
    for n in range(20):
        train(tables, draw_ids(rng, 3, 500, 5000), n)
    base = begin_snapshot(tables)
    full = base.write(tmp_path / "base")
    train(tables, draw_ids(rng, 3, 50, 5000), 99)
    delta = save_snapshot(tables, tmp_path / "delta", since=base.generation)
    assert full.rows > 5000 and 100 < delta.rows <= 150 and delta.tombstones == 0
    assert delta.size < full.size / 20 and delta.size == (tmp_path / "delta").stat().st_size


def test_a_snapshot_is_consistent_while_training_continues(train, draw_ids, tmp_path) -> None:  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(1)
    tables = make()
    batches = [draw_ids(rng, 3, 300, 3000) for _ in range(30)]
    for n in range(10):
        train(tables, batches[n], n)
    still = make()
    for n in range(10):
        train(still, batches[n], n)
    want = content(still, tmp_path)
    snapshot = begin_snapshot(tables)
    writer = threading.Thread(target=snapshot.write, args=(tmp_path / "moving",))
    train(tables, batches[10], 10)  # before the first shard is written
    writer.start()
    for n in range(11, 30):
        train(tables, batches[n], n)
    writer.join()
    assert (tmp_path / "moving").read_bytes() == want
    undisturbed = make()
    for n, batch in enumerate(batches):
        train(undisturbed, batch, n)
    assert content(tables, tmp_path) == content(undisturbed, tmp_path)


def test_a_delta_is_consistent_while_training_continues(train, draw_ids, tmp_path) -> None:  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(1)
    tables, still = make(), make()
    batches = [draw_ids(rng, 3, 300, 1000) for _ in range(12)]
    written = []
    for one in (tables, still):
        for n in range(5):
            train(one, batches[n], n)
        base = begin_snapshot(one)
        base.write(tmp_path / "base")
        for n in range(5, 8):
            train(one, batches[n], n)
        delta = begin_snapshot(one, since=base.generation)
        if one is tables:
            for n in range(8, 12):
                train(one, batches[n], n)
        delta.write(tmp_path / "delta")
        written.append((tmp_path / "delta").read_bytes())
    assert written[0] == written[1]


@pytest.fixture
def written(train, draw_ids, tmp_path) -> Path:  # type: ignore[no-untyped-def]
    tables = make()
    for n in range(3):
        train(tables, draw_ids(np.random.default_rng(n), 3, 100, 200), n)
    save_snapshot(tables, tmp_path / "tables")
    return tmp_path / "tables"


@pytest.mark.parametrize("position", [0, 5, 0.3, 0.7, -1, -20], ids=str)
def test_a_changed_byte_is_detected(written: Path, position: float) -> None:
    payload = bytearray(written.read_bytes())
    payload[int(position * len(payload)) if 0 < position < 1 else int(position)] ^= 1
    written.write_bytes(payload)
    tables = make()
    with pytest.raises(ArtifactError, match="is damaged"):
        load_snapshot(tables, written)
    assert tables.size == 0


@pytest.mark.parametrize("length", [0, 10, 32, 0.5, -1], ids=str)
def test_a_truncated_file_is_detected(written: Path, length: float) -> None:
    payload = written.read_bytes()
    written.write_bytes(payload[: int(length * len(payload)) if 0 < length < 1 else int(length)])
    with pytest.raises(ArtifactError, match="is damaged"):
        load_snapshot(make(), written)


def test_a_missing_file_is_an_artifact_error(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="cannot be read"):
        load_snapshot(make(), tmp_path / "nothing")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: make(embedding_optimizer=Sgd()), "embedding_optimizer adagrad, the model has sgd"),
        (lambda: make(wide_optimizer=None), "wide_optimizer ftrl, the model has None"),
        (lambda: Tables(SLOTS[:2]), "slots"),
    ],
)
def test_tables_of_another_model_are_rejected(written: Path, other, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ArtifactError, match=message):
        load_snapshot(other(), written)


def test_a_delta_to_another_base_is_rejected(train, draw_ids, tmp_path) -> None:  # type: ignore[no-untyped-def]
    tables = make()
    train(tables, draw_ids(np.random.default_rng(0), 3, 100, 200), 0)
    base = begin_snapshot(tables)
    base.write(tmp_path / "base")
    train(tables, draw_ids(np.random.default_rng(1), 3, 100, 200), 1)
    middle = begin_snapshot(tables, since=base.generation)
    middle.write(tmp_path / "middle")
    train(tables, draw_ids(np.random.default_rng(2), 3, 100, 200), 2)
    save_snapshot(tables, tmp_path / "last", since=middle.generation)
    replica = make()
    load_snapshot(replica, tmp_path / "base")
    with pytest.raises(ArtifactError, match=r"is a delta to snapshot .* Load the full snapshot first"):
        load_snapshot(replica, tmp_path / "last")
    load_snapshot(replica, tmp_path / "middle")
    load_snapshot(replica, tmp_path / "last")
    assert content(replica, tmp_path) == content(tables, tmp_path)


def test_a_snapshot_between_find_and_apply_fails(draw_ids, tmp_path) -> None:  # type: ignore[no-untyped-def]
    tables = make()
    tables.find(draw_ids(np.random.default_rng(0), 3, 10, 20), 10, train=True)
    with pytest.raises(RuntimeError, match="in flight"):
        begin_snapshot(tables)


def test_no_second_snapshot_and_no_eviction_during_a_snapshot(train, draw_ids, tmp_path) -> None:  # type: ignore[no-untyped-def]
    tables = make()
    train(tables, draw_ids(np.random.default_rng(0), 3, 100, 200), 0)
    snapshot = begin_snapshot(tables)
    for forbidden in (
        lambda: begin_snapshot(tables),
        lambda: tables.decay(0.5),
        lambda: tables.evict(Eviction()),
    ):
        with pytest.raises(RuntimeError, match="while a snapshot is being written"):
            forbidden()
    snapshot.close()
    tables.decay(0.5)
    with pytest.raises(ValueError, match="no snapshot of generation"):
        begin_snapshot(tables, since=snapshot.generation)


def test_a_failed_write_leaves_the_tables_usable(train, draw_ids, tmp_path) -> None:  # type: ignore[no-untyped-def]
    tables = make()
    train(tables, draw_ids(np.random.default_rng(0), 3, 100, 200), 0)
    with pytest.raises(FileNotFoundError):
        save_snapshot(tables, tmp_path / "no folder" / "tables")
    save_snapshot(tables, tmp_path / "tables")
    load_snapshot(make(), tmp_path / "tables")


def test_drop_history_before_drops_old_tombstones(train, draw_ids, tmp_path) -> None:  # type: ignore[no-untyped-def]
    tables = make()
    train(tables, draw_ids(np.random.default_rng(0), 3, 100, 200), 0)
    first = begin_snapshot(tables)
    first.write(tmp_path / "first")
    tables.evict(Eviction(threshold=1e9))
    second = begin_snapshot(tables, since=first.generation)
    assert second.write(tmp_path / "second").tombstones > 0
    tables.drop_history_before(second.generation)
    assert not tables.tombstones
    with pytest.raises(ValueError, match="no snapshot of generation"):
        begin_snapshot(tables, since=first.generation)
    assert save_snapshot(tables, tmp_path / "third", since=second.generation).tombstones == 0
