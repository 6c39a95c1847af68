"""The lookup servers of a predictor process: their connections, their health, and requests to all shards.

Each shard has replicas, and any of them can answer for it. A query goes to one replica of each shard at the same time.
Another replica is tried at once if a connection fails, and also if an answer is slow (a hedge); the first answer wins.
Only a share of all requests is hedged: if all replicas are overloaded, hedging would make it worse. A replica that
failed is tried last, and not at all after it has failed for a while, until its health check succeeds.
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
from clickline.scoring.lookup_connection import LookupConnection, SocketAddress, resolve
from clickline.wire.lookup_frames import NOT_LOADED, OK, ProtocolError, read_message, read_versions

_CHECK_SECONDS = 0.5  # between two health checks of a replica
_CHECK_TIMEOUT = 1.0  # of a health check, if lookups may take longer
_READY_CHECK_SECONDS = 0.05  # between checks while a version is waited for
_FAILED_CHECKS = 3  # in a row, before a replica is no longer tried
_IDLE_SECONDS = 60.0  # less than the idle timeout of servers
_PENDING_SECONDS = 5.0  # for an answer that is no longer waited for
_HEDGE_RATIO = 0.1  # share of all requests that may be hedged
_MAX_HEDGES = 32.0  # in a burst: a replica that hangs delays several requests at once
_NEVER = float("inf")

CONNECTION_ERRORS = (OSError, ProtocolError)
"""The errors that end a connection."""


def client_tls(ca: str | None) -> ssl.SSLContext:
    """TLS for a pool. `ca`: PEM file of the CA that signed the servers' certificates; None: the system's CAs."""
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise ClicklineError(f"serve.tls.ca {ca} cannot be used: {error}. Name a PEM file.") from error


@dataclass
class LookupStats:
    """Counts since the pool was created."""

    requests: int = 0  # to shards
    keys: int = 0
    hedges: int = 0  # sent to another replica because the first was slow
    hedges_held_back: int = 0  # not hedged, because the hedging limit was reached
    failovers: int = 0  # sent to another replica because the first failed
    late_answers: int = 0  # answers dropped because another replica was faster
    shards_lost: int = 0  # requests that no replica answered
    default_lookups: int = 0  # ids that got a default row because of that
    cache_lookups: int = 0
    cache_hits: int = 0

    def add(self, other: LookupStats) -> None:
        for name, count in vars(other).items():
            if count:
                setattr(self, name, getattr(self, name) + count)


@dataclass(frozen=True)
class VersionReadiness:
    """Which replicas have loaded a version."""

    version: int
    ready: bool  # every shard has a replica that has loaded it
    loaded: tuple[str, ...]
    pending: tuple[str, ...]  # answer, but have not loaded it yet
    refused: Mapping[str, str]  # replicas that could not load it, and why
    unreachable: Mapping[str, str]  # replicas that fail their health check, and why
    lost_shards: tuple[int, ...]  # without a replica that has loaded it

    def __str__(self) -> str:
        parts = [f"{len(self.loaded)} lookup servers have loaded version {self.version}"]
        parts += [f"no server of shard {shard} has" for shard in self.lost_shards]
        if self.pending:
            parts.append(f"not yet loaded by: {', '.join(self.pending)}")
        parts += [f"{address} refused it: {why}" for address, why in self.refused.items()]
        parts += [f"{address} is not used: {why}" for address, why in self.unreachable.items()]
        return "; ".join(parts)


@dataclass(eq=False)
class ShardRequest:
    """A lookup request to one shard."""

    shard: int
    request: int
    frame: memoryview
    answer_size: int
    answer: LookupConnection | None = None  # whose buffer has the answer, until `LookupPool.release`
    errors: list[str] = field(default_factory=list)
    # replicas to try, and whether each needs a new connection
    candidates: deque[tuple[_Replica, bool]] = field(default_factory=deque)
    # by file descriptor
    in_flight: dict[int, tuple[_Replica, LookupConnection]] = field(default_factory=dict)
    hedge_at: float = _NEVER


class LookupPool:
    """The lookup servers of all shards. Safe to use from several threads; the versions of a process share it."""

    def __init__(
        self,
        shards: Sequence[Sequence[str]],
        *,
        timeout: float = 0.2,
        hedge: float = 0.02,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`shards`: the replica addresses of each shard, host:port. `timeout`: seconds after which a lookup fails.
        `hedge`: seconds after which another replica is tried too. Waits until every server was checked once."""
        self.stats = LookupStats()
        self.shards = len(shards)
        self._timeout = timeout
        self._hedge = hedge
        self._lock = threading.Lock()
        self._hedges = _MAX_HEDGES  # hedges allowed now
        self._changed = threading.Condition()
        self._request_ids = itertools.count(1)
        # Processes begin at different replicas.
        self._round_robin = [itertools.count(random.randrange(64)) for _ in shards]
        self._replicas = tuple(
            tuple(_Replica(address, shard, timeout, token, tls, self._changed) for address in addresses)
            for shard, addresses in enumerate(shards)
        )
        for replica in self._all_replicas():
            replica.start()
        with self._changed:
            self._changed.wait_for(
                lambda: all(replica.checks for replica in self._all_replicas()), 2 * _CHECK_TIMEOUT
            )

    def close(self) -> None:
        for replica in self._all_replicas():
            replica.stop()
        for replica in self._all_replicas():
            replica.join(2 * _CHECK_TIMEOUT)
            replica.close_idle()

    def __enter__(self) -> LookupPool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ── versions ───────────────────────────────────────────────────────────────────────────────

    def ready(self, version: int, timeout: float) -> VersionReadiness:
        """Wait until all reachable replicas have loaded a version and every shard has one that has; at most `timeout`
        seconds. Replicas that do not answer, or refuse the version, are not waited for."""
        deadline = time.monotonic() + timeout
        before = {replica: replica.checks for replica in self._all_replicas()}
        for replica in before:
            replica.check_soon()
        with self._changed:
            while True:
                now = self._readiness(version)
                unchecked = [replica for replica, checks in before.items() if replica.checks == checks]
                if (now.ready and not now.pending and not unchecked) or time.monotonic() >= deadline:
                    return now
                self._changed.wait(min(_READY_CHECK_SECONDS, max(0.0, deadline - time.monotonic())))
                for replica in before:
                    if version not in replica.versions:
                        replica.check_soon()

    def _readiness(self, version: int) -> VersionReadiness:
        loaded = [r for r in self._all_replicas() if r.healthy and version in r.versions]
        rest = [replica for replica in self._all_replicas() if replica not in loaded]
        shards = {replica.shard for replica in loaded}
        lost = tuple(shard for shard in range(self.shards) if shard not in shards)
        return VersionReadiness(
            version,
            not lost,
            tuple(replica.address for replica in loaded),
            tuple(r.address for r in rest if r.healthy and version not in r.refused),
            {r.address: r.refused[version] for r in rest if r.healthy and version in r.refused},
            {replica.address: replica.problem for replica in rest if not replica.healthy},
            lost,
        )

    def health(self) -> dict[str, str]:
        """The problem of each replica; empty if it is healthy."""
        return {replica.address: replica.problem for replica in self._all_replicas()}

    # ── requests ──────────────────────────────────────────────────────────────────────────────

    def next_request_id(self) -> int:
        """The number of the next request."""
        return next(self._request_ids)

    def query(self, version: int, requests: Sequence[ShardRequest]) -> None:
        """Get an answer for each request, or add to its `errors` why there is none. `release` must follow in any
        case."""
        stats = LookupStats(requests=len(requests))
        now = time.monotonic()
        deadline = now + self._timeout
        poller = select.poll()
        for request in requests:
            request.candidates.extend((replica, False) for replica in self._candidates(request, version))
            self._send_to_next(request, poller, deadline, stats)
        waiting = [request for request in requests if request.in_flight]
        while waiting and now < deadline:
            wake = min(deadline, *(request.hedge_at for request in waiting))
            ready = {fd for fd, _ in poller.poll(max(0.0, wake - time.monotonic()) * 1000)}
            # Answers that have arrived are used even if late: this process may have been the slow side.
            now = time.monotonic()
            for request in waiting:
                for fd in ready & request.in_flight.keys():
                    self._receive(request, fd, version, poller, deadline, stats)
                if request.answer is None and request.hedge_at <= now < deadline:
                    for replica, _ in request.in_flight.values():
                        replica.mark_suspect(f"no answer within {self._hedge * 1e3:.0f} ms")
                    if self._may_hedge():
                        stats.hedges += 1
                        self._send_to_next(request, poller, deadline, stats)
                    else:
                        stats.hedges_held_back += 1
                        request.hedge_at = _NEVER
            waiting = [request for request in waiting if request.answer is None and request.in_flight]
        for request in waiting:
            for replica, _ in request.in_flight.values():
                replica.mark_suspect(f"no answer within {self._timeout * 1e3:.0f} ms")
                request.errors.append(f"{replica.address}: {replica.problem}")
        stats.shards_lost = sum(request.answer is None for request in requests)
        self.add_stats(stats)

    def release(self, requests: Iterable[ShardRequest]) -> None:
        """Release the connections; their answers are no longer needed."""
        late = 0
        for request in requests:
            for replica, connection in request.in_flight.values():
                if connection is request.answer:
                    connection.buffer.release()
                late += connection.late_answers
                connection.late_answers = 0
                replica.release(connection)
            request.in_flight.clear()
            request.answer = None
        if late:
            self.add_stats(LookupStats(late_answers=late))

    def add_stats(self, stats: LookupStats) -> None:
        with self._lock:
            self.stats.add(stats)
            self._hedges = min(self._hedges + _HEDGE_RATIO * stats.requests, _MAX_HEDGES)

    def _may_hedge(self) -> bool:
        with self._lock:
            if self._hedges < 1:
                return False
            self._hedges -= 1
            return True

    def _all_replicas(self) -> list[_Replica]:
        return [replica for replicas in self._replicas for replica in replicas]

    def _candidates(self, request: ShardRequest, version: int) -> list[_Replica]:
        """The replicas in the order in which they are tried: round-robin, those with problems last."""
        replicas = self._replicas[request.shard]
        turn = next(self._round_robin[request.shard]) % len(replicas)
        rotated = (*replicas[turn:], *replicas[:turn])
        usable = [replica for replica in rotated if not replica.down]
        if not usable:
            request.errors.extend(f"{replica.address}: {replica.problem}" for replica in replicas)
        usable.sort(key=lambda replica: (bool(replica.problem), version not in replica.versions))
        return usable

    def _send_to_next(
        self, request: ShardRequest, poller: select.poll, deadline: float, stats: LookupStats
    ) -> None:
        """Send the request to the next candidate that accepts it."""
        request.hedge_at = _NEVER
        while request.candidates:
            replica, new = request.candidates.popleft()
            connection = None if new else replica.acquire()
            try:
                if connection is None:
                    seconds = deadline - time.monotonic()
                    if seconds <= 0:
                        return
                    connection = replica.connect(min(seconds, self._hedge if request.candidates else seconds))
                connection.send(request.request, request.frame, request.answer_size)
            except CONNECTION_ERRORS as error:
                stats.failovers += 1
                self._on_failure(request, replica, connection, error)
                continue
            fd = connection.fileno()
            request.in_flight[fd] = (replica, connection)
            poller.register(fd, select.POLLIN | select.POLLOUT if connection.unsent else select.POLLIN)
            if request.candidates:
                request.hedge_at = time.monotonic() + self._hedge
            return

    def _receive(
        self,
        request: ShardRequest,
        fd: int,
        version: int,
        poller: select.poll,
        deadline: float,
        stats: LookupStats,
    ) -> None:
        """Handle a connection that is ready to read or write."""
        replica, connection = request.in_flight[fd]
        if request.answer is not None:
            return
        try:
            if connection.unsent and connection.flush():
                poller.modify(fd, select.POLLIN)
            frame = connection.receive(request.request)
            if frame is None:
                return
            if frame.status == OK:
                answered = int.from_bytes(connection.buffer.body()[:8], "little")
                if answered != version:
                    raise ProtocolError(f"an answer for version {answered} instead of version {version}")
                request.answer = connection
                for other in request.in_flight:  # a late answer must not wake the wait for other shards
                    poller.unregister(other)
                return
            if frame.status != NOT_LOADED:
                raise ConnectionRefusedError(read_message(connection.buffer.body()))
            loaded = read_versions(connection.buffer.body())
            connection.buffer.release()
        except CONNECTION_ERRORS as error:
            stats.failovers += 1
            poller.unregister(fd)
            del request.in_flight[fd]
            self._on_failure(request, replica, connection, error)
        else:
            replica.versions = frozenset(loaded)
            request.errors.append(
                f"{replica.address}: it has loaded version {', '.join(map(str, loaded)) or 'none'}, not {version}"
            )
            poller.unregister(fd)
            del request.in_flight[fd]
            replica.release(connection)
        if not request.in_flight:
            self._send_to_next(request, poller, deadline, stats)

    def _on_failure(
        self, request: ShardRequest, replica: _Replica, connection: LookupConnection | None, error: Exception
    ) -> None:
        if connection is not None:
            connection.close()
        if connection is not None and connection.reused:
            # The server may have been restarted: its other idle connections are broken too.
            replica.close_idle()
            request.candidates.append((replica, True))
        else:
            replica.failed(error)
            request.errors.append(f"{replica.address}: {replica.problem}")


