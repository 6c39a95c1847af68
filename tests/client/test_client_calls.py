"""Retries, deadlines, tokens and error messages of clients, blocking and async."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from typing import Any

import grpc
import pytest
from scripted_servers import ClientRunner, Script, free_port, grpc_server, http_server, silent_port

from clickline.client import Client
from clickline.client.attempts import AttemptFailed, RetryBudget, ServerAddress
from clickline.errors import ClicklineError, ConfigError, RequestRefused

OVERLOADED = (grpc.StatusCode.RESOURCE_EXHAUSTED, "too much at once")
UNAVAILABLE = (grpc.StatusCode.UNAVAILABLE, "No version of the model is loaded yet.")
HTTP_OVERLOADED = (429, '{"error": "too much at once"}')
ROWS = [{"I1": 1, "C1": "a"}]


@pytest.fixture(params=["blocking", "async"])
def runner(request: pytest.FixtureRequest) -> ClientRunner:
    return ClientRunner(request.param == "blocking")


def predict(client: Any) -> Any:
    return client.predict(ROWS)


# ── retries ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("step", [OVERLOADED, UNAVAILABLE], ids=["overloaded", "unavailable"])
def test_refused_request_is_retried_twice(runner: ClientRunner, step: Any) -> None:
    script = Script(step, step)
    with grpc_server(script) as address:
        assert runner(address, predict).probability.tolist() == [0.75]
    assert (len(script.received), runner.retried) == (3, 2)


@pytest.mark.parametrize("step", [HTTP_OVERLOADED, (503, '{"error": "not yet"}'), (None, "")])
def test_http_request_is_retried_also_after_a_broken_connection(runner: ClientRunner, step: Any) -> None:
    script = Script(step, step)
    with http_server(script) as address:
        assert runner(address, predict, protocol="http").probability.tolist() == [0.75]
    assert len(script.received) == 3


def test_last_failed_attempt_raises_the_servers_message(runner: ClientRunner) -> None:
    script = Script(OVERLOADED, OVERLOADED, OVERLOADED, OVERLOADED)
    with grpc_server(script) as address, pytest.raises(RequestRefused, match="too much at once") as refused:
        runner(address, predict)
    assert refused.value.kind == "overloaded"
    assert len(script.received) == 3


@pytest.mark.parametrize(
    ("step", "kind"),
    [
        ((grpc.StatusCode.INVALID_ARGUMENT, "C9 is not a field"), "invalid"),
        ((grpc.StatusCode.NOT_FOUND, "no such model"), "not_found"),
        ((grpc.StatusCode.INTERNAL, "a bug"), "internal"),
        ((grpc.StatusCode.DEADLINE_EXCEEDED, "the work did not start in time"), "late"),
    ],
)
def test_permanent_error_is_not_retried(runner: ClientRunner, step: Any, kind: str) -> None:
    script = Script(step)
    with grpc_server(script) as address, pytest.raises(RequestRefused) as refused:
        runner(address, predict)
    assert (refused.value.kind, str(refused.value), len(script.received)) == (kind, step[1], 1)


@pytest.mark.parametrize(
    ("step", "kind", "message"),
    [
        ((400, '{"error": "C9 is not a field"}'), "invalid", "C9 is not a field"),
        ((404, '{"error": "no such model"}'), "not_found", "no such model"),
        ((401, '{"predictions": [], "err_code": 401, "err_msg": "no token"}'), "unauthenticated", "no token"),
        ((500, "<html>oh"), "internal", "HTTP 500: <html>oh"),
        ((413, "too large"), "invalid", "HTTP 413: too large"),
    ],
)
def test_permanent_http_error_is_not_retried(
    runner: ClientRunner, step: Any, kind: str, message: str
) -> None:
    script = Script(step)
    with http_server(script) as address, pytest.raises(RequestRefused) as refused:
        runner(address, predict, protocol="http")
    assert (refused.value.kind, str(refused.value), len(script.received)) == (kind, message, 1)


def test_too_large_grpc_message_is_not_an_overload(runner: ClientRunner) -> None:
    script = Script()
    rows = [{"C1": "x" * (2 << 20)}]
    with grpc_server(script) as address, pytest.raises(RequestRefused, match="fewer rows") as refused:
        runner(address, lambda client: client.predict(rows))
    assert (refused.value.kind, runner.retried) == ("invalid", 0)


def test_retry_after_beyond_the_deadline_is_not_retried() -> None:
    script = Script(HTTP_OVERLOADED)
    began = time.monotonic()
    with http_server(script, Retry_After="5") as address, pytest.raises(RequestRefused):
        ClientRunner(True)(address, predict, protocol="http", timeout=4.0)
    assert (len(script.received), time.monotonic() - began < 3) == (1, True)


def test_server_that_starts_between_two_attempts_answers(
    runner: ClientRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, script = free_port(), Script()
    with ExitStack() as servers:

        def start_server(budget: RetryBudget, failed: AttemptFailed) -> float | None:
            if runner.attempts == 0:
                servers.enter_context(grpc_server(script, port))
            runner.attempts += 1
            return next_delay(budget, failed)

        next_delay = RetryBudget.next_delay
        monkeypatch.setattr(RetryBudget, "next_delay", start_server)
        # On a loaded machine a channel may need more than one attempt until it reconnects.
        answer = runner(f"127.0.0.1:{port}", predict, retries=10)
    assert (answer.version, len(script.received)) == (12, 1)
    assert runner.retried == runner.attempts > 0


def test_retry_delays_grow_with_jitter_within_the_deadline() -> None:
    failed = AttemptFailed(ClicklineError("away"), retryable=True)
    first = {RetryBudget(100, 1).next_delay(failed) for _ in range(20)}
    assert len(first) > 1 and all(0.025 <= delay <= 0.05 for delay in first if delay is not None)
    budget = RetryBudget(100, 8)
    delays = [budget.next_delay(failed) for _ in range(9)]
    assert delays[8] is None
    assert delays[7] is not None and 0.5 <= delays[7] <= 1.0
    assert RetryBudget(0.01, 5).next_delay(failed) is None
    assert RetryBudget(100, 5).next_delay(AttemptFailed(ClicklineError("wrong"))) is None


# ── deadlines ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_silent_server_times_out_at_the_deadline(runner: ClientRunner, protocol: str) -> None:
    began = time.monotonic()
    with silent_port() as address, pytest.raises(ClicklineError, match=r"within 0.3 seconds") as refused:
        runner(address, predict, protocol=protocol, timeout=0.3)
    assert isinstance(refused.value, RequestRefused) and refused.value.kind == "late"
    assert 0.25 < time.monotonic() - began < 5


@pytest.mark.parametrize(("protocol", "server"), [("grpc", grpc_server), ("http", http_server)])
def test_slow_answer_times_out_at_the_deadline(runner: ClientRunner, protocol: str, server: Any) -> None:
    script = Script()
    script.gate = threading.Event()
    with server(script) as address, pytest.raises(RequestRefused) as refused:
        runner(address, predict, protocol=protocol, timeout=0.4)
    assert refused.value.kind == "late"
    assert len(script.received) == 1


def test_http_server_gets_the_deadline(runner: ClientRunner) -> None:
    script = Script()
    with http_server(script) as address:
        runner(address, predict, protocol="http", timeout=7.0)
    assert 6000 < int(script.received[0]["x-request-timeout-ms"]) <= 7000


# ── authentication ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("protocol", "server"), [("grpc", grpc_server), ("http", http_server)])
def test_token_is_sent(runner: ClientRunner, protocol: str, server: Any) -> None:
    script = Script()
    with server(script) as address:
        runner(address, predict, protocol=protocol, token="s3cret")
        runner(address, predict, protocol=protocol)
    assert script.received[0]["authorization"] == "Bearer s3cret"
    assert "authorization" not in script.received[1]


# ── missing and wrong servers ──────────────────────────────────────────────────────


@pytest.mark.parametrize("protocol", ["grpc", "v2-grpc", "http", "v2-http", "elasticctr"])
def test_closed_port_is_unreachable(runner: ClientRunner, protocol: str) -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(
        ClicklineError, match=f"{address} cannot be reached: .*refused.*clickline serve"
    ) as error:
        runner(address, predict, protocol=protocol)
    assert not isinstance(error.value, RequestRefused)
    assert runner(address, lambda client: client.ready(), protocol=protocol) is False


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_unknown_host_is_unreachable(runner: ClientRunner, protocol: str) -> None:
    with pytest.raises(ClicklineError, match=r"nohost.invalid:85 cannot be reached"):
        runner("nohost.invalid:85", predict, protocol=protocol, retries=0)


def test_grpc_client_at_an_http_port(runner: ClientRunner) -> None:
    with (
        http_server(Script()) as address,
        pytest.raises(ClicklineError, match=r"does not use gRPC; .*serve.grpc_port.*protocol http"),
    ):
        runner(address, predict)


def test_http_client_at_a_grpc_port(runner: ClientRunner) -> None:
    with (
        grpc_server(Script()) as address,
        pytest.raises(ClicklineError, match=r"does not use HTTP; .*serve.http_port.*protocol grpc"),
    ):
        runner(address, predict, protocol="http")


@pytest.mark.parametrize(("protocol", "server"), [("grpc", grpc_server), ("http", http_server)])
def test_tls_client_at_a_server_without_tls(runner: ClientRunner, protocol: str, server: Any) -> None:
    with server(Script()) as address, pytest.raises(ClicklineError, match="does not use TLS"):
        runner(address, predict, protocol=protocol, tls=True)


def test_server_of_another_kind(runner: ClientRunner) -> None:
    wrong = Script((200, "<html>hello</html>"))
    with http_server(wrong) as address, pytest.raises(ClicklineError, match="sent an unexpected response"):
        runner(address, predict, protocol="http")
    with (
        grpc_server(Script()) as address,
        pytest.raises(ClicklineError, match="does not support this request"),
    ):
        runner(address, predict, protocol="v2-grpc")


# ── creating clients ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "address", ["localhost", "localhost:", ":80", "h:99999", "http://h:80", "::1:80", "a/b:1"]
)
def test_invalid_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"allowed: HOST:PORT"):
        Client(address)


def test_address_is_parsed() -> None:
    assert str(ServerAddress.of("localhost:80")) == "localhost:80"
    assert (ServerAddress.of("[::1]:80").host, str(ServerAddress.of("[::1]:80"))) == ("::1", "[::1]:80")


def test_unknown_protocol_is_refused() -> None:
    with pytest.raises(ConfigError, match="'smtp'; allowed: grpc, http"):
        Client("h:1", protocol="smtp")  # type: ignore[arg-type]


def test_invalid_arguments_are_refused_before_sending(runner: ClientRunner) -> None:
    with pytest.raises(RequestRefused, match="version is -1"):
        runner("127.0.0.1:1", lambda client: client.predict(ROWS, version=-1))
    with pytest.raises(RequestRefused, match="top_k is 0"):
        runner("127.0.0.1:1", lambda client: client.rank({}, ROWS, top_k=0))


def test_import_does_not_load_heavy_packages() -> None:
    heavy = ("grpc", "httpx", "numba", "pyarrow", "google.protobuf", "orjson", "torch")
    code = f"import sys, clickline.client; print([m for m in {heavy!r} if m in sys.modules])"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert found.stdout.strip() == "[]"


def test_threads_share_a_client() -> None:
    with grpc_server(Script()) as address, Client(address) as client:
        answers: list[Any] = []
        threads = [threading.Thread(target=lambda: answers.append(client.predict(ROWS))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [answer.version for answer in answers] == [12] * 8
