"""Rows from lookup servers equal the rows of mapped files bit by bit; servers that do not answer."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from fleet import (
    PARTS,
    addresses,
    assert_same,
    call,
    certificate_in,
    constant_blocks,
    eventually,
    in_process_server,
    in_process_servers,
    opened,
    publish,
    random_blocks,
    random_delta,
    registry_in,
)

from clickline.errors import ArtifactError, RequestRefused
from clickline.scoring import lookup_pool
from clickline.scoring.lookup_pool import LookupPool, client_tls
from clickline.scoring.remote_rows import RemoteRows

LONG_TIMEOUTS = {"timeout": 10.0, "hedge": 5.0}  # so that a busy machine does not fail these tests


@pytest.mark.parametrize("cache", [0, 64, 100_000])
@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
def test_remote_gather_equals_mapped_files(precision, cache, tmp_path):
    registry = registry_in(tmp_path)
    base = publish(registry, random_blocks(1), precision=precision, shards=3)
    first = publish(registry, random_delta(2), precision=precision, shards=3, parent=base)
    number = publish(registry, random_delta(3), precision=precision, shards=3, parent=first)
    local = opened(registry, number)
    with (
        in_process_servers(registry, [number], shards=3) as servers,
        LookupPool(addresses(servers), **LONG_TIMEOUTS) as lookups,
    ):
        remote = RemoteRows(lookups, number, PARTS, precision, cache=cache, missing="unavailable")
        for seed, rows in enumerate([100, 1, 7, 3000, 100, 100]):
            batch = call(seed % 4, rows)
            assert_same(batch.gather(remote), batch.gather(local))
        assert (lookups.stats.cache_hits > 0) == (cache > 0)
        assert lookups.stats.failovers == 0


def test_each_distinct_id_is_looked_up_once(tmp_path):
    registry = registry_in(tmp_path)
    number = publish(registry, random_blocks(1))
    batch = call(0, 500)
    with (
        in_process_servers(registry, [number]) as servers,
        LookupPool(addresses(servers), **LONG_TIMEOUTS) as lookups,
    ):
        batch.gather(RemoteRows(lookups, number, PARTS, "fp32"))
        keys = sum(replicas[0].server.counts()["keys"] for replicas in servers)
        assert keys == np.unique(batch.bags.ids_N).size == lookups.stats.keys
        assert lookups.stats.requests == 2


def test_cached_rows_are_not_looked_up_again(tmp_path):
    registry = registry_in(tmp_path)
    number = publish(registry, random_blocks(1))
    batch = call(0, 200)
    with (
        in_process_servers(registry, [number]) as servers,
        LookupPool(addresses(servers), **LONG_TIMEOUTS) as lookups,
    ):
        remote = RemoteRows(lookups, number, PARTS, "fp32", cache=1 << 20)
        first = batch.gather(remote)
        looked_up = lookups.stats.keys
        assert_same(batch.gather(remote), first)
        assert lookups.stats.keys - looked_up < 0.01 * looked_up  # except two ids that share a cache slot


def test_many_threads_share_a_pool(tmp_path):
    registry = registry_in(tmp_path)
    number = publish(registry, random_blocks(1))
    local = opened(registry, number)
    with (
        in_process_servers(registry, [number], replicas=2) as servers,
        LookupPool(addresses(servers), **LONG_TIMEOUTS) as lookups,
    ):
        remote = RemoteRows(lookups, number, PARTS, "fp32", missing="unavailable", cache=300)

        def work(seed: int) -> None:
            for n in range(20):
                batch = call(seed * 100 + n, 50)
                assert_same(batch.gather(remote), batch.gather(local))

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(work, range(8)))


def test_call_without_ids_sends_no_request(tmp_path):
    registry = registry_in(tmp_path)
    number = publish(registry, random_blocks(1))
    batch = call(0, 0)
    with (
        in_process_servers(registry, [number]) as servers,
        LookupPool(addresses(servers), **LONG_TIMEOUTS) as lookups,
    ):
        batch.gather(RemoteRows(lookups, number, PARTS, "fp32"))
        assert lookups.stats.requests == 0


def test_large_answers_arrive_in_pieces(tmp_path):
    """More rows than the server sends in one piece."""
    registry = registry_in(tmp_path)
    number = publish(registry, random_blocks(1), shards=1)
    local = opened(registry, number)
    rng = np.random.default_rng(0)
    batch = call(0, 20_000)
    batch.bags.ids_N[:] = rng.integers(0, 2**64, batch.bags.ids_N.size, dtype=np.uint64)
    batch.bags.ids_N[::3] = rng.choice(call(1, 5000).bags.ids_N, batch.bags.ids_N[::3].size)
    with (
        in_process_servers(registry, [number], shards=1) as servers,
        LookupPool(addresses(servers), timeout=20) as lookups,
    ):
        remote = RemoteRows(lookups, number, PARTS, "fp32", missing="unavailable")
        assert_same(batch.gather(remote), batch.gather(local))
        assert_same(call(0, 10).gather(remote), call(0, 10).gather(local))


# ── servers that do not answer ─────────────────────────────────────────────────────────────────


def test_lost_shard_gives_default_rows_and_counts_them(tmp_path):
    registry = registry_in(tmp_path)
    number = publish(registry, random_blocks(1))
    batch = call(0, known=True)
    with (
        in_process_servers(registry, [number]) as servers,
        LookupPool(addresses(servers), **LONG_TIMEOUTS) as lookups,
    ):
        remote = RemoteRows(lookups, number, PARTS, "fp32", missing="default")
        batch.gather(remote)
        servers[1][0].server.stop(10)
        inputs_BI, wide_B, misses_S = batch.gather(remote)
        half = opened(registry, number, [0])  # an id of the other shard is not found there
        assert_same((inputs_BI, wide_B, misses_S), batch.gather(half))
        assert lookups.stats.default_lookups == misses_S.sum() > 0
        assert lookups.stats.shards_lost == 1


def test_lost_shard_makes_requests_unavailable_if_configured(tmp_path):
    registry = registry_in(tmp_path)
    number = publish(registry, random_blocks(1))
    with (
        in_process_servers(registry, [number]) as servers,
        LookupPool(addresses(servers), **LONG_TIMEOUTS) as lookups,
    ):
        remote = RemoteRows(lookups, number, PARTS, "fp32", missing="unavailable")
        call(0).gather(remote)
        gone = servers[1][0]
        gone.server.stop(10)
        for _ in range(3):  # also when it is known to be down
            with pytest.raises(
                RequestRefused, match=f"no lookup server of shard 1 answers: {gone.address}"
            ) as refused:
                call(0).gather(remote)
            assert refused.value.kind == "unavailable"
        assert lookups.stats.default_lookups == 0


def test_recovered_shard_is_used_again(tmp_path):
    registry = registry_in(tmp_path)
    number = publish(registry, random_blocks(1), shards=1)
    tables = {number: opened(registry, number)}
    with in_process_server(0, tables) as server, LookupPool([[server.address]], **LONG_TIMEOUTS) as lookups:
        remote = RemoteRows(lookups, number, PARTS, "fp32", missing="unavailable")
        server.versions.open = {}
        with pytest.raises(
            RequestRefused, match=rf"{server.address}: it has loaded version none, not {number}"
        ):
            call(0).gather(remote)
        with in_process_server(0, tables) as other:
            server.versions.open = other.versions.open
            assert_same(call(0).gather(remote), call(0).gather(tables[number]))


def test_replica_without_the_version_is_skipped(tmp_path):
    registry = registry_in(tmp_path)
    old, new = (
        publish(registry, constant_blocks(1), shards=1),
        publish(registry, constant_blocks(2), shards=1),
    )
    with (
        in_process_server(0, {old: opened(registry, old)}) as behind,
        in_process_server(0, {new: opened(registry, new)}) as ahead,
        LookupPool([[behind.address, ahead.address]], **LONG_TIMEOUTS) as lookups,
    ):
        for number, value in ((new, 2), (old, 1)):
            remote = RemoteRows(lookups, number, PARTS, "fp32", missing="unavailable")
            for seed in range(6):
                inputs_BI, _, _ = call(seed, known=True).gather(remote)
                assert set(np.unique(inputs_BI[:, :9])) == {value}


def test_server_of_another_shard_is_rejected(tmp_path):
    registry = registry_in(tmp_path)
    number = publish(registry, random_blocks(1))
    with in_process_servers(registry, [number]) as servers:
        swapped = addresses(servers)[::-1]
        with LookupPool(swapped, **LONG_TIMEOUTS) as lookups:
            assert (
                "it serves shard 1, but serve.lookup.shards lists it for shard 0"
                in lookups.health()[swapped[0][0]]
            )
            assert f"{swapped[0][0]} is not used: it serves shard 1, but" in str(lookups.ready(number, 0.1))
            with pytest.raises(RequestRefused, match="it serves shard"):
                call(0).gather(RemoteRows(lookups, number, PARTS, "fp32", missing="unavailable"))


def test_version_with_a_different_number_of_shards_is_refused(tmp_path):
    registry = registry_in(tmp_path)
    number = publish(registry, random_blocks(1), shards=3)
    with (
        in_process_servers(registry, [number], shards=1) as servers,
        LookupPool(addresses(servers), **LONG_TIMEOUTS) as lookups,
        pytest.raises(ArtifactError, match=r"has 3 shards, serve\.lookup\.shards lists 1"),
    ):
        RemoteRows.for_version(lookups, registry.version(number).manifest)


class DelayingProxy:
    """A proxy between predictor and server that can delay or hold back the server's answers."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self.flowing = threading.Event()
        self.flowing.set()
        self.delay = 0.0  # of each answer
        self._sockets = [self._listening]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                ours, _ = self._listening.accept()
            except OSError:
                return
            theirs = socket.create_connection(self._target)
            self._sockets += [ours, theirs]
            threading.Thread(target=self._carry, args=(ours, theirs, False), daemon=True).start()
            threading.Thread(target=self._carry, args=(theirs, ours, True), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, held: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                if held:
                    self.flowing.wait(20)
                    time.sleep(self.delay)
                target.sendall(data)
        except OSError:
            pass

    def close(self) -> None:
        self.flowing.set()
        for one in self._sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


def test_answer_after_its_hedge_is_dropped(tmp_path):
    """The late answer belongs to an earlier call; used for the next one it would give wrong rows."""
    registry = registry_in(tmp_path)
    number = publish(registry, random_blocks(1), shards=1)
    local = opened(registry, number)
    with in_process_server(0, {number: local}) as slow, in_process_server(0, {number: local}) as other:
        between = DelayingProxy(slow.address)
        try:
            with LookupPool([[between.address, other.address]], timeout=5, hedge=0.05) as lookups:
                remote = RemoteRows(lookups, number, PARTS, "fp32", missing="unavailable")
                for seed in range(4):  # both replicas have a connection
                    call(seed).gather(remote)
                between.flowing.clear()
                for seed in range(6):
                    assert_same(call(seed).gather(remote), call(seed).gather(local))
                assert lookups.stats.hedges >= 1
                between.flowing.set()
                eventually(lambda: not any(lookups.health().values()))
                late = eventually(lambda: [call(9).gather(remote), lookups.stats.late_answers][1], seconds=10)
                assert late == lookups.stats.hedges
                for seed in range(20):
                    assert_same(call(seed).gather(remote), call(seed).gather(local))
        finally:
            between.close()


def test_slow_replica_costs_no_more_than_the_hedge(tmp_path):
    registry = registry_in(tmp_path)
    number = publish(registry, random_blocks(1), shards=1)
    local = opened(registry, number)
    with in_process_server(0, {number: local}) as slow, in_process_server(0, {number: local}) as other:
        between = DelayingProxy(slow.address)
        try:
            with LookupPool([[between.address, other.address]], timeout=20, hedge=0.1) as lookups:
                remote = RemoteRows(lookups, number, PARTS, "fp32", missing="unavailable")
                for seed in range(4):
                    call(seed).gather(remote)
                between.flowing.clear()
                times = []
                for seed in range(20):
                    began = time.monotonic()
                    call(seed).gather(remote)
                    times.append(time.monotonic() - began)
                assert max(times) < 2  # not the timeout
                assert sum(took > 0.09 for took in times) <= 4  # once known to be slow, it is tried last
        finally:
            between.close()


def test_hedging_is_limited_if_all_replicas_are_slow(tmp_path, monkeypatch):
    """They are already overloaded."""
    monkeypatch.setattr(lookup_pool, "_MAX_HEDGES", 3.0)
    registry = registry_in(tmp_path)
    number = publish(registry, random_blocks(1), shards=1)
    local = opened(registry, number)
    with in_process_server(0, {number: local}) as one, in_process_server(0, {number: local}) as other:
        between = [DelayingProxy(one.address), DelayingProxy(other.address)]
        try:
            with LookupPool([[slow.address for slow in between]], timeout=10, hedge=0.005) as lookups:
                remote = RemoteRows(lookups, number, PARTS, "fp32", missing="unavailable")
                for seed in range(4):
                    call(seed).gather(remote)
                for slow in between:
                    slow.delay = 0.03
                for seed in range(50):
                    assert_same(call(seed).gather(remote), call(seed).gather(local))
                stats = lookups.stats
                assert 3 <= stats.hedges <= 3 + 0.1 * stats.requests
                assert stats.hedges + stats.hedges_held_back >= 25
        finally:
            for slow in between:
                slow.close()


def test_slow_replicas_are_reported_after_the_timeout(tmp_path):
    registry = registry_in(tmp_path)
    number = publish(registry, random_blocks(1), shards=1)
    local = opened(registry, number)
    with in_process_server(0, {number: local}) as server:
        between = DelayingProxy(server.address)
        try:
            with LookupPool([[between.address]], timeout=0.3) as lookups:
                remote = RemoteRows(lookups, number, PARTS, "fp32", missing="unavailable")
                call(0).gather(remote)
                between.flowing.clear()
                began = time.monotonic()
                with pytest.raises(RequestRefused, match="no answer within 300 ms"):
                    call(0).gather(remote)
                assert 0.25 < time.monotonic() - began < 5
        finally:
            between.close()


# ── loading of versions ────────────────────────────────────────────────────────────────────────


def test_ready_waits_only_for_replicas_that_are_loading(tmp_path):
    registry = registry_in(tmp_path)
    old, new = publish(registry, constant_blocks(1)), publish(registry, constant_blocks(2))
    with in_process_servers(registry, [old], replicas=2) as servers:
        listed = addresses(servers)
        dead = socket.create_server(("127.0.0.1", 0))
        listed[1].append(f"127.0.0.1:{dead.getsockname()[1]}")
        dead.close()
        with LookupPool(listed, **LONG_TIMEOUTS) as lookups:
            report = lookups.ready(old, 10)
            assert report.ready and len(report.loaded) == 4
            assert report.unreachable == {listed[1][2]: "Connection refused"}
            report = lookups.ready(new, 0.3)
            assert not report.ready and report.lost_shards == (0, 1) and len(report.pending) == 4

            def load() -> None:
                for shard, replicas in enumerate(servers):
                    for here in replicas:
                        with in_process_server(shard, {new: opened(registry, new, [shard])}) as made:
                            here.versions.open = {**here.versions.open, **made.versions.open}

            loading = threading.Thread(target=load)
            loading.start()
            report = lookups.ready(new, 20)
            loading.join()
            assert report.ready and len(report.loaded) == 4 and not report.pending

            servers[0][0].versions.open = {}
            servers[0][0].versions.refused = {new: "its file is damaged"}
            report = lookups.ready(new, 10)
            assert report.ready and report.refused == {listed[0][0]: "its file is damaged"}
            assert "refused it: its file is damaged" in str(report)


def test_hanging_replica_does_not_delay_ready(tmp_path):
    registry = registry_in(tmp_path)
    number = publish(registry, random_blocks(1), shards=1)
    with in_process_servers(registry, [number], shards=1) as servers:
        between = DelayingProxy(servers[0][0].address)
        try:
            with LookupPool([[servers[0][0].address, between.address]], timeout=0.2) as lookups:
                between.flowing.clear()
                began = time.monotonic()
                report = lookups.ready(number, 20)
                assert time.monotonic() - began < 5
                assert report.ready and report.unreachable == {between.address: "no answer"}
        finally:
            between.close()


# ── TLS and token ──────────────────────────────────────────────────────────────────────────────


def test_tls_and_token(tmp_path):
    registry = registry_in(tmp_path)
    number = publish(registry, random_blocks(1))
    local = opened(registry, number)
    certificate, key = certificate_in(tmp_path)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate, key)
    with in_process_servers(registry, [number], token="secret", tls=tls) as servers:
        trusted = client_tls(str(certificate))
        with LookupPool(addresses(servers), token="secret", tls=trusted, timeout=5) as lookups:
            remote = RemoteRows(lookups, number, PARTS, "fp32", missing="unavailable")
            for seed, rows in enumerate((50, 5000, 50)):  # TLS records are 16 KiB
                assert_same(call(seed, rows).gather(remote), call(seed, rows).gather(local))
        for token in (None, "other"):
            with LookupPool(addresses(servers), token=token, tls=trusted, **LONG_TIMEOUTS) as lookups:
                assert set(lookups.health().values()) == {
                    "the token is missing or wrong: both sides need the same serve.token_file"
                }
        with LookupPool(addresses(servers), token="secret", tls=client_tls(None), **LONG_TIMEOUTS) as lookups:
            assert all("certificate verify failed" in trouble for trouble in lookups.health().values())
        with LookupPool(addresses(servers), token="secret", **LONG_TIMEOUTS) as lookups:
            assert all(lookups.health().values())
        sent = sum(replicas[0].server.counts()["requests"] for replicas in servers)
        assert sent == 6  # none of the other calls


def test_ca_that_is_not_a_pem_file_is_named(tmp_path):
    from clickline.errors import ClicklineError

    with pytest.raises(ClicklineError, match=r"serve\.tls\.ca .*nowhere\.pem cannot be used"):
        client_tls(str(Path(tmp_path, "nowhere.pem")))
