"""An embedding server applies every batch once, in order, however often and by which worker it is sent; without Ray."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from clickline.embedding import AdaGrad, Eviction, Ftrl, LookupReply, PendingLookup, RemoteTables, SlotShape
from clickline.embedding.snapshot import SnapshotReader
from clickline.errors import Fenced
from clickline.records import SlotIds
from clickline.training.cluster.embedding_server import (
    EmbeddingServer,
    PartKey,
    merge_reports,
)

SLOTS = (SlotShape("a", 2), SlotShape("b", 2))
TABLES: dict[str, Any] = {
    "slots": SLOTS,
    "embedding_optimizer": AdaGrad(0.1),
    "wide_optimizer": Ftrl(),
    "seed": 1,
}
STREAM = 7


class Quiet:
    """No log: a shard keeps its file open as long as its process lives."""

    def __init__(self, path: Path) -> None:
        pass

    def write(self, message: str) -> None:
        pass


@pytest.fixture(autouse=True)
def without_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clickline.training.cluster.embedding_server.RoleLog", Quiet)


class Rows(NamedTuple):
    """A batch: ids by slot, clicks."""

    ids_SB: NDArray[np.uint64]
    clicks_B: NDArray[np.uint32]

    def part(self, part: int, parts: int) -> Rows:
        rows = self.ids_SB.shape[1]
        mine = slice(rows * part // parts, rows * (part + 1) // parts)
        return Rows(self.ids_SB[:, mine], self.clicks_B[mine])


def batches(seed: int, count: int, rows: int = 12, vocabulary: int = 20) -> list[Rows]:
    rng = np.random.default_rng(seed)
    first = np.array([[0], [1000]], dtype=np.uint64)
    return [
        Rows(
            rng.integers(0, vocabulary, (2, rows)).astype(np.uint64) + first,
            rng.integers(0, 2, rows).astype(np.uint32),
        )
        for _ in range(count)
    ]


class Sender:
    """One worker's part of a batch, on its way through all shards."""

    def __init__(
        self, shards: Sequence[EmbeddingServer], rows: Rows, sequence: int, token: int, part: int, parts: int
    ) -> None:
        self.place = PartKey(STREAM, token, sequence, part, parts)
        self._shards = shards
        self._rows = rows.part(part, parts)
        self._tables = RemoteTables(SLOTS, wide=True, shards=len(shards), threads=1)
        self.asked: PendingLookup = self._tables.begin_lookup(
            [SlotIds(ids_B) for ids_B in self._rows.ids_SB],
            len(self._rows.clicks_B),
            impressions_B=np.ones_like(self._rows.clicks_B),
            clicks_B=self._rows.clicks_B,
            hours_B=np.full(len(self._rows.clicks_B), 400_000, np.int32),
            count=True,
        )

    def pulls(self) -> list[Coroutine[Any, Any, LookupReply]]:
        return [
            shard.pull(self.place, request)
            for shard, request in zip(self._shards, self.asked.requests, strict=True)
        ]

    def pushes(self, replies: Sequence[LookupReply]) -> list[Coroutine[Any, Any, None]]:
        """The gradient of every row is 1, so that rows of the past would show."""
        rows = len(self._rows.clicks_B)
        inputs_BI, wide_B = np.empty((rows, 4), np.float32), np.empty(rows, np.float32)
        self._tables.pool(self.asked, list(replies), inputs_BI, wide_B)
        gradients = self._tables.gradients(self.asked, inputs_BI + 1, wide_B + 1)
        return [
            shard.push(self.place, gradient, rows, 1.0)
            for shard, gradient in zip(self._shards, gradients, strict=True)
        ]

    async def learn(self) -> None:
        await asyncio.gather(*self.pushes(await asyncio.gather(*self.pulls())))


def shards_in(
    folder: Path, count: int = 1, restore: Sequence[Path] = (), rows: int = 0, **changes: Any
) -> list[EmbeddingServer]:
    tables = {**TABLES, **changes}
    return [
        EmbeddingServer(number, count, tables, 1, restore, rows, folder / f"shard-{number}.log")
        for number in range(count)
    ]


