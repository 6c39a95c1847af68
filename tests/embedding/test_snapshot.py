"""Snapshots: what is loaded is what was there, whole or by deltas, and damage is noticed."""

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
    freeze,
    load,
    save,
)
from clickline.errors import ArtifactError
from clickline.records import SlotIds

SLOTS = [SlotShape("a", 9), SlotShape("b", 4, "mean"), SlotShape("c", 9)]


def make(**settings):  # type: ignore[no-untyped-def]
    return Tables(SLOTS, **{"seed": 3, "admission": Admission(2), **settings})


def content(tables: Tables, folder: Path) -> bytes:
    return (save(tables, folder / "content"), (folder / "content").read_bytes())[1]


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=list(OPTIMIZERS))
@pytest.mark.parametrize("wide", [True, False], ids=["wide", "no wide"])
def test_training_goes_on_from_a_snapshot_as_if_nothing_happened(
    optimizer, wide, train, draw_ids, tmp_path
) -> None:  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(1)
    batches = [draw_ids(rng, 3, 200, 500) for _ in range(8)]
    rules = {"embedding_optimizer": optimizer(), "wide_optimizer": optimizer() if wide else None}
    undisturbed = make(**rules)
    for n, batch in enumerate(batches):
        train(undisturbed, batch, n)
    first = make(**rules)
    for n in range(4):
        train(first, batches[n], n)
    save(first, tmp_path / "cut")
    second = make(**rules, threads=2)
    load(second, tmp_path / "cut")
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
def test_a_chain_of_deltas_equals_the_whole(data, train, draw_ids, tmp_path_factory) -> None:  # type: ignore[no-untyped-def]
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
        snapshot = freeze(tables, since)
        snapshot.write(folder / f"{link}")
        since = snapshot.mark
        load(replica, folder / f"{link}")
    assert content(replica, folder) == content(tables, folder)
    assert replica.report() == tables.report()


def test_a_delta_holds_only_what_was_touched(train, draw_ids, tmp_path) -> None:  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(1)
    tables = make(admission=Admission())
    for n in range(20):
        train(tables, draw_ids(rng, 3, 500, 5000), n)
    base = freeze(tables)
    whole = base.write(tmp_path / "base")
    train(tables, draw_ids(rng, 3, 50, 5000), 99)
    delta = save(tables, tmp_path / "delta", since=base.mark)
    assert whole.rows > 5000 and 100 < delta.rows <= 150 and delta.tombstones == 0
    assert delta.size < whole.size / 20 and delta.size == (tmp_path / "delta").stat().st_size


def test_a_snapshot_written_while_training_goes_on_is_of_its_moment(train, draw_ids, tmp_path) -> None:  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(1)
    tables = make()
    batches = [draw_ids(rng, 3, 300, 3000) for _ in range(30)]
    for n in range(10):
        train(tables, batches[n], n)
    still = make()
    for n in range(10):
        train(still, batches[n], n)
    want = content(still, tmp_path)
    snapshot = freeze(tables)
    writer = threading.Thread(target=snapshot.write, args=(tmp_path / "moving",))
    train(tables, batches[10], 10)  # before the first shard is copied
    writer.start()
    for n in range(11, 30):
        train(tables, batches[n], n)
    writer.join()
    assert (tmp_path / "moving").read_bytes() == want
    undisturbed = make()
    for n, batch in enumerate(batches):
        train(undisturbed, batch, n)
    assert content(tables, tmp_path) == content(undisturbed, tmp_path)


def test_a_delta_written_while_training_goes_on_is_of_its_moment(train, draw_ids, tmp_path) -> None:  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(1)
    tables, still = make(), make()
    batches = [draw_ids(rng, 3, 300, 1000) for _ in range(12)]
    written = []
    for one in (tables, still):
        for n in range(5):
            train(one, batches[n], n)
        base = freeze(one)
        base.write(tmp_path / "base")
        for n in range(5, 8):
            train(one, batches[n], n)
        delta = freeze(one, since=base.mark)
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
    save(tables, tmp_path / "tables")
    return tmp_path / "tables"


@pytest.mark.parametrize("place", [0, 5, 0.3, 0.7, -1, -20], ids=str)
def test_a_changed_byte_is_noticed(written: Path, place: float) -> None:
    payload = bytearray(written.read_bytes())
    payload[int(place * len(payload)) if 0 < place < 1 else int(place)] ^= 1
    written.write_bytes(payload)
    tables = make()
    with pytest.raises(ArtifactError, match="torn or was changed"):
        load(tables, written)
    assert tables.size == 0