class _Replica(threading.Thread):
    """One lookup server: its health, which the thread checks, and idle connections to it."""

    def __init__(
        self,
        address: str,
        shard: int,
        timeout: float,
        token: str | None,
        tls: ssl.SSLContext | None,
        changed: threading.Condition,
    ) -> None:
        super().__init__(name=f"lookup {address}", daemon=True)
        self.address = address
        self.shard = shard
        self.versions: frozenset[int] = frozenset()
        self.refused: Mapping[int, str] = {}
        self.checks = 0  # completed health checks
        self.healthy = False  # at the last health check
        self.down = False  # not tried at all
        self.problem = "not tried yet"  # if not empty, tried last
        host, _, port = address.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._check_timeout = min(max(timeout, 0.1), _CHECK_TIMEOUT)
        self._token = token
        self._tls = tls
        self._changed = changed
        self._socket_address: SocketAddress | None = None
        self._idle: deque[LookupConnection] = deque()  # those with a pending answer on the left
        self._failures = 0
        self._wake = threading.Event()
        self._ending = False

    def stop(self) -> None:
        self._ending = True
        self._wake.set()

    # ── connections ────────────────────────────────────────────────────────────────────────────

    def acquire(self) -> LookupConnection | None:
        """An idle connection without pending answers; None: a new one is needed."""
        try:
            while True:
                connection = self._idle.pop()
                try:
                    if connection.has_pending:
                        connection.receive(None)
                except CONNECTION_ERRORS:
                    connection.close()
                    continue
                if connection.has_pending:
                    self._idle.appendleft(connection)
                    return None
                return connection
        except IndexError:
            return None

    def connect(self, seconds: float) -> LookupConnection:
        socket_address = self._socket_address
        if socket_address is None:
            raise ConnectionError(self.problem)
        connection = LookupConnection(socket_address, self._host, self._token, self._tls, seconds)
        try:
            self._check_shard(connection.server_status)
        except BaseException:
            connection.close()
            raise
        return connection

    def release(self, connection: LookupConnection) -> None:
        """Return a connection to the idle ones."""
        connection.reused = True
        if connection.unsent or self._ending:
            connection.close()
        elif connection.has_pending:
            self._idle.appendleft(connection)
        else:
            self._idle.append(connection)

    def close_idle(self) -> None:
        with suppress(IndexError):
            while True:
                self._idle.pop().close()

    # ── health ─────────────────────────────────────────────────────────────────────────────────

    def mark_suspect(self, problem: str) -> None:
        """Try this replica last until a health check succeeds."""
        self.problem = problem
        self.check_soon()

    def failed(self, error: Exception) -> None:
        """Record that a new connection failed."""
        if isinstance(error, ConnectionRefusedError):
            self.down = True
        self.mark_suspect(_error_text(error))

    def check_soon(self) -> None:
        self._wake.set()

    def run(self) -> None:
        connection: LookupConnection | None = None
        while not self._ending:
            self._wake.clear()
            try:
                if connection is None:
                    self._socket_address = resolve(self._host, self._port)
                    connection = LookupConnection(
                        self._socket_address, self._host, self._token, self._tls, self._check_timeout
                    )
                    status = connection.server_status
                else:
                    status = connection.status(self.checks, self._check_timeout)
                self._check_shard(status)
                self._update(status)
            except Exception as error:  # noqa: BLE001 - after any error, the next check may succeed
                if connection is not None:
                    connection.close()
                    connection = None
                self._check_failed(error)
            self._close_stale()
            self._wake.wait(_CHECK_SECONDS)
        if connection is not None:
            connection.close()

    def _update(self, status: Mapping[str, Any]) -> None:
        try:
            versions = frozenset(int(number) for number in status["versions"])
            refused = {int(number): str(why) for number, why in status["refused"].items()}
            draining = bool(status["draining"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ProtocolError(f"an invalid status: {error!r}") from error
        with self._changed:
            self.versions, self.refused = versions, refused
            self.checks += 1
            self._failures = 0
            self.healthy, self.down = True, False
            self.problem = "it is stopping" if draining else ""
            self._changed.notify_all()

    def _check_failed(self, error: Exception) -> None:
        with self._changed:
            self.checks += 1
            self._failures += 1
            self.healthy = False
            self.problem = _error_text(error)
            # This process may have been the slow side: only a refusal or repeated failures count.
            if isinstance(error, ConnectionRefusedError) or self._failures >= _FAILED_CHECKS:
                self.down = True
            self._changed.notify_all()

    def _check_shard(self, status: Mapping[str, Any]) -> None:
        if status.get("shard") != self.shard:
            raise ConnectionRefusedError(
                f"it serves shard {status.get('shard')}, but serve.lookup.shards lists it for shard {self.shard}"
            )

    def _close_stale(self) -> None:
        """Close connections that were idle for too long, or whose pending answer does not arrive."""
        now = time.monotonic()
        for _ in range(len(self._idle)):
            try:
                connection = self._idle.popleft()
            except IndexError:
                return
            if now - connection.last_used > (_PENDING_SECONDS if connection.has_pending else _IDLE_SECONDS):
                connection.close()
            else:
                self._idle.append(connection)


def _error_text(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
