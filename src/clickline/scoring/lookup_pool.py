"""All lookup servers that a predictor process uses: their connections, their health, and one question to many of them.

Each shard has replicas, and any of them can answer for it. A question goes to one replica of each shard at the same
time. Another replica is asked at once when a connection fails, and also when the answer lets wait for it; the first
answer counts. Only a share of all questions is asked twice for waiting: where all replicas have too much to do, that
would make it worse. A replica that failed is asked last, and not at all after it has failed for a while, until a check
of its own thread finds it well.
"""

from __future__ import annotations

import itertools
import random
import select
import ssl
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from clickline.errors import ClicklineError
from clickline.scoring.lookup_connection import Connection, Endpoint, resolve
from clickline.wire.frames import NOT_HERE, OK, Garbled, read_numbers, read_words

_CHECK_SECONDS = 0.5  # between two checks of a replica
_CHECK_TIMEOUT = 1.0  # of a check, where a lookup may take longer
_READY_SECONDS = 0.05  # and while somebody waits for a version
_FAILED_CHECKS = 3  # in a row, before a replica is not asked any more
_IDLE_SECONDS = 60.0  # below what servers allow
_OWED_SECONDS = 5.0  # for an answer that nobody waits for
_HEDGED = 0.1  # of all requests may be asked a second time for waiting
_MOST_HEDGES = 32.0  # at once, after a time without any: a replica that hangs has several in its hands
_NEVER = float("inf")

Trouble = (OSError, Garbled)
"""What a connection may end with."""


def client_tls(authority: str | None) -> ssl.SSLContext:
    """TLS for a pool. `authority`: PEM file of who signed the servers' certificate; None: who the system trusts."""
    try:
        return ssl.create_default_context(cafile=authority)
    except OSError as error:
        raise ClicklineError(
            f"serve.tls.authority {authority} cannot be used: {error}. It is a PEM file."
        ) from error


@dataclass
class Stats:
    """Counts since the pool was made."""

    requests: int = 0  # to shards
    keys: int = 0
    hedges: int = 0  # asked another replica because one let wait
    hedges_held_back: int = 0  # did not, because so many have been asked twice already
    failovers: int = 0  # asked another replica because one failed
    late_answers: int = 0  # dropped
    shards_lost: int = 0  # requests that no replica answered
    default_lookups: int = 0  # ids that got a default row because of that
    cache_lookups: int = 0
    cache_hits: int = 0

    def add(self, other: Stats) -> None:
        for name, count in vars(other).items():
            if count:
                setattr(self, name, getattr(self, name) + count)


@dataclass(frozen=True)
class Readiness:
    """Which replicas have a version."""

    version: int
    ready: bool  # every shard has a replica that has it
    have: tuple[str, ...]
    late: tuple[str, ...]  # answer, but do not have it
    refused: Mapping[str, str]  # could not load it, and why
    unreachable: Mapping[str, str]  # do not answer as they should, and why
    lost_shards: tuple[int, ...]  # without a replica that has it

    def __str__(self) -> str:
        words = [f"{len(self.have)} lookup servers have version {self.version}"]
        words += [f"no server of shard {shard} has it" for shard in self.lost_shards]
        if self.late:
            words.append(f"not yet: {', '.join(self.late)}")
        words += [f"{address} refused it: {why}" for address, why in self.refused.items()]
        words += [f"{address} is not asked: {why}" for address, why in self.unreachable.items()]
        return "; ".join(words)


@dataclass(eq=False)
class Question:
    """What is asked of one shard."""

    shard: int
    request: int
    frame: memoryview
    answer_size: int
    answer: Connection | None = None  # whose inbox has it, until `LookupPool.give_back`
    troubles: list[str] = field(default_factory=list)
    candidates: deque[tuple[_Replica, bool]] = field(
        default_factory=deque
    )  # and whether a new connection is needed
    asked: dict[int, tuple[_Replica, Connection]] = field(default_factory=dict)  # by file descriptor
    hedge_at: float = _NEVER


