"""The parts that a group's workers get of an epoch are together its batches, in order; here without Ray."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from cluster_home import prepared
from hypothesis import given, settings
from hypothesis import strategies as st

from clickline.artifacts.checkpoint import Position
from clickline.artifacts.dataset import Dataset, concat_rows
from clickline.records import LabelledRows
from clickline.storage.storage import Storage
from clickline.training import batches as module
from clickline.training.batches import Batches
from clickline.training.cluster.row_exchange import ExchangeClosed, LocalBatch, RowExchange, row_share


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dataset]:
    folder = prepared(tmp_path_factory.mktemp("exchange"), rows=8_000, shard_size="64KiB")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "WINDOW_ROWS", 1000)
        found = Dataset.current(Storage(), str(folder / ".clickline"))
        assert len(Batches(found, 300, 0).windows(0)) >= 6
        yield found


def batches_of(dataset: Dataset, **options: Any) -> Batches:
    return Batches(dataset, **{"batch_size": 300, "seed": 4, **options})


def group(batches: Batches, start: Position, size: int) -> list[RowExchange]:
    """All members of a group, which hand each other rows at once."""
    made: list[RowExchange] = []
    ready = threading.Event()

    def sender(rank: int) -> Callable[[int, int, int, LabelledRows], None]:
        def send(member: int, number: int, total: int, rows: LabelledRows) -> None:
            assert member != rank, (
                "a member's own rows are not sent: it may read before it is known to anybody"
            )
            assert ready.wait(10)
            made[member].receive(number, total, rows)

        return send

    made += [RowExchange(batches, start, rank, size, sender(rank)) for rank in range(size)]
    ready.set()
    return made


def dealt(batches: Batches, start: Position, size: int) -> list[list[LocalBatch]]:
    """The portions of every member."""
    members = group(batches, start, size)
    found: list[list[LocalBatch]] = [[] for _ in members]

    def take(rank: int) -> None:
        found[rank] += members[rank].local_batches()

    threads = [threading.Thread(target=take, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return found


def lines(rows: LabelledRows) -> list[bytes]:
    """Each row's content."""
    table = np.stack([slot.ids_N for slot in rows.encoded.slots], axis=1)
    return [
        one.tobytes() + bytes([int(click)])
        for one, click in zip(np.ascontiguousarray(table), rows.click_B, strict=True)
    ]


def assert_dealt(batches: Batches, start: Position, size: int) -> list[int]:
    """The portions are the epoch's batches; returns how many rows each batch has."""
    expected = list(batches.epoch(start))
    found = dealt(batches, start, size)
    assert [len(mine) for mine in found] == [len(expected)] * size
    before = start
    for (rows, after), *portions in zip(expected, *found, strict=True):
        assert {portion.total_rows for portion in portions} == {rows.rows}
        assert {portion.after for portion in portions} == {after}
        assert {portion.position for portion in portions} == {before}
        assert lines(concat_rows([portion.rows for portion in portions])) == lines(rows)
        shares = [portion.rows.rows for portion in portions]
        assert max(shares) - min(shares) <= 1
        before = after
    return [rows.rows for rows, _ in expected]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"held_out": 0.3},
    {"negative_sampling": 0.2},
    {"time_ordered": True},
    {"batch_size": 3, "held_out": 0.9},  # fewer rows than members
    {"held_out": 0.2, "negative_sampling": 0.5, "batch_size": 97},
]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_local_batches_of_all_ranks_are_the_batches_in_order(
    dataset: Dataset, options: dict[str, Any], size: int
) -> None:
    assert sum(assert_dealt(batches_of(dataset, **options), Position(1), size)) > 500


@pytest.mark.parametrize("size", [1, 3, 4])
def test_windows_without_rows_are_empty_batches_for_all_ranks(dataset: Dataset, size: int) -> None:
    sizes = assert_dealt(batches_of(dataset, held_out=0.9995), Position(), size)
    assert 0 in sizes
    assert any(0 < rows < 4 for rows in sizes)  # and some members have none of a batch that has rows


@settings(max_examples=10)
@given(st.data(), st.integers(1, 4))
def test_exchange_starts_at_any_position(dataset: Dataset, data: st.DataObject, size: int) -> None:
    batches = batches_of(dataset, batch_size=data.draw(st.sampled_from([130, 300, 999])))
    epoch = data.draw(st.integers(0, 3))
    places = [Position(epoch), *(after for _, after in batches.epoch(Position(epoch)))][:-1]
    assert_dealt(batches, data.draw(st.sampled_from(places)), size)