async def learn(
    shards: Sequence[EmbeddingServer], rows: Rows, sequence: int, token: int, parts: int = 1
) -> None:
    senders = [Sender(shards, rows, sequence, token, part, parts) for part in range(parts)]
    await asyncio.gather(*(sender.learn() for sender in senders))


async def open_all(shards: Sequence[EmbeddingServer], token: int, start: int = 0) -> list[tuple[int, int]]:
    return [await shard.open_stream(STREAM, token, start) for shard in shards]


async def snapshot(shards: Sequence[EmbeddingServer], folder: Path, name: str = "snapshot") -> list[Path]:
    paths = [folder / f"{name}-{number}.bin" for number in range(len(shards))]
    for shard, path in zip(shards, paths, strict=True):
        assert await shard.begin_snapshot(path, 1.0)
    for shard, path in zip(shards, paths, strict=True):
        assert len(await shard.snapshot_digest()) == 64
        assert path.exists()
    return paths


def held(paths: Sequence[Path]) -> NDArray[Any]:
    reader = SnapshotReader(list(paths))
    return np.sort(np.concatenate(list(reader.rows(0))), order="id")


def counted(many: Sequence[Rows]) -> dict[int, tuple[int, int]]:
    """What a direct count says."""
    impressions: Counter[int] = Counter()
    clicks: Counter[int] = Counter()
    for rows in many:
        for ids_B in rows.ids_SB:
            impressions.update(ids_B.tolist())
            clicks.update(ids_B[rows.clicks_B == 1].tolist())
    return {one: (count, clicks[one]) for one, count in impressions.items()}


def counters(paths: Sequence[Path]) -> dict[int, tuple[int, int]]:
    return {int(row["id"]): (int(row["impression"]), int(row["click"])) for row in held(paths)}


async def turns(count: int = 20) -> None:
    """Let all other tasks run as far as they can."""
    for _ in range(count):
        await asyncio.sleep(0)


def test_parts_of_a_batch_are_answered_together_and_applied_as_one(tmp_path: Path) -> None:
    many = batches(1, 3)

    async def story(parts: int, folder: Path) -> list[Path]:
        folder.mkdir()
        shards = shards_in(folder, 2)
        await open_all(shards, 1)
        for sequence, rows in enumerate(many):
            senders = [Sender(shards, rows, sequence, 1, part, parts) for part in range(parts)]
            pulls = [asyncio.gather(*sender.pulls()) for sender in senders[:-1]]
            await turns()
            assert not any(pull.done() for pull in pulls)  # the last part is missing
            pulls.append(asyncio.gather(*senders[-1].pulls()))
            replies = await asyncio.gather(*pulls)
            for sender, reply in zip(senders, replies, strict=True):
                assert (await shards[0].state()).rows == 12 * sequence
                await asyncio.gather(*sender.pushes(reply))
        states = [await shard.state() for shard in shards]
        assert [state.rows for state in states] == [36, 36]  # each shard has seen every row
        assert [state.newest_hour for state in states] == [400_000, 400_000]
        assert sum(slot.ids for slot in merge_reports([state.slots for state in states])) == len(
            counted(many)
        )
        return await snapshot(shards, folder)

    whole = held(asyncio.run(story(1, tmp_path / "one")))
    parted = held(asyncio.run(story(3, tmp_path / "three")))
    assert counters(list((tmp_path / "three").glob("snapshot-*.bin"))) == counted(many)
    for field in whole.dtype.names or ():
        np.testing.assert_allclose(whole[field], parted[field], rtol=1e-5, atol=1e-6, err_msg=field)