class LookupPool:
    """Lookup servers of all shards. Any number of threads may ask; versions of a process share it."""

    def __init__(
        self,
        shards: Sequence[Sequence[str]],
        *,
        timeout: float = 0.2,
        hedge: float = 0.02,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`shards`: for each the addresses of its replicas, host:port. Seconds after which a lookup is given up, and
        after which another replica is asked too. Waits until every server was tried once."""
        self.stats = Stats()
        self.shards = len(shards)
        self._timeout = timeout
        self._hedge = hedge
        self._lock = threading.Lock()
        self._hedges = _MOST_HEDGES  # that are allowed now
        self._changed = threading.Condition()
        self._requests = itertools.count(1)
        self._turns = [
            itertools.count(random.randrange(64)) for _ in shards
        ]  # processes begin at different replicas
        self._replicas = tuple(
            tuple(_Replica(address, shard, timeout, token, tls, self._changed) for address in addresses)
            for shard, addresses in enumerate(shards)
        )
        for replica in self._all():
            replica.start()
        with self._changed:
            self._changed.wait_for(lambda: all(replica.checks for replica in self._all()), 2 * _CHECK_TIMEOUT)

    def close(self) -> None:
        for replica in self._all():
            replica.stop()
        for replica in self._all():
            replica.join()

    def __enter__(self) -> LookupPool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ── versions ───────────────────────────────────────────────────────────────────────────────

    def ready(self, version: int, timeout: float) -> Readiness:
        """Wait until all replicas that answer have a version, and every shard has one that does; for so many seconds at
        most. One that does not answer, or refuses the version, is waited for by nobody."""
        until = time.monotonic() + timeout
        before = {replica: replica.checks for replica in self._all()}
        for replica in before:
            replica.check_soon()
        with self._changed:
            while True:
                now = self._readiness(version)
                unsure = [replica for replica, checks in before.items() if replica.checks == checks]
                if (now.ready and not now.late and not unsure) or time.monotonic() >= until:
                    return now
                self._changed.wait(min(_READY_SECONDS, max(0.0, until - time.monotonic())))
                for replica in before:
                    if version not in replica.versions:
                        replica.check_soon()

    def _readiness(self, version: int) -> Readiness:
        have = [replica for replica in self._all() if replica.well and version in replica.versions]
        rest = [replica for replica in self._all() if replica not in have]
        shards = {replica.shard for replica in have}
        lost = tuple(shard for shard in range(self.shards) if shard not in shards)
        return Readiness(
            version,
            not lost,
            tuple(replica.address for replica in have),
            tuple(r.address for r in rest if r.well and version not in r.refused),
            {r.address: r.refused[version] for r in rest if r.well and version in r.refused},
            {replica.address: replica.trouble for replica in rest if not replica.well},
            lost,
        )

    def health(self) -> dict[str, str]:
        """Each replica's trouble, empty when it is well."""
        return {replica.address: replica.trouble for replica in self._all()}

    # ── questions ──────────────────────────────────────────────────────────────────────────────

    def request(self) -> int:
        """A number for a question."""
        return next(self._requests)

    def ask(self, version: int, questions: Sequence[Question]) -> None:
        """Get an answer for each question, or say in `troubles` why there is none. Whatever happens, `give_back` must
        follow."""
        counted = Stats(requests=len(questions))
        now = time.monotonic()
        deadline = now + self._timeout
        poller = select.poll()
        for question in questions:
            question.candidates.extend((replica, False) for replica in self._candidates(question, version))
            self._ask_next(question, poller, deadline, counted)
        waiting = [question for question in questions if question.asked]
        while waiting and now < deadline:
            wake = min(deadline, *(question.hedge_at for question in waiting))
            ready = {fd for fd, _ in poller.poll(max(0.0, wake - time.monotonic()) * 1000)}
            now = (
                time.monotonic()
            )  # what has come is taken even if it is late: perhaps it was us who had no time
            for question in waiting:
                for fd in ready & question.asked.keys():
                    self._take(question, fd, version, poller, deadline, counted)
                if question.answer is None and question.hedge_at <= now < deadline:
                    for replica, _ in question.asked.values():
                        replica.suspect(f"no answer within {self._hedge * 1e3:.0f} ms")
                    if self._may_hedge():
                        counted.hedges += 1
                        self._ask_next(question, poller, deadline, counted)
                    else:
                        counted.hedges_held_back += 1
                        question.hedge_at = _NEVER
            waiting = [question for question in waiting if question.answer is None and question.asked]
        for question in waiting:
            for replica, _ in question.asked.values():
                replica.suspect(f"no answer within {self._timeout * 1e3:.0f} ms")
                question.troubles.append(f"{replica.address}: {replica.trouble}")
        counted.shards_lost = sum(question.answer is None for question in questions)
        self.count(counted)

    def give_back(self, questions: Iterable[Question]) -> None:
        """The answers are not needed any more."""
        late = 0
        for question in questions:
            for replica, connection in question.asked.values():
                if connection is question.answer:
                    connection.inbox.done()
                late += connection.late_answers
                connection.late_answers = 0
                replica.keep(connection)
            question.asked.clear()
            question.answer = None
        if late:
            self.count(Stats(late_answers=late))

    def count(self, stats: Stats) -> None:
        with self._lock:
            self.stats.add(stats)
            self._hedges = min(self._hedges + _HEDGED * stats.requests, _MOST_HEDGES)

    def _may_hedge(self) -> bool:
        with self._lock:
            if self._hedges < 1:
                return False
            self._hedges -= 1
            return True

    def _all(self) -> list[_Replica]:
        return [replica for replicas in self._replicas for replica in replicas]

    def _candidates(self, question: Question, version: int) -> list[_Replica]:
        """Replicas in the order in which they are asked: in turns, doubtful ones last."""
        replicas = self._replicas[question.shard]
        turn = next(self._turns[question.shard]) % len(replicas)
        rotated = (*replicas[turn:], *replicas[:turn])
        usable = [replica for replica in rotated if not replica.down]
        if not usable:
            question.troubles.extend(f"{replica.address}: {replica.trouble}" for replica in replicas)
        usable.sort(key=lambda replica: (bool(replica.trouble), version not in replica.versions))
        return usable

    def _ask_next(self, question: Question, poller: select.poll, deadline: float, counted: Stats) -> None:
        """Ask the next candidate that takes the question."""
        question.hedge_at = _NEVER
        while question.candidates:
            replica, new = question.candidates.popleft()
            connection = None if new else replica.take()
            try:
                if connection is None:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        return
                    connection = replica.connect(min(left, self._hedge if question.candidates else left))
                connection.send(question.request, question.frame, question.answer_size)
            except Trouble as error:
                counted.failovers += 1
                self._failed(question, replica, connection, error)
                continue
            fd = connection.fileno()
            question.asked[fd] = (replica, connection)
            poller.register(fd, select.POLLIN | select.POLLOUT if connection.unsent else select.POLLIN)
            if question.candidates:
                question.hedge_at = time.monotonic() + self._hedge
            return

    def _take(
        self, question: Question, fd: int, version: int, poller: select.poll, deadline: float, counted: Stats
    ) -> None:
        """Something has happened on a connection."""
        replica, connection = question.asked[fd]
        if question.answer is not None:
            return
        try:
            if connection.unsent and connection.flush():
                poller.modify(fd, select.POLLIN)
            frame = connection.receive(question.request)
            if frame is None:
                return
            if frame.status == OK:
                found = int.from_bytes(connection.inbox.body()[:8], "little")
                if found != version:
                    raise Garbled(f"an answer of version {found} for version {version}")
                question.answer = connection
                for asked in question.asked:  # a late answer must not wake those who wait for other shards
                    poller.unregister(asked)
                return
            if frame.status != NOT_HERE:
                raise ConnectionRefusedError(read_words(connection.inbox.body()))
            there = read_numbers(connection.inbox.body())
            connection.inbox.done()
        except Trouble as error:
            counted.failovers += 1
            poller.unregister(fd)
            del question.asked[fd]
            self._failed(question, replica, connection, error)
        else:
            replica.versions = frozenset(there)
            question.troubles.append(
                f"{replica.address}: it has version {', '.join(map(str, there)) or 'none'}, not {version}"
            )
            poller.unregister(fd)
            del question.asked[fd]
            replica.keep(connection)
        if not question.asked:
            self._ask_next(question, poller, deadline, counted)

    def _failed(
        self, question: Question, replica: _Replica, connection: Connection | None, error: Exception
    ) -> None:
        if connection is not None:
            connection.close()
        if connection is not None and connection.reused:
            # The server may have been restarted since: its other connections are of no use either.
            replica.forget_connections()
            question.candidates.append((replica, True))
        else:
            replica.failed(error)
            question.troubles.append(f"{replica.address}: {replica.trouble}")


class _Replica:
    """One server: how it is, and connections to it that nobody uses now."""

    def __init__(
        self,
        address: str,
        shard: int,
        timeout: float,
        token: str | None,
        tls: ssl.SSLContext | None,
        changed: threading.Condition,
    ) -> None:
        self.address = address
        self.shard = shard
        self.versions: frozenset[int] = frozenset()
        self.refused: Mapping[int, str] = {}
        self.checks = 0  # that have ended
        self.well = False  # at the last check
        self.down = False  # not asked at all
        self.trouble = "not tried yet"  # asked last; empty: well
        host, _, port = address.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._check_timeout = min(max(timeout, 0.1), _CHECK_TIMEOUT)
        self._token = token
        self._tls = tls
        self._changed = changed
        self._endpoint: Endpoint | None = None
        self._idle: deque[Connection] = deque()  # those that owe an answer on the left
        self._failures = 0
        self._wake = threading.Event()
        self._stopped = False
        self._thread = threading.Thread(target=self._watch, name=f"lookup {address}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped = True
        self._wake.set()

    def join(self) -> None:
        self._thread.join(2 * _CHECK_TIMEOUT)
        self.forget_connections()

    # ── connections ────────────────────────────────────────────────────────────────────────────

    def take(self) -> Connection | None:
        """A connection that owes nothing; None: a new one is needed."""
        try:
            while True:
                connection = self._idle.pop()
                try:
                    if connection.owes:
                        connection.receive(None)
                except Trouble:
                    connection.close()
                    continue
                if connection.owes:
                    self._idle.appendleft(connection)
                    return None
                return connection
        except IndexError:
            return None

    def connect(self, seconds: float) -> Connection:
        endpoint = self._endpoint
        if endpoint is None:
            raise ConnectionError(self.trouble)
        connection = Connection(endpoint, self._host, self._token, self._tls, seconds)
        try:
            self._check_shard(connection.told)
        except BaseException:
            connection.close()
            raise
        return connection

    def keep(self, connection: Connection) -> None:
        """Nobody uses it now."""
        connection.reused = True
        if connection.unsent or self._stopped:
            connection.close()
        elif connection.owes:
            self._idle.appendleft(connection)
        else:
            self._idle.append(connection)

    def forget_connections(self) -> None:
        with suppress(IndexError):
            while True:
                self._idle.pop().close()

    # ── health ─────────────────────────────────────────────────────────────────────────────────

    def suspect(self, trouble: str) -> None:
        """It lets wait: it is asked last until a check finds it well."""
        self.trouble = trouble
        self.check_soon()

    def failed(self, error: Exception) -> None:
        """A new connection failed."""
        if isinstance(error, ConnectionRefusedError):
            self.down = True
        self.suspect(_words(error))

    def check_soon(self) -> None:
        self._wake.set()

    def _watch(self) -> None:
        connection: Connection | None = None
        while not self._stopped:
            self._wake.clear()
            try:
                if connection is None:
                    self._endpoint = resolve(self._host, self._port)
                    connection = Connection(
                        self._endpoint, self._host, self._token, self._tls, self._check_timeout
                    )
                    told = connection.told
                else:
                    told = connection.status(self.checks, self._check_timeout)
                self._check_shard(told)
                self._learn(told)
            except Exception as error:  # noqa: BLE001 - whatever it was, the next check may find it well
                if connection is not None:
                    connection.close()
                    connection = None
                self._check_failed(error)
            self._sweep()
            self._wake.wait(_CHECK_SECONDS)
        if connection is not None:
            connection.close()

    def _learn(self, told: Mapping[str, Any]) -> None:
        try:
            versions = frozenset(int(number) for number in told["versions"])
            refused = {int(number): str(why) for number, why in told["refused"].items()}
            draining = bool(told["draining"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Garbled(f"a status that is not one of ours: {error!r}") from error
        with self._changed:
            self.versions, self.refused = versions, refused
            self.checks += 1
            self._failures = 0
            self.well, self.down = True, False
            self.trouble = "it is stopping" if draining else ""
            self._changed.notify_all()

    def _check_failed(self, error: Exception) -> None:
        with self._changed:
            self.checks += 1
            self._failures += 1
            self.well = False
            self.trouble = _words(error)
            # Perhaps it was this process that had no time: only what is sure, or lasts, counts.
            if isinstance(error, ConnectionRefusedError) or self._failures >= _FAILED_CHECKS:
                self.down = True
            self._changed.notify_all()

    def _check_shard(self, told: Mapping[str, Any]) -> None:
        if told.get("shard") != self.shard:
            raise ConnectionRefusedError(
                f"it serves shard {told.get('shard')}, but serve.lookup.shards names it for shard {self.shard}"
            )

    def _sweep(self) -> None:
        """Close connections that were not used for long, or do not get what they are owed."""
        now = time.monotonic()
        for _ in range(len(self._idle)):
            try:
                connection = self._idle.popleft()
            except IndexError:
                return
            if now - connection.used > (_OWED_SECONDS if connection.owes else _IDLE_SECONDS):
                connection.close()
            else:
                self._idle.append(connection)


def _words(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
