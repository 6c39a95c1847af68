"""The whole server: real processes, real sockets, real clients."""

from __future__ import annotations

import concurrent.futures
import datetime
import ipaddress
import json
import os
import resource
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from service import (
    Load,
    Service,
    answered,
    predict_request,
    predictor,
    running,
    standing_in,
)
from standin import publish

from clickline.config.sections import ServeSection, TlsSection
from clickline.errors import ClicklineError
from clickline.serving.auth import server_tls
from servers.waiting import eventually, free_ports

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A server with two processes and version 5, for tests that do not change it."""
    folder = tmp_path_factory.mktemp("shared")
    publish(folder / "versions", 5)
    with standing_in(folder, processes=2, aliases=["recommender"], max_body="1MiB") as service:
        assert service.wait_up() == {"version": 5, "processes": 2}
        yield service


def refused(service: Service, body: bytes, **more: Any) -> tuple[str, str]:
    with service.channel() as channel, pytest.raises(grpc.RpcError) as caught:
        predictor(channel)(body, timeout=more.pop("timeout", 20), **more)
    return caught.value.code().name, caught.value.details()  # type: ignore[attr-defined]


def health(service: Service, name: str = "") -> str:
    with service.channel() as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        found = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=10).status
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(found))


class TestAnswers:
    def test_http_and_grpc_answer_with_the_same_version(self, shared: Service) -> None:
        reply = shared.post(rows=3)
        scores = [row["logistic"] for row in reply.json()["predictions"]]
        assert (reply.status_code, scores) == (200, [[5 / 1024]] * 3)
        assert shared.version() == 5

    def test_names_and_versions(self, shared: Service) -> None:
        for name, version in (("ctr", None), ("recommender", None), ("ctr", 5)):
            with shared.channel() as channel:
                answer = predictor(channel)(predict_request(name=name, version=version), timeout=20)
            assert answered(answer) == 5
        assert refused(shared, predict_request(name="other")) == (
            "NOT_FOUND",
            'There is no model "other". Available: "ctr", "recommender".',
        )
        code, message = refused(shared, predict_request(version=4))
        assert code == "NOT_FOUND" and "Version 5 is" in message
        reply = httpx.post(
            shared.url("/v1/models/other:predict"), json={"instances": [{"I1": 1}]}, timeout=20
        )
        assert reply.status_code == 404 and "recommender" in reply.json()["error"]

    def test_too_large_body_is_refused_with_a_message(self, shared: Service) -> None:
        body = predict_request(rows=300_000)
        assert 2**20 < len(body) < 2**21
        code, message = refused(shared, body)
        assert code == "INVALID_ARGUMENT" and "1048576 are allowed (serve.max_body)" in message
        reply = shared.post(rows=150_000)
        assert reply.status_code == 400 and "1048576 bytes (serve.max_body)" in reply.json()["error"]

        def pieces() -> Iterator[bytes]:  # without a Content-Length
            for _ in range(100):
                yield b" " * 20_000

        reply = httpx.post(shared.url("/v1/models/ctr:predict"), content=pieces(), timeout=20)
        assert reply.status_code == 400 and "1048576 bytes" in reply.json()["error"]
        assert refused(shared, b"\0" * (2**21 + 100))[0] == "INVALID_ARGUMENT"  # before all of it has arrived

    def test_deadlines(self, shared: Service) -> None:
        assert refused(shared, predict_request(300), timeout=0.1)[0] == "DEADLINE_EXCEEDED"
        reply = shared.post(headers={"X-Request-Timeout-Ms": "0"})
        assert reply.status_code == 504 and "Nothing was computed" in reply.json()["error"]
        assert shared.post(headers={"X-Request-Timeout-Ms": "20000"}).status_code == 200
        reply = shared.post(headers={"X-Request-Timeout-Ms": "soon"})
        assert reply.status_code == 400 and '"soon"' in reply.json()["error"]

    def test_internal_error_is_an_id_for_the_client_and_a_traceback_in_the_log(self, shared: Service) -> None:
        code, message = refused(shared, predict_request(666))
        assert code == "INTERNAL" and "Traceback" not in message and "bug" not in message
        identity = message.split()[2].rstrip(".")
        line = next(line for line in shared.log("internal error") if line["id"] == identity)
        assert "ZeroDivisionError" in line["traceback"]
        assert shared.post(666).status_code == 500

    @pytest.mark.parametrize(
        "path",
        [
            "/v1/models/ctr",
            "/v2",
            "/v2/models/ctr",
            "/v2/health/ready",
            "/openapi.json",
            "/nothing",
            "/v1/models/no",
        ],
    )
    def test_head_has_the_content_length_of_get(self, shared: Service, path: str) -> None:
        found, head = (httpx.request(method, shared.url(path), timeout=20) for method in ("GET", "HEAD"))
        assert (head.status_code, head.content) == (found.status_code, b"")
        assert found.content and head.headers["content-length"] == str(len(found.content))
        assert head.headers["content-type"] == found.headers["content-type"]

    def test_wrong_method_is_answered_with_the_allowed_ones(self, shared: Service) -> None:
        info = ("/v1/models/ctr", "/v1/models/ctr/metadata", "/v2", "/v2/health/live", "/v2/models/ctr")
        predictions = ("/v1/models/ctr:predict", "/v1/models/ctr:rank", "/v2/models/ctr/infer")
        elastic = "/ElasticCTRPredictionService/inference"
        for allowed, wrong, paths in (
            ("GET, HEAD", ("POST", "PUT", "DELETE"), (*info, "/openapi.json")),
            ("POST", ("GET", "HEAD", "PUT"), (*predictions, elastic)),
        ):
            for path in paths:
                for method in wrong:
                    reply = httpx.request(method, shared.url(path), timeout=20)
                    assert (reply.status_code, reply.headers.get("allow")) == (405, allowed), (method, path)
        assert "POST is allowed" in httpx.get(shared.url(predictions[0]), timeout=20).json()["error"]
        assert httpx.get(shared.url(elastic), timeout=20).json()["err_code"] == 405
        assert httpx.delete(shared.url("/nothing"), timeout=20).status_code == 404

    def test_admin_port_answers_head_and_refuses_other_methods(self, shared: Service) -> None:
        base = f"http://127.0.0.1:{shared.metrics_port}"
        for path in ("/healthz", "/readyz", "/metrics"):
            head = httpx.head(base + path, timeout=20)
            assert head.status_code == 200 and int(head.headers["content-length"]) > 0 and head.content == b""
            reply = httpx.post(base + path, timeout=20)
            assert (reply.status_code, reply.headers.get("allow")) == (405, "GET, HEAD")
        assert httpx.post(base + "/nothing", timeout=20).status_code == 404

    def test_garbage_is_refused_and_the_server_survives(self, shared: Service) -> None:
        assert refused(shared, b"\xff\xff\xff")[0] == "INVALID_ARGUMENT"
        assert httpx.post(shared.url("/v1/models/ctr:predict"), content=b"{", timeout=20).status_code == 400
        assert httpx.get(shared.url("/nothing"), timeout=20).status_code == 404
        with pytest.raises(grpc.RpcError) as caught, shared.channel() as channel:
            channel.unary_unary("/no.Service/Method")(b"", timeout=20)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert shared.version() == 5

    def test_health_and_reflection(self, shared: Service) -> None:
        assert health(shared) == "SERVING"
        assert health(shared, "tensorflow.serving.PredictionService") == "SERVING"
        with shared.channel() as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            services = set(database.get_services())
            assert {
                "tensorflow.serving.PredictionService",
                "inference.GRPCInferenceService",
                "clickline.v1.Ranking",
                "grpc.health.v1.Health",
            } <= services
            for name in services:
                file = database.FindFileContainingSymbol(name)
                assert any(f"{file.package}.{service.name}" == name for service in file.service)
        assert shared.admin("/healthz").text == "live\n"
        assert shared.admin("/readyz").status_code == 200
        assert shared.admin("/debug").status_code == 404

    def test_reflection_requests_are_limited(self, shared: Service) -> None:
        method = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
        with shared.channel() as channel, pytest.raises(grpc.RpcError) as caught:
            list(channel.stream_stream(method)(iter([b""] * 1500), timeout=30))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert shared.version() == 5

    def test_metrics_are_summed_over_all_processes(self, shared: Service) -> None:
        def by_code(metrics: dict[str, float], code: str, protocol: str) -> float:
            return metrics.get(f'clickline_requests_total{{code="{code}",protocol="{protocol}"}}', 0.0)

        before = shared.metrics()
        for _ in range(10):  # a new connection each, so that both processes get some
            assert shared.version() == 5
            assert shared.post(rows=4).status_code == 200
        refused(shared, predict_request(name="other"))
        after = shared.metrics()
        for code, protocol, count in (
            ("OK", "tfserving_grpc", 10),
            ("200", "tfserving_rest", 10),
            ("NOT_FOUND", "tfserving_grpc", 1),
        ):
            assert by_code(after, code, protocol) - by_code(before, code, protocol) == count
        rows = 'clickline_rows_total{protocol="tfserving_rest"}'
        assert after[rows] - before.get(rows, 0) == 40
        misses = 'clickline_lookup_misses_total{slot="C1"}'
        assert after[misses] - before.get(misses, 0) == 50
        assert after['clickline_request_seconds_count{protocol="tfserving_rest",version="5"}'] >= 10
        assert after['clickline_refused_total{kind="not_found",protocol="tfserving_grpc"}'] >= 1
        assert after["clickline_version"] == 5
        assert after["clickline_version_age_seconds"] > 100
        assert after["clickline_workers"] == 2
        assert after["clickline_registry_unreachable"] == 0
        assert after["clickline_queue_length"] == 0


class TestVersions:
    def test_switches_under_load_fail_no_request_and_mix_no_versions(self, tmp_path: Path) -> None:
        publish(tmp_path / "versions", 1)
        with standing_in(tmp_path, processes=2) as service:
            service.wait_up()
            with Load(service, clients=4, rows=5) as load:
                for number in range(2, 22):
                    publish(tmp_path / "versions", number)
                    eventually(lambda number=number: number in load.versions[-20:])  # type: ignore[misc]
            assert load.failures == []
            assert set(load.versions) == set(range(1, 22))
            assert service.metrics()["clickline_version"] == 21

    def test_unusable_version_is_refused_and_the_old_one_keeps_serving(self, tmp_path: Path) -> None:
        publish(tmp_path / "versions", 1)
        with standing_in(tmp_path, processes=2) as service:
            service.wait_up()
            with Load(service, clients=2) as load:
                for number, fault in ((2, "damaged"), (3, "bug")):
                    publish(tmp_path / "versions", number, fault=fault)
                    eventually(
                        lambda number=number: [
                            line for line in service.log("a version was refused") if line["version"] == number
                        ]
                    )  # type: ignore[misc]
            assert load.failures == []
            assert set(load.versions) == {1}
            lines = service.log("a version was refused")
            assert [(line["version"], line["current"]) for line in lines] == [(2, 1), (3, 1)]
            assert "stored sample" in lines[0]["reason"]
            metrics = service.metrics()
            assert (metrics["clickline_version_refused_total"], metrics["clickline_version"]) == (2, 1)
            publish(tmp_path / "versions", 4)
            eventually(lambda: service.version() == 4)

    def test_version_that_crashes_its_loader_does_not_become_current(self, tmp_path: Path) -> None:
        publish(tmp_path / "versions", 1)
        with standing_in(tmp_path, processes=2) as service:
            service.wait_up()
            publish(tmp_path / "versions", 2, fault="crash")
            eventually(lambda: service.log("a version was refused"))
            publish(tmp_path / "versions", 3)
            eventually(lambda: service.metrics().get("clickline_version") == 3)
            eventually(lambda: service.metrics()["clickline_workers"] == 2)
            assert service.version() == 3

    def test_server_without_a_version_is_live_but_not_ready(self, tmp_path: Path) -> None:
        with standing_in(tmp_path) as service:
            assert service.wait_up()["version"] is None
            assert len(service.log("nothing is published yet")) == 1
            assert refused(service, predict_request())[0] == "UNAVAILABLE"
            reply = service.post()
            assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
            assert health(service) == "NOT_SERVING"
            assert service.admin("/healthz").status_code == 200
            ready = service.admin("/readyz")
            assert (ready.status_code, ready.text) == (503, "no version is loaded yet\n")
            publish(tmp_path / "versions", 9)
            assert service.wait_up()["version"] == 9, "the switch is announced too"
            eventually(lambda: service.admin("/readyz").status_code == 200)
            assert service.version() == 9
            assert health(service) == "SERVING"

    def test_unreachable_registry_does_not_interrupt_serving(self, tmp_path: Path) -> None:
        publish(tmp_path / "versions", 1)
        with standing_in(tmp_path) as service:
            service.wait_up()
            (tmp_path / "versions" / "unreachable").touch()
            eventually(lambda: service.metrics()["clickline_registry_unreachable"] == 1)
            assert service.version() == 1
            publish(tmp_path / "versions", 2)
            (tmp_path / "versions" / "unreachable").unlink()
            eventually(lambda: service.version() == 2)
            assert len(service.log("the registry cannot be reached")) == 1


class TestFaults:
    def test_killed_worker_is_replaced_while_the_others_answer(self, tmp_path: Path) -> None:
        publish(tmp_path / "versions", 1)
        with standing_in(tmp_path, processes=2) as service:
            service.wait_up()
            victim, other = service.workers()
            with Load(service, clients=4) as load:
                eventually(lambda: len(load.versions) > 200)
                os.kill(victim, signal.SIGKILL)
                eventually(lambda: not running(victim))
                before = len(load.versions)
                eventually(lambda: len(load.versions) > before + 200)
                eventually(lambda: service.metrics()["clickline_workers"] == 2)
            # Only what the dead process had in its hands, or took from the kernel as it died, may fail.
            assert len(load.failures) <= 8
            assert all(failure.startswith("UNAVAILABLE") for failure in load.failures)
            assert other in service.workers() and victim not in service.workers()
            assert service.metrics()["clickline_worker_restarts_total"] == 1

    def test_hanging_worker_is_replaced(self, tmp_path: Path) -> None:
        publish(tmp_path / "versions", 1)
        with standing_in(tmp_path, processes=2) as service:
            service.wait_up()
            victim, other = service.workers()
            os.kill(victim, signal.SIGSTOP)
            eventually(lambda: not running(victim))
            eventually(lambda: service.metrics()["clickline_workers"] == 2)
            assert other in service.workers()
            (line,) = service.log("a worker process is ended")
            assert line["reason"] == "it does not answer pings"

    def test_worker_that_cannot_be_started_is_retried(self, tmp_path: Path) -> None:
        publish(tmp_path / "versions", 1)
        with standing_in(tmp_path) as service:
            service.wait_up()
            (victim,) = service.workers()
            before = resource.prlimit(service.process.pid, resource.RLIMIT_NOFILE)
            resource.prlimit(service.process.pid, resource.RLIMIT_NOFILE, (4, before[1]))
            os.kill(victim, signal.SIGKILL)
            eventually(lambda: len(service.log("a worker process cannot be started")) >= 2)
            resource.prlimit(service.process.pid, resource.RLIMIT_NOFILE, before)
            eventually(lambda: service.admin("/readyz").status_code == 200)
            assert service.version() == 1

    def test_server_with_closed_stdout_keeps_serving(self, tmp_path: Path) -> None:
        publish(tmp_path / "versions", 1, seconds=1)
        with standing_in(tmp_path) as service:
            assert service.process.stdout is not None
            service.process.stdout.close()
            eventually(lambda: service.log("could not announce that the server is ready"))
            assert service.version() == 1
            (victim,) = service.workers()
            os.kill(victim, signal.SIGKILL)  # the supervisor still handles it
            eventually(lambda: service.metrics().get("clickline_worker_restarts_total") == 1)
            eventually(lambda: service.admin("/readyz").status_code == 200)

    def test_worker_that_fails_to_handle_a_message_exits(self, tmp_path: Path) -> None:
        """It would not read any further message, not even a stop."""
        ports = dict(zip(("grpc_port", "http_port", "metrics_port"), free_ports(3), strict=True))
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "clickline.serving.worker_process", str(theirs.fileno())]
        hello = {
            "slot": 0,
            "serve": ServeSection(**ports).model_dump(mode="json"),
            "names": ["ctr"],
            "token": None,
            "load": "standin:load",
            "path": [str(Path(__file__).parent)],
            "work": str(tmp_path),
        }
        with ours, subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE) as process:
            theirs.close()
            ours.sendall(json.dumps(hello).encode() + b"\n")
            ours.sendall(json.dumps({"do": "switch", "number": 9}).encode() + b"\n")
            try:
                said = process.communicate(timeout=60)[1]
            finally:
                process.kill()
        assert process.returncode == 0
        assert b"handling a message of the supervisor" in said

    def test_sigterm_finishes_running_and_queued_requests(self, tmp_path: Path) -> None:
        publish(tmp_path / "versions", 1)
        with standing_in(tmp_path) as service, concurrent.futures.ThreadPoolExecutor(4) as threads:
            service.wait_up()
            with service.channel() as channel:
                predict = predictor(channel)
                predict(predict_request(), timeout=20)  # the connection is open
                slow = [threads.submit(predict, predict_request(400), timeout=20) for _ in range(3)]
                eventually(lambda: service.begun() == 2)  # one runs, one waits
                began = time.monotonic()
                service.process.send_signal(signal.SIGTERM)
                assert [answered(one.result()) for one in slow] == [1, 1, 1]
            assert service.process.wait(20) == 0
            assert time.monotonic() - began < 5
            with pytest.raises(httpx.ConnectError):
                service.post()

    def test_sigterm_finishes_a_running_http_request(self, tmp_path: Path) -> None:
        publish(tmp_path / "versions", 1)
        with standing_in(tmp_path) as service, concurrent.futures.ThreadPoolExecutor(1) as threads:
            service.wait_up()
            slow = threads.submit(service.post, 400)
            eventually(lambda: service.begun() == 1)
            service.process.send_signal(signal.SIGTERM)
            assert slow.result().status_code == 200
            assert service.process.wait(20) == 0

    def test_drain_timeout_is_enforced(self, tmp_path: Path) -> None:
        publish(tmp_path / "versions", 1)
        with (
            standing_in(tmp_path, drain_timeout=1) as service,
            concurrent.futures.ThreadPoolExecutor(1) as threads,
        ):
            service.wait_up()
            pids = service.workers()
            slow = threads.submit(refused, service, predict_request(30_000), timeout=60)
            eventually(lambda: service.begun() == 1)
            began = time.monotonic()
            service.process.send_signal(signal.SIGTERM)
            assert service.process.wait(20) == 0
            assert time.monotonic() - began < 8
            assert slow.result()[0] in ("UNAVAILABLE", "CANCELLED")
            assert not any(map(running, pids))

    @pytest.mark.parametrize("batching", [None, {"rows": 64, "max_wait_ms": 1}])
    def test_only_pending_answers_delay_shutdown(
        self, tmp_path: Path, batching: dict[str, int] | None
    ) -> None:
        """Neither refused requests, nor incomplete ones, nor health watches."""
        publish(tmp_path / "versions", 1)
        with standing_in(tmp_path, drain_timeout=30, batching=batching) as service:
            service.wait_up()
            assert refused(service, predict_request(name="other"))[0] == "NOT_FOUND"
            assert refused(service, b"\xff\xff")[0] == "INVALID_ARGUMENT"
            half = b"POST /v1/models/ctr:predict HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"
            with (
                socket.create_connection(("127.0.0.1", service.http_port), timeout=20) as http,
                socket.create_connection(("127.0.0.1", service.grpc_port), timeout=20) as silent,
                service.channel() as channel,
            ):
                http.sendall(half)
                silent.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\4" + bytes(5))
                watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=30)
                assert next(watch).status == 1
                began = time.monotonic()
                service.process.send_signal(signal.SIGTERM)
                assert [update.status for update in watch] == [2]  # notified, and ended
                assert b"503" in http.recv(65536)
                assert service.process.wait(20) == 0
            assert time.monotonic() - began < 8

    def test_large_answer_computed_during_shutdown_arrives_complete(self, tmp_path: Path) -> None:
        publish(tmp_path / "versions", 1)
        with standing_in(tmp_path, drain_timeout=20) as service:
            service.wait_up()
            with service.channel() as channel:
                stream = channel.unary_unary("/tensorflow.serving.PredictionService/Predict").future(
                    predict_request(300, rows=9000), timeout=30
                )
                eventually(lambda: service.begun() == 1)
                service.process.send_signal(signal.SIGTERM)
                assert answered(stream.result()) == 1
            assert service.process.wait(20) == 0

    def test_second_signal_exits_at_once(self, tmp_path: Path) -> None:
        publish(tmp_path / "versions", 1)
        with (
            standing_in(tmp_path, drain_timeout=60) as service,
            concurrent.futures.ThreadPoolExecutor(1) as threads,
        ):
            service.wait_up()
            pids = service.workers()
            slow = threads.submit(refused, service, predict_request(20_000), timeout=60)
            eventually(lambda: service.begun() == 1)
            service.process.send_signal(signal.SIGINT)
            eventually(lambda: service.log("stopping"))
            service.process.send_signal(signal.SIGINT)
            assert service.process.wait(5) != 0
            assert slow.result()[0] == "UNAVAILABLE"
            assert not any(map(running, pids))

    def test_workers_do_not_outlive_a_killed_supervisor(self, tmp_path: Path) -> None:
        publish(tmp_path / "versions", 1)
        with (
            standing_in(tmp_path, processes=2) as service,
            concurrent.futures.ThreadPoolExecutor(1) as threads,
        ):
            service.wait_up()
            pids = service.workers()
            assert len(pids) == 2
            with service.channel() as channel:
                predict = predictor(channel)
                predict(predict_request(), timeout=20)
                slow = threads.submit(predict, predict_request(500), timeout=20)
                eventually(lambda: service.begun() == 1)
                service.process.kill()
                assert answered(slow.result()) == 1  # begun, so finished
            eventually(lambda: not any(map(running, pids)), 15)

    def test_overload_is_refused_and_latency_of_accepted_requests_is_bounded(self, tmp_path: Path) -> None:
        publish(tmp_path / "versions", 1)
        with standing_in(tmp_path, queue_size=4) as service:
            service.wait_up()
            with Load(service, clients=24, rows=1, milliseconds=20) as load:
                eventually(lambda: len(load.versions) > 60)
                with concurrent.futures.ThreadPoolExecutor(12) as posts:  # more at once than fit the queue
                    reply = eventually(
                        lambda: next(
                            (r for r in posts.map(service.post, [20] * 12) if r.status_code == 429), None
                        )
                    )
            assert reply.headers["retry-after"] == "1"
            assert "4 requests are waiting" in reply.json()["error"]
            assert load.failures
            assert all(failure.startswith("RESOURCE_EXHAUSTED") for failure in load.failures)
            # 5 requests of 20 ms, and what clients and the machine add.
            assert np.quantile(load.seconds, 0.9) < 0.5
            metrics = service.metrics()
            assert metrics['clickline_refused_total{kind="overloaded",protocol="tfserving_grpc"}'] == len(
                load.failures
            )
            # Refusals are logged at a limited rate.
            assert len(service.log("refused")) < len(load.failures)

    def test_port_in_use_prevents_the_start_with_a_message(self, shared: Service, tmp_path: Path) -> None:
        for key in ("grpc_port", "http_port", "metrics_port"):
            with standing_in(tmp_path, **{key: getattr(shared, key)}) as service:
                assert service.process.wait(30) == 1
                assert (
                    f"serve.{key}: 127.0.0.1:{getattr(shared, key)} cannot be listened on" in service.errors()
                )
        assert shared.version() == 5


def certificate(folder: Path) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    today = datetime.datetime.now(datetime.UTC)
    built = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(today - datetime.timedelta(days=1))
        .not_valid_after(today + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    (folder / "cert.pem").write_bytes(built.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )


def test_tls_and_token_protect_every_port(tmp_path: Path) -> None:
    certificate(tmp_path)
    (tmp_path / "token").write_text("open sesame\n")
    publish(tmp_path / "versions", 1)
    tls = {"certificate": "cert.pem", "key": "key.pem"}
    with standing_in(tmp_path, tls=tls, token_file="token") as service:
        service.wait_up()
        context = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
        right, wrong = {"Authorization": "Bearer open sesame"}, {"Authorization": "Bearer open"}
        assert service.post(verify=context, headers=right).status_code == 200
        for headers in ({}, wrong):
            reply = service.post(verify=context, headers=headers)
            assert (reply.status_code, reply.headers["www-authenticate"]) == (401, "Bearer")
            assert service.admin("/metrics", verify=context, headers=headers).status_code == 401
            path = service.url("/v1/models/ctr")
            assert httpx.get(path, verify=context, headers=headers, timeout=20).status_code == 401
        assert "clickline_version 1.0" in service.admin("/metrics", verify=context, headers=right).text
        assert service.admin("/healthz", verify=context).status_code == 200
        ready = service.admin("/readyz", verify=context)
        assert (ready.status_code, ready.text) == (200, "ready\nversion 1\n")
        credentials = grpc.ssl_channel_credentials((tmp_path / "cert.pem").read_bytes())
        with grpc.secure_channel(f"127.0.0.1:{service.grpc_port}", credentials) as channel:
            predict = predictor(channel)
            right_metadata = (("authorization", "Bearer open sesame"),)
            assert answered(predict(predict_request(), timeout=20, metadata=right_metadata)) == 1
            for metadata in ((), (("authorization", "Bearer open"),)):
                with pytest.raises(grpc.RpcError) as caught:
                    predict(predict_request(), timeout=20, metadata=metadata)
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            with pytest.raises(grpc.RpcError) as caught:
                list(ProtoReflectionDescriptorDatabase(channel).get_services())
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            stub = health_pb2_grpc.HealthStub(channel)
            assert stub.Check(health_pb2.HealthCheckRequest(), timeout=10).status == 1
        # No access without TLS.
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"http://127.0.0.1:{service.http_port}/v2", timeout=20)
        assert refused(service, predict_request())[0] == "UNAVAILABLE"
        assert "open sesame" not in service.errors()


def test_unusable_certificates_prevent_the_start_with_a_message(tmp_path: Path) -> None:
    tls = TlsSection(certificate=str(tmp_path / "cert.pem"), key=str(tmp_path / "key.pem"))
    with pytest.raises(ClicklineError, match=r"serve\.tls\.certificate .*cert\.pem is not a file"):
        server_tls(tls)
    certificate(tmp_path)
    server_tls(tls)
    (tmp_path / "key.pem").write_text("no key")
    with pytest.raises(ClicklineError, match="cannot be used as certificate and key"):
        server_tls(tls)


def test_importing_the_worker_does_not_import_torch() -> None:
    code = "import sys, clickline.serving.worker_process as w; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