def test_pull_waits_until_the_previous_batch_is_applied(tmp_path: Path) -> None:
    first, second = batches(2, 2)

    async def story() -> None:
        shards = shards_in(tmp_path)
        await open_all(shards, 1)
        sender, early = Sender(shards, first, 0, 1, 0, 1), Sender(shards, second, 1, 1, 0, 1)
        waiting = asyncio.gather(*early.pulls())
        replies = await asyncio.gather(*sender.pulls())
        await turns()
        assert not waiting.done()
        await asyncio.gather(*sender.pushes(replies))
        answer = (await asyncio.wait_for(waiting, 5))[0]
        looked = await shards[0].lookup(early.asked.requests[0])
        assert np.array_equal(answer.rows, looked.rows)  # of now: what the first batch said is in it
        assert not np.array_equal(answer.rows[:4], replies[0].rows[:4])

    asyncio.run(story())


def test_a_repeated_push_or_pull_changes_nothing(tmp_path: Path) -> None:
    many = batches(3, 2)

    async def story() -> list[Path]:
        shards = shards_in(tmp_path)
        await open_all(shards, 1)
        parts = [Sender(shards, many[0], 0, 1, part, 2) for part in range(2)]
        replies = await asyncio.gather(*(sender.pulls()[0] for sender in parts))
        await parts[0].pushes([replies[0]])[0]
        await parts[0].pushes([replies[0]])[0]  # the other part is not there yet
        assert (await shards[0].state()).rows == 0
        await parts[1].pushes([replies[1]])[0]
        for sender, reply in zip(parts, replies, strict=True):  # long done
            await sender.pushes([reply])[0]
            again = await sender.pulls()[0]
            assert not np.array_equal(again.rows, reply.rows)  # what the batch taught is in it
        await learn(shards, many[1], 1, 1)
        assert (await shards[0].state()).rows == 24
        return await snapshot(shards, tmp_path)

    assert counters(asyncio.run(story())) == counted(many)


def test_fenced_owner_is_refused_and_the_next_one_repeats_its_batch(tmp_path: Path) -> None:
    many = batches(4, 3)

    async def story() -> list[Path]:
        shards = shards_in(tmp_path, 2)
        assert await open_all(shards, 1) == [(0, 0)] * 2
        await learn(shards, many[0], 0, 1, parts=3)
        lost = [Sender(shards, many[1], 1, 1, part, 3) for part in range(3)]
        replies = [
            await asyncio.gather(*pulls) for pulls in zip(*(sender.pulls() for sender in lost), strict=True)
        ]
        by_sender = list(zip(*replies, strict=True))
        first, second = lost[0].pushes(by_sender[0])
        await first
        second.close()  # it died here
        ahead = asyncio.gather(*Sender(shards, many[2], 2, 1, 0, 3).pulls())
        await turns()
        # The next owner has two members. The batch was counted, and applied nowhere.
        assert await open_all(shards, 2) == [(2, 1)] * 2
        with pytest.raises(Fenced, match="belongs to token 2"):
            await ahead
        for late in lost[1].pushes(by_sender[1]):
            with pytest.raises(
                Fenced, match="stream 7 belongs to token 2; the message of token 1 was refused"
            ):
                await late
        for pull in lost[2].pulls():
            with pytest.raises(Fenced):
                await pull
        for sequence in (1, 2):
            await learn(shards, many[sequence], sequence, 2, parts=2)
        assert [(await shard.state()).rows for shard in shards] == [36, 36]
        for shard in shards:
            with pytest.raises(Fenced, match="is outdated"):
                await shard.open_stream(STREAM, 1, 0)
        return await snapshot(shards, tmp_path)

    assert counters(asyncio.run(story())) == counted(many)


def test_batch_applied_on_only_one_server_is_completed_by_the_next_owner(tmp_path: Path) -> None:
    many = batches(5, 3)

    async def story(torn: bool, folder: Path) -> list[Path]:
        folder.mkdir()
        shards = shards_in(folder, 2)
        await open_all(shards, 1)
        await learn(shards, many[0], 0, 1)
        if torn:
            lost = Sender(shards, many[1], 1, 1, 0, 1)
            first, second = lost.pushes(await asyncio.gather(*lost.pulls()))
            await first
            second.close()  # it died here
            assert await open_all(shards, 2) == [(2, 2), (2, 1)]
        token = 2 if torn else 1
        for sequence in (1, 2):
            await learn(shards, many[sequence], sequence, token)
        return await snapshot(shards, folder)

    paths = asyncio.run(story(True, tmp_path / "torn"))
    whole = asyncio.run(story(False, tmp_path / "whole"))
    assert counters(paths) == counters(whole) == counted(many)


