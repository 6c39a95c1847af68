"""A line between two processes that is slow, or on which nothing comes through for a while."""

from __future__ import annotations

import threading
from pathlib import Path

import grpc
import httpx
import pytest
import yaml
from faulty_machine import Line
from service import answered, command, predict_request, predictor, standing_in
from standin import publish as publish_standin

from clickline.config import load_config
from clickline.errors import StorageError
from clickline.publishing.run import publish
from clickline.storage import filesystems
from clickline.storage.file_cache import FileCache
from clickline.storage.storage import Storage
from servers.s3 import s3_server
from servers.waiting import eventually
from servers.web import web_server
from servers.webhdfs import webhdfs_server


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two minutes of silence are too long for a test."""
    monkeypatch.setattr(filesystems, "_READ_SECONDS", 0.5)


# ── asking a server ────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_slow_connection_costs_time_and_a_dead_one_the_deadline(tmp_path: Path) -> None:
    publish_standin(tmp_path / "versions", 1)
    with standing_in(tmp_path) as service:
        service.wait_up()
        with Line(service.grpc_port) as line:
            line.delay, line.piece = 0.01, 50
            with grpc.insecure_channel(f"127.0.0.1:{line.port}") as channel:
                predict = predictor(channel)
                assert answered(predict(predict_request(rows=20), timeout=60)) == 1
                line.stall()
                with pytest.raises(grpc.RpcError) as caught:
                    predict(predict_request(), timeout=0.5)
                assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                assert service.version() == 1  # others are answered
                line.flow()
                assert answered(predict(predict_request(), timeout=60)) == 1


# ── a registry far away ────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_slow_or_hanging_registry_stops_no_server(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    file = project / "clickline.yaml"
    with s3_server() as endpoint, Line(int(endpoint.rpartition(":")[2])) as line:
        httpx.put(f"{endpoint}/ads", timeout=30).raise_for_status()
        options = {
            "client_kwargs": {"endpoint_url": f"http://127.0.0.1:{line.port}"},
            "config_kwargs": {"retries": {"max_attempts": 0}, "connect_timeout": 1, "read_timeout": 1},
        }
        document = yaml.safe_load(file.read_text())
        document |= {"publish": {"registry": "s3://ads/registry"}, "storage": {"options": {"s3": options}}}
        file.write_text(yaml.safe_dump(document))
        line.delay = 0.005  # each way
        publish(load_config(file))
        with command(project) as service:
            assert service.wait_up()["version"] == 1

            def version() -> int:
                asked = {"instances": [{}]}
                reply = httpx.post(service.url("/v1/models/ctr:predict"), json=asked, timeout=60)
                assert reply.status_code == 200, reply.text
                return int(reply.headers["clickline-version"])

            line.stall()
            eventually(lambda: service.metrics()["clickline_registry_unreachable"] == 1)
            assert version() == 1 and service.admin("/readyz").status_code == 200
            with pytest.raises(StorageError, match="the store did not answer"):
                publish(load_config(file, ["publish.sample_rows=100"]))
            line.flow()
            eventually(lambda: service.metrics()["clickline_registry_unreachable"] == 0)
            publish(load_config(file, ["publish.sample_rows=100"]))
            eventually(lambda: version() == 2, 60)


# ── sources that fall silent ───────────────────────────────────────────────────────────────────


@pytest.mark.usefixtures("impatient")
def test_silent_source_is_given_up_and_resumed_later(tmp_path: Path) -> None:
    with web_server() as web:
        content = bytes(range(256)) * 2000
        web.files["/a.tsv"] = content
        web.stop_after = 100_000
        storage = Storage({}, None)
        cache = FileCache(tmp_path / "cache", 1 << 20, storage)
        (file,) = storage.list(f"{web.url}/a.tsv")
        with pytest.raises(StorageError, match="the store did not answer"), cache.local(file):
            pass
        web.stop_after, web.bytes_sent = None, 0
        with cache.local(file) as path:
            assert Path(path).read_bytes() == content
        assert web.bytes_sent < len(content)


@pytest.mark.usefixtures("impatient")
def test_hanging_hdfs_is_given_up() -> None:
    with webhdfs_server() as node, Line(int(node.address.rpartition(":")[2])) as line:
        line.stall()
        done = threading.Event()
        found: list[BaseException] = []

        def read() -> None:
            try:
                Storage({}, None).read(f"webhdfs://127.0.0.1:{line.port}/a")
            except StorageError as error:
                found.append(error)
            done.set()

        threading.Thread(target=read, daemon=True).start()
        assert done.wait(30), "it waits for ever"
        assert "the store did not answer" in str(found[0])