@pytest.mark.parametrize("left", [0, 10, 32, 0.5, -1], ids=str)
def test_a_torn_file_is_noticed(written: Path, left: float) -> None:
    payload = written.read_bytes()
    written.write_bytes(payload[: int(left * len(payload)) if 0 < left < 1 else int(left)])
    with pytest.raises(ArtifactError, match="torn or was changed"):
        load(make(), written)


def test_an_absent_file_is_an_artifact_error(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="cannot be read"):
        load(make(), tmp_path / "nothing")


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda: make(embedding_optimizer=Sgd()), "embedding_optimizer adagrad, the model has sgd"),
        (lambda: make(wide_optimizer=None), "wide_optimizer ftrl, the model has None"),
        (lambda: Tables(SLOTS[:2]), "slots"),
    ],
)
def test_tables_of_another_model_are_refused(written: Path, other, words) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ArtifactError, match=words):
        load(other(), written)


def test_a_delta_of_another_base_is_refused(train, draw_ids, tmp_path) -> None:  # type: ignore[no-untyped-def]
    tables = make()
    train(tables, draw_ids(np.random.default_rng(0), 3, 100, 200), 0)
    base = freeze(tables)
    base.write(tmp_path / "base")
    train(tables, draw_ids(np.random.default_rng(1), 3, 100, 200), 1)
    middle = freeze(tables, since=base.mark)
    middle.write(tmp_path / "middle")
    train(tables, draw_ids(np.random.default_rng(2), 3, 100, 200), 2)
    save(tables, tmp_path / "last", since=middle.mark)
    replica = make()
    load(replica, tmp_path / "base")
    with pytest.raises(ArtifactError, match=r"is a delta of snapshot .* Load the whole snapshot first"):
        load(replica, tmp_path / "last")
    load(replica, tmp_path / "middle")
    load(replica, tmp_path / "last")
    assert content(replica, tmp_path) == content(tables, tmp_path)


def test_a_cut_between_find_and_apply_is_refused(draw_ids, tmp_path) -> None:  # type: ignore[no-untyped-def]
    tables = make()
    tables.find(draw_ids(np.random.default_rng(0), 3, 10, 20), 10, train=True)
    with pytest.raises(RuntimeError, match="found and not applied"):
        freeze(tables)


def test_one_snapshot_at_a_time_and_no_eviction_under_it(train, draw_ids, tmp_path) -> None:  # type: ignore[no-untyped-def]
    tables = make()
    train(tables, draw_ids(np.random.default_rng(0), 3, 100, 200), 0)
    snapshot = freeze(tables)
    for forbidden in (lambda: freeze(tables), lambda: tables.decay(0.5), lambda: tables.evict(Eviction())):
        with pytest.raises(RuntimeError, match="while a snapshot is being written"):
            forbidden()
    snapshot.close()
    tables.decay(0.5)
    with pytest.raises(ValueError, match="no snapshot with mark"):
        freeze(tables, since=snapshot.mark)


def test_a_failed_write_leaves_the_tables_usable(train, draw_ids, tmp_path) -> None:  # type: ignore[no-untyped-def]
    tables = make()
    train(tables, draw_ids(np.random.default_rng(0), 3, 100, 200), 0)
    with pytest.raises(FileNotFoundError):
        save(tables, tmp_path / "no folder" / "tables")
    save(tables, tmp_path / "tables")
    load(make(), tmp_path / "tables")


def test_old_tombstones_are_dropped_on_request(train, draw_ids, tmp_path) -> None:  # type: ignore[no-untyped-def]
    tables = make()
    train(tables, draw_ids(np.random.default_rng(0), 3, 100, 200), 0)
    first = freeze(tables)
    first.write(tmp_path / "first")
    tables.evict(Eviction(threshold=1e9))
    second = freeze(tables, since=first.mark)
    assert second.write(tmp_path / "second").tombstones > 0
    tables.forget_before(second.mark)
    assert not tables.tombstones
    with pytest.raises(ValueError, match="no snapshot with mark"):
        freeze(tables, since=first.mark)
    assert save(tables, tmp_path / "third", since=second.mark).tombstones == 0