def test_pull_that_waits_for_a_lost_part_fails_when_the_owner_changes(tmp_path: Path) -> None:
    (rows,) = batches(6, 1)

    async def story() -> None:
        shards = shards_in(tmp_path)
        await open_all(shards, 1)
        waiting = asyncio.gather(*Sender(shards, rows, 0, 1, 0, 2).pulls())
        await turns()
        assert not waiting.done()
        assert await open_all(shards, 2) == [(0, 0)]  # nothing was counted
        with pytest.raises(Fenced, match="given to token 2 in the meantime"):
            await asyncio.wait_for(waiting, 5)
        await shards[0].close_stream(STREAM)
        with pytest.raises(Fenced, match="stream 7 is closed"):
            await Sender(shards, rows, 0, 2, 0, 1).pulls()[0]

    asyncio.run(story())


def test_no_snapshot_while_a_batch_is_in_flight_and_training_continues_while_it_is_written(
    tmp_path: Path,
) -> None:
    many = batches(7, 3)

    async def story() -> list[Path]:
        shards = shards_in(tmp_path)
        await open_all(shards, 1)
        sender = Sender(shards, many[0], 0, 1, 0, 1)
        replies = await asyncio.gather(*sender.pulls())
        assert not await shards[0].begin_snapshot(tmp_path / "no.bin", 1.0)
        assert not (tmp_path / "no.bin").exists()
        await asyncio.gather(*sender.pushes(replies))
        path = tmp_path / "first.bin"
        assert await shards[0].begin_snapshot(path, 0.01)  # slowly
        for sequence in (1, 2):
            await learn(shards, many[sequence], sequence, 1)
        await shards[0].unthrottle()
        await shards[0].snapshot_digest()
        assert counters([path]) == counted(many[:1])
        assert await shards[0].begin_snapshot(tmp_path / "forgotten.bin", 0.01)  # one that is never awaited
        return await snapshot(shards, tmp_path)

    assert counters(asyncio.run(story())) == counted(many)


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2), (2, 1)])
def test_snapshot_of_any_number_of_servers_restores_into_any_other(
    tmp_path: Path, before: int, after: int
) -> None:
    many = batches(8, 4, rows=60, vocabulary=300)

    async def story() -> tuple[list[Path], list[Path]]:
        shards = shards_in(tmp_path, before)
        await open_all(shards, 1)
        for sequence in (0, 1):
            await learn(shards, many[sequence], sequence, 1, parts=2)
        first = await snapshot(shards, tmp_path, "first")
        others = shards_in(tmp_path, after, first, rows=120)
        again = await snapshot(others, tmp_path, "again")
        assert held(first).tobytes() == held(again).tobytes()
        states = [await shard.state() for shard in others]
        assert all(state.ids for state in states)  # dealt out, not copied
        assert sum(state.ids for state in states) == len(counted(many[:2]))
        assert await open_all(others, 5, start=2) == [(2, 2)] * after
        for sequence in (2, 3):
            await learn(others, many[sequence], sequence, 5)
        assert [(await shard.state()).rows for shard in others] == [240] * after
        for sequence in (2, 3):  # after the snapshot both continue alike
            await learn(shards, many[sequence], sequence, 1)
        return await snapshot(others, tmp_path, "last"), await snapshot(shards, tmp_path, "undisturbed")

    last, undisturbed = asyncio.run(story())
    assert counters(last) == counted(many)
    assert held(last).tobytes() == held(undisturbed).tobytes()


def test_eviction_waits_for_the_snapshot_writer_and_reports_counts(tmp_path: Path) -> None:
    (rows,) = batches(9, 1)

    async def story() -> None:
        shards = shards_in(tmp_path)
        await open_all(shards, 1)
        await learn(shards, rows, 0, 1)
        path = tmp_path / "snapshot.bin"
        assert await shards[0].begin_snapshot(path, 0.01)
        (gone, other) = await shards[0].evict(Eviction(threshold=1e9), 400_000)
        await shards[0].snapshot_digest()
        assert counters([path]) == counted([rows])
        assert gone.ids + other.ids == len(counted([rows]))
        assert (await shards[0].state()).ids == 0

    asyncio.run(story())


