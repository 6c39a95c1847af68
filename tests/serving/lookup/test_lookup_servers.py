"""Real lookup servers that are killed, suspended and restarted, and get new versions, while predictors use them."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from fleet import (
    COMMAND,
    PARTS,
    Server,
    addresses,
    assert_same,
    call,
    certificate_in,
    constant_blocks,
    eventually,
    fleet,
    opened,
    publish,
    random_blocks,
    registry_in,
)

from clickline.scoring.lookup_pool import LookupPool, client_tls
from clickline.scoring.remote_rows import RemoteRows

pytestmark = pytest.mark.slow


class Load:
    """Threads that gather without a pause, and their errors."""

    def __init__(self, work: Callable[[int], None], threads: int = 3) -> None:
        self.done = 0
        self.slowest = 0.0
        self.errors: list[BaseException] = []
        self._work = work
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(threads)]

    def _run(self, n: int) -> None:
        seed = n
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                self._work(seed)
            except BaseException as error:  # noqa: BLE001 - raised by the test
                self.errors.append(error)
                return
            self.slowest = max(self.slowest, time.monotonic() - began)
            self.done += 1
            seed += 10

    def wait_for(self, calls: int) -> None:
        """Wait for `calls` more calls."""
        until = self.done + calls
        eventually(lambda: self.errors or self.done >= until)
        assert not self.errors, self.errors[0]

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)

    @classmethod
    @contextmanager
    def of(cls, work: Callable[[int], None]) -> Iterator[Load]:
        load = cls(work)
        for thread in load._threads:
            thread.start()
        try:
            yield load
        finally:
            load.end()
        assert not load.errors, load.errors[0]


def test_killed_and_restarted_replicas_fail_no_call(tmp_path):
    registry = registry_in(tmp_path)
    number = publish(registry, random_blocks(1))
    local = opened(registry, number)
    with fleet(tmp_path) as servers, LookupPool(addresses(servers), timeout=5, hedge=1) as lookups:
        assert len(lookups.ready(number, 10).loaded) == 4
        remote = RemoteRows(lookups, number, PARTS, "fp32", missing="unavailable")

        def work(seed: int) -> None:
            batch = call(seed % 50)
            assert_same(batch.gather(remote), batch.gather(local))

        with Load.of(work) as load:
            load.wait_for(200)
            for victim in (servers[0][1], servers[1][0]):
                victim.signal(signal.SIGKILL)
                assert victim.end() == -signal.SIGKILL
                load.wait_for(300)
                eventually(lambda victim=victim: lookups.health()[victim.address])
                victim.start()
                victim.wait()
                eventually(lambda victim=victim: not lookups.health()[victim.address])
                load.wait_for(200)
        assert lookups.stats.default_lookups == 0 == lookups.stats.shards_lost
        assert lookups.stats.failovers > 0


def test_sigterm_finishes_running_lookups(tmp_path):
    registry = registry_in(tmp_path)
    number = publish(registry, random_blocks(1), shards=1)
    local = opened(registry, number)
    with fleet(tmp_path, shards=1) as servers, LookupPool(addresses(servers), timeout=5, hedge=1) as lookups:
        remote = RemoteRows(lookups, number, PARTS, "fp32", missing="unavailable")

        def work(seed: int) -> None:
            assert_same(call(seed % 50).gather(remote), call(seed % 50).gather(local))

        with Load.of(work) as load:
            load.wait_for(100)
            process = servers[0][0].process
            assert process is not None
            servers[0][0].signal(signal.SIGTERM)
            assert process.wait(20) == 0
            load.wait_for(100)
        assert servers[0][0].events("stopped")
        assert lookups.stats.shards_lost == 0


def test_a_stopped_replica_is_hedged(tmp_path):
    """With SIGSTOP the kernel still accepts connections, but nothing answers."""
    registry = registry_in(tmp_path)
    number = publish(registry, random_blocks(1), shards=1)
    local = opened(registry, number)
    with (
        fleet(tmp_path, shards=1) as servers,
        LookupPool(addresses(servers), timeout=20, hedge=0.1) as lookups,
    ):
        remote = RemoteRows(lookups, number, PARTS, "fp32", missing="unavailable")

        def work(seed: int) -> None:
            assert_same(call(seed % 50).gather(remote), call(seed % 50).gather(local))

        with Load.of(work) as load:
            load.wait_for(100)
            load.slowest = 0.0
            servers[0][0].signal(signal.SIGSTOP)
            load.wait_for(500)
            assert load.slowest < 5  # the hedge and a busy machine, not the timeout
            assert lookups.stats.hedges > 0
            assert list(lookups.ready(number, 10).unreachable) == [servers[0][0].address]
            servers[0][0].signal(signal.SIGCONT)
            eventually(lambda: not any(lookups.health().values()))
            load.wait_for(100)
        assert lookups.stats.shards_lost == 0


def test_versions_switch_under_load_and_never_mix(tmp_path):
    registry = registry_in(tmp_path)
    first = publish(registry, constant_blocks(1))
    with fleet(tmp_path) as servers, LookupPool(addresses(servers), timeout=10, hedge=5) as lookups:
        switching = threading.Lock()
        rows: dict[int, RemoteRows] = {}
        current = first

        def use(number: int) -> None:
            nonlocal current
            report = lookups.ready(number, 20)
            assert report.ready and len(report.loaded) == 4, str(report)
            with switching:
                rows[number] = RemoteRows(lookups, number, PARTS, "fp32", missing="unavailable", cache=200)
                current = number

        def work(seed: int) -> None:
            with switching:
                number = current
                source = rows[number]
            inputs_BI, _, misses_S = call(seed % 50, known=True).gather(source)
            assert misses_S.sum() == 0
            assert set(np.unique(inputs_BI[:, :18])) == {number}

        use(first)
        with Load.of(work) as load:
            for value in range(2, 12):
                before = current
                use(publish(registry, constant_blocks(value)))
                assert current == value
                load.wait_for(20)
                inputs_BI, _, _ = call(0, known=True).gather(rows[before])  # still answers
                assert set(np.unique(inputs_BI[:, :18])) == {before}
        registry.move(3, "back", after=registry.current())
        use(3)
        work(0)
        assert lookups.stats.shards_lost == 0


def test_damaged_version_is_refused_and_the_old_one_answers(tmp_path):
    registry = registry_in(tmp_path)
    old = publish(registry, random_blocks(1))
    local = opened(registry, old)
    with fleet(tmp_path, replicas=1) as servers, LookupPool(addresses(servers), timeout=5) as lookups:
        new = publish(registry, random_blocks(2), current=False)
        table = next(Path(registry.version(new).folder).glob("table-00001-*"))
        whole = table.read_bytes()
        table.write_bytes(whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:])
        registry.move(new, "test", after=registry.current())
        eventually(lambda: lookups.ready(new, 0.1).refused)
        report = lookups.ready(new, 0.5)
        assert not report.ready and report.loaded == (servers[0][0].address,) and report.lost_shards == (1,)
        assert "is damaged" in report.refused[servers[1][0].address]
        assert servers[1][0].events("a version was refused")[0]["open"] == [old]
        remote = RemoteRows(lookups, old, PARTS, "fp32", missing="unavailable")
        assert_same(call(0).gather(remote), call(0).gather(local))
        table.write_bytes(whole)  # repaired: it is retried
        assert lookups.ready(new, 20).ready
        repaired = RemoteRows(lookups, new, PARTS, "fp32", missing="unavailable")
        assert_same(call(0).gather(repaired), call(0).gather(opened(registry, new)))


def test_command_reports_what_it_serves_and_starts_before_the_first_version(tmp_path):
    registry = registry_in(tmp_path)
    server = Server(tmp_path, 1)
    try:
        server.start()
        server.wait()
        assert server.up["version"] is None and server.up["shard"] == 1
        assert get(server, "/healthz") == (200, "live\n")
        assert get(server, "/readyz") == (503, "no version is open yet\n")
        with LookupPool([["127.0.0.1:1"], [server.address]], timeout=5) as lookups:
            assert lookups.ready(1, 0.1).pending == (server.address,)
            number = publish(registry, random_blocks(1))
            eventually(lambda: lookups.ready(number, 0.1).loaded)
            report = lookups.ready(number, 0.1)
            assert report.loaded == (server.address,) and not report.ready and report.lost_shards == (0,)
        assert get(server, "/readyz") == (200, "ready\nversion 1\n")
        metrics = get(server, "/metrics")[1]
        assert f"clickline_lookup_version {float(number)}" in metrics
        assert "clickline_lookup_keys_total 0.0" in metrics
        assert get(server, "/else")[0] == 404
    finally:
        server.end()
    again = Server(tmp_path, 1)
    try:
        again.start()
        again.wait()
        assert (again.up["version"], again.up["shards"]) == (number, 2)
        assert again.up["rows"] == opened(registry, number, [1]).rows
        assert again.up["bytes"] > 0
    finally:
        again.end()


def test_unknown_shard_is_refused_with_the_valid_range(tmp_path):
    publish(registry_in(tmp_path), random_blocks(1), shards=3)
    config = tmp_path / "clickline.yaml"
    config.write_text(json.dumps({"data": {"train": ["nothing.tsv"]}, "home": str(tmp_path)}))
    done = subprocess.run(
        [*COMMAND, "--shard", "3", "--port", "0", "-c", str(config)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    assert "there is no shard 3: version 1 has 3, numbered 0 … 2. Choose one with --shard." in done.stderr


def test_metrics_port_in_use_is_reported(tmp_path):
    publish(registry_in(tmp_path), random_blocks(1), shards=1)
    first = Server(tmp_path, 0)
    second = Server(tmp_path, 0, metrics_port=first.metrics_port)
    try:
        first.start()
        first.wait()
        second.start()
        message = f"serve.metrics_port: 127.0.0.1:{first.metrics_port} cannot be listened on"
        with pytest.raises(AssertionError, match=message):
            second.wait()
    finally:
        first.end()
        second.end()


def test_tls_and_token_from_the_config_are_required(tmp_path):
    registry = registry_in(tmp_path)
    number = publish(registry, random_blocks(1), shards=1)
    certificate, key = certificate_in(tmp_path)
    token = tmp_path / "token"
    token.write_text("secret\n")
    settings = {
        "serve.tls.certificate": certificate,
        "serve.tls.key": key,
        "serve.token_file": token,
    }
    with fleet(tmp_path, shards=1, replicas=1, settings=settings) as servers:
        trusted = client_tls(str(certificate))
        with LookupPool(addresses(servers), token="secret", tls=trusted, timeout=5) as lookups:
            remote = RemoteRows(lookups, number, PARTS, "fp32", missing="unavailable")
            assert_same(call(0).gather(remote), call(0).gather(opened(registry, number)))
        with LookupPool(addresses(servers), token="wrong", tls=trusted, timeout=5) as lookups:
            assert "token" in lookups.health()[servers[0][0].address]
        server = servers[0][0]
        assert get(server, "/healthz", tls=trusted)[0] == 200
        assert get(server, "/metrics", tls=trusted)[0] == 401
        assert get(server, "/metrics", tls=trusted, token="secret")[0] == 200


def get(server: Server, path: str, tls=None, token: str | None = None) -> tuple[int, str]:
    if tls is None:
        connection = http.client.HTTPConnection("127.0.0.1", server.metrics_port, timeout=20)
    else:
        connection = http.client.HTTPSConnection("127.0.0.1", server.metrics_port, timeout=20, context=tls)
    try:
        connection.request("GET", path, headers={} if token is None else {"Authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()