class Observation(Batches):
    """Tells of every window that is read, at that moment."""

    on_read: Callable[[int], None]

    def read_window(self, epoch: int, number: int) -> LabelledRows:
        self.on_read(number)
        return super().read_window(epoch, number)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_no_rank_reads_more_than_a_round_ahead(dataset: Dataset, size: int) -> None:
    """A slow group: how far ahead of it each window was when it was read."""
    seen = Observation(dataset, 300, 4)
    at = 0
    ahead: list[int] = []
    seen.on_read = lambda number: ahead.append(number - at)
    members = group(seen, Position(), size)
    for portions in zip(*(member.local_batches() for member in members), strict=True):
        at = portions[0].position.window
    windows = len(seen.windows(0))
    assert len(ahead) == windows  # each by one member
    assert max(ahead) <= size + 1  # `at` is told when the group is there, one window after it may read on
    assert max(ahead) >= 1 and windows > size + 2  # it does read ahead, and would have had more to read


def test_reader_error_is_raised_where_the_window_is_awaited(dataset: Dataset) -> None:
    seen = Observation(dataset, 300, 4)

    def fail(number: int) -> None:
        if number == 2:
            raise OSError("the disk is gone")

    seen.on_read = fail
    (alone,) = group(seen, Position(), 1)
    found: list[LocalBatch] = []
    with pytest.raises(OSError, match="the disk is gone"):
        found.extend(alone.local_batches())
    assert {portion.position.window for portion in found} <= {0, 1}  # told as soon as it is known


def test_close_wakes_a_rank_that_waits_for_a_window(dataset: Dataset) -> None:
    def send(member: int, number: int, total: int, rows: LabelledRows) -> None:
        pass  # the other member is lost: nothing comes from it, and nothing arrives

    exchange = RowExchange(batches_of(dataset), Position(), 1, 2, send)
    ended: list[BaseException] = []

    def take() -> None:
        try:
            next(exchange.local_batches())
        except ExchangeClosed as error:
            ended.append(error)

    waiting = threading.Thread(target=take)
    waiting.start()
    exchange.close()
    waiting.join(10)
    assert not waiting.is_alive()
    assert len(ended) == 1


def test_ranks_may_be_slow_in_turn(dataset: Dataset) -> None:
    """One is a whole window ahead of the other, and nobody waits for ever."""
    batches = batches_of(dataset)
    first, second = group(batches, Position(), 2)
    expected = [after for _, after in batches.epoch(Position())]
    fast, slow = first.local_batches(), second.local_batches()
    taken: dict[str, list[Position]] = {"fast": [], "slow": []}
    for portion in fast:
        taken["fast"].append(portion.after)
        behind = len(taken["fast"]) - len(taken["slow"])
        if behind == 4:  # more than a window's batches
            taken["slow"] += [next(slow).after for _ in range(behind)]
    taken["slow"] += [portion.after for portion in slow]
    assert taken["fast"] == taken["slow"] == expected


def test_only_the_reader_of_the_awaited_window_blocks_the_group(dataset: Dataset) -> None:
    go_on = threading.Event()
    reads = threading.Semaphore(0)

    class Held(Batches):
        def read_window(self, epoch: int, window: int) -> LabelledRows:
            reads.release()
            assert go_on.wait(10)
            return super().read_window(epoch, window)

    held = Held(dataset, batch_size=300, seed=4)
    first, second = group(held, Position(0, 0, 0), 2)
    for _ in range(2):
        assert reads.acquire(timeout=10)
    assert first.blocks_group  # all need window 0 now
    assert not second.blocks_group  # it reads window 1
    go_on.set()
    for member in (first, second):
        member.close()


def test_rows_that_could_not_be_sent_are_an_error_where_they_are_awaited(dataset: Dataset) -> None:
    batches = batches_of(dataset)
    receiver = RowExchange(batches, Position(), 1, 2, lambda *_: None)
    receiver.receive(0, 0, MemoryError("no room for a window"))
    with pytest.raises(MemoryError, match="no room for a window"):
        next(receiver.local_batches())
    receiver.close()


@pytest.mark.parametrize(
    ("rows", "of", "expected"),
    [(8, 2, [4, 4]), (7, 3, [2, 2, 3]), (2, 4, [0, 1, 0, 1]), (0, 2, [0, 0]), (5, 1, [5])],
)
def test_batch_is_split_evenly(rows: int, of: int, expected: list[int]) -> None:
    assert [len(range(rows)[row_share(rows, worker, of)]) for worker in range(of)] == expected


@given(st.integers(0, 10_000), st.integers(1, 64))
def test_shares_are_contiguous_cover_the_batch_and_differ_by_one_row(rows: int, of: int) -> None:
    shares = [range(rows)[row_share(rows, worker, of)] for worker in range(of)]
    assert [row for one in shares for row in one] == list(range(rows))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