# ── any order of events ────────────────────────────────────────────────────────────────────────

acts = st.lists(
    st.tuples(
        st.sampled_from(["pull", "push", "again", "late", "new owner"]), st.integers(0, 2), st.integers(1, 3)
    ),
    max_size=40,
)


@pytest.mark.slow
@settings(max_examples=60)
@given(acts=acts, shards=st.integers(1, 2), seed=st.integers(0, 1000))
def test_counters_equal_a_direct_count_after_any_losses_repeats_and_delays(
    tmp_path_factory: pytest.TempPathFactory,
    acts: list[tuple[str, int, int]],
    shards: int,
    seed: int,
) -> None:
    """The members of a group pull, push, repeat themselves and are lost, in any order; the last owner finishes."""
    many = batches(seed, 4)
    folder = tmp_path_factory.mktemp("any")

    async def story() -> list[Path]:
        servers = shards_in(folder, shards)
        await open_all(servers, 1)
        token, parts, at = 1, 2, 0
        team: list[Sender] = []
        pulls: dict[int, asyncio.Future[list[LookupReply]]] = {}
        old: list[tuple[Sender, Sequence[LookupReply] | None]] = []

        def begin() -> None:
            team[:] = [Sender(servers, many[at], at, token, part, parts) for part in range(parts)]
            pulls.clear()

        begin()
        pushed: set[int] = set()
        for act, who, count in acts:
            who %= parts
            await turns()
            if act == "pull" and who not in pulls:
                pulls[who] = asyncio.gather(*team[who].pulls())
            elif act == "push" and who in pulls and pulls[who].done():
                await asyncio.gather(*team[who].pushes(pulls[who].result()))
                pushed.add(who)
            elif act == "again" and who in pushed:
                await asyncio.gather(*team[who].pushes(pulls[who].result()))
            elif act == "late":
                for sender, replies in old[-2:]:
                    sent = sender.pulls() if replies is None else sender.pushes(replies)
                    for one in sent:
                        with pytest.raises(Fenced):
                            await one
            elif act == "new owner":
                token += 1
                opened = await open_all(servers, token)
                await turns()
                for number, sender in enumerate(team):
                    answered = pulls.get(number)
                    done = answered is not None and answered.done() and answered.exception() is None
                    old.append((sender, answered.result() if done and answered is not None else None))
                assert all(pull.done() for pull in pulls.values())
                parts, at = count, min(applied for _, applied in opened)
                pushed.clear()
                if at == len(many):
                    break
                begin()
                continue
            if len(pushed) == parts:
                at += 1
                pushed.clear()
                if at == len(many):
                    break
                begin()
        opened = await open_all(servers, token + 1)
        await turns()
        for pull in pulls.values():
            pull.exception()
        for sequence in range(min(applied for _, applied in opened), len(many)):
            await learn(servers, many[sequence], sequence, token + 1, parts=1)
        assert [(await shard.state()).rows for shard in servers] == [48] * shards
        return await snapshot(servers, folder)

    assert counters(asyncio.run(story())) == counted(many)


@pytest.mark.parametrize("call", ["find", "replies", "apply"])
def test_embedding_server_exits_when_memory_runs_out_in_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    class Gone(BaseException):
        """The process would be."""

    def leave(code: int) -> None:
        raise Gone(code)

    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    async def story() -> None:
        shards = shards_in(tmp_path)
        await open_all(shards, 1)
        monkeypatch.setattr(shards[0]._tables, call, fail)
        await learn(shards, batches(1, 1)[0], 0, 1)

    monkeypatch.setattr("clickline.training.cluster.embedding_server.os._exit", leave)
    with pytest.raises(Gone, match="1"):
        asyncio.run(story())
