"""Tries, deadlines, tokens, and what is said when a server does not answer; waiting and awaited alike."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from typing import Any

import grpc
import pytest
from small_servers import Asking, Script, free_port, grpc_server, http_server, silent_port

from clickline.client import Client
from clickline.client.request import ServerAddress, RetryBudget, AttemptFailed
from clickline.errors import ClicklineError, ConfigError, RequestRefused

BUSY = (grpc.StatusCode.RESOURCE_EXHAUSTED, "too much at once")
AWAY = (grpc.StatusCode.UNAVAILABLE, "No version of the model is loaded yet.")
HTTP_BUSY = (429, '{"error": "too much at once"}')
ROWS = [{"I1": 1, "C1": "a"}]


@pytest.fixture(params=["waiting", "async"])
def asking(request: pytest.FixtureRequest) -> Asking:
    return Asking(request.param == "waiting")


def ask(client: Any) -> Any:
    return client.predict(ROWS)


# ── trying again ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("step", [BUSY, AWAY], ids=["overloaded", "unavailable"])
def test_a_server_that_refuses_twice_is_asked_a_third_time(asking: Asking, step: Any) -> None:
    script = Script(step, step)
    with grpc_server(script) as address:
        assert asking(address, ask).probability.tolist() == [0.75]
    assert (len(script.seen), asking.retried) == (3, 2)


@pytest.mark.parametrize("step", [HTTP_BUSY, (503, '{"error": "not yet"}'), (None, "")])
def test_over_http_too_also_when_the_connection_breaks(asking: Asking, step: Any) -> None:
    script = Script(step, step)
    with http_server(script) as address:
        assert asking(address, ask, protocol="http").probability.tolist() == [0.75]
    assert len(script.seen) == 3


def test_after_the_last_try_the_servers_words_are_told(asking: Asking) -> None:
    script = Script(BUSY, BUSY, BUSY, BUSY)
    with grpc_server(script) as address, pytest.raises(RequestRefused, match="too much at once") as refused:
        asking(address, ask)
    assert refused.value.kind == "overloaded"
    assert len(script.seen) == 3


@pytest.mark.parametrize(
    ("step", "kind"),
    [
        ((grpc.StatusCode.INVALID_ARGUMENT, "C9 is not a field"), "invalid"),
        ((grpc.StatusCode.NOT_FOUND, "no such model"), "not_found"),
        ((grpc.StatusCode.INTERNAL, "a bug"), "internal"),
        ((grpc.StatusCode.DEADLINE_EXCEEDED, "the work did not start in time"), "late"),
    ],
)
def test_what_would_fail_again_is_not_sent_again(asking: Asking, step: Any, kind: str) -> None:
    script = Script(step)
    with grpc_server(script) as address, pytest.raises(RequestRefused) as refused:
        asking(address, ask)
    assert (refused.value.kind, str(refused.value), len(script.seen)) == (kind, step[1], 1)


@pytest.mark.parametrize(
    ("step", "kind", "words"),
    [
        ((400, '{"error": "C9 is not a field"}'), "invalid", "C9 is not a field"),
        ((404, '{"error": "no such model"}'), "not_found", "no such model"),
        ((401, '{"predictions": [], "err_code": 401, "err_msg": "no token"}'), "unauthenticated", "no token"),
        ((500, "<html>oh"), "internal", "HTTP 500: <html>oh"),
        ((413, "too large"), "invalid", "HTTP 413: too large"),
    ],
)
def test_the_same_over_http(asking: Asking, step: Any, kind: str, words: str) -> None:
    script = Script(step)
    with http_server(script) as address, pytest.raises(RequestRefused) as refused:
        asking(address, ask, protocol="http")
    assert (refused.value.kind, str(refused.value), len(script.seen)) == (kind, words, 1)


def test_a_message_too_large_for_grpc_is_no_overload(asking: Asking) -> None:
    script = Script()
    rows = [{"C1": "x" * (2 << 20)}]
    with grpc_server(script) as address, pytest.raises(RequestRefused, match="fewer rows") as refused:
        asking(address, lambda client: client.predict(rows))
    assert (refused.value.kind, asking.retried) == ("invalid", 0)


def test_no_try_that_the_server_asks_to_wait_too_long_for() -> None:
    script = Script(HTTP_BUSY)
    began = time.monotonic()
    with http_server(script, Retry_After="5") as address, pytest.raises(RequestRefused):
        Asking(True)(address, ask, protocol="http", timeout=4.0)
    assert (len(script.seen), time.monotonic() - began < 3) == (1, True)


def test_a_server_that_comes_up_between_two_tries_answers(
    asking: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, script = free_port(), Script()
    with ExitStack() as servers:

        def start_server(attempts: RetryBudget, failed: AttemptFailed) -> float | None:
            if asking.tries == 0:
                servers.enter_context(grpc_server(script, port))
            asking.tries += 1
            return pause(attempts, failed)

        pause = RetryBudget.next_delay
        monkeypatch.setattr(RetryBudget, "pause", start_server)
        # On a loaded machine a channel may need more than one look until it connects again.
        answer = asking(f"127.0.0.1:{port}", ask, retries=10)
    assert (answer.version, len(script.seen)) == (12, 1)
    assert asking.retried == asking.tries > 0


def test_pauses_grow_and_differ_and_keep_within_the_deadline() -> None:
    failed = AttemptFailed(ClicklineError("away"), again=True)
    first = {RetryBudget(100, 1).next_delay(failed) for _ in range(20)}
    assert len(first) > 1 and all(0.025 <= pause <= 0.05 for pause in first if pause is not None)
    attempts = RetryBudget(100, 8)
    pauses = [attempts.next_delay(failed) for _ in range(9)]
    assert pauses[8] is None
    assert pauses[7] is not None and 0.5 <= pauses[7] <= 1.0
    assert RetryBudget(0.01, 5).next_delay(failed) is None
    assert RetryBudget(100, 5).next_delay(AttemptFailed(ClicklineError("wrong"))) is None


# ── deadlines ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_silent_server_is_given_up_at_the_deadline(asking: Asking, protocol: str) -> None:
    began = time.monotonic()
    with silent_port() as address, pytest.raises(ClicklineError, match=r"within 0.3 seconds") as refused:
        asking(address, ask, protocol=protocol, timeout=0.3)
    assert isinstance(refused.value, RequestRefused) and refused.value.kind == "late"
    assert 0.25 < time.monotonic() - began < 5


@pytest.mark.parametrize(("protocol", "server"), [("grpc", grpc_server), ("http", http_server)])
def test_so_is_one_that_takes_too_long(asking: Asking, protocol: str, server: Any) -> None:
    script = Script()
    script.gate = threading.Event()
    with server(script) as address, pytest.raises(RequestRefused) as refused:
        asking(address, ask, protocol=protocol, timeout=0.4)
    assert refused.value.kind == "late"
    assert len(script.seen) == 1


def test_the_server_knows_the_deadline_over_http(asking: Asking) -> None:
    script = Script()
    with http_server(script) as address:
        asking(address, ask, protocol="http", timeout=7.0)
    assert 6000 < int(script.seen[0]["x-request-timeout-ms"]) <= 7000


# ── who may ask ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("protocol", "server"), [("grpc", grpc_server), ("http", http_server)])
def test_the_token_goes_along(asking: Asking, protocol: str, server: Any) -> None:
    script = Script()
    with server(script) as address:
        asking(address, ask, protocol=protocol, token="s3cret")
        asking(address, ask, protocol=protocol)
    assert script.seen[0]["authorization"] == "Bearer s3cret"
    assert "authorization" not in script.seen[1]


# ── servers that are not there, or others ──────────────────────────────────────────────────────


@pytest.mark.parametrize("protocol", ["grpc", "v2-grpc", "http", "v2-http", "elasticctr"])
def test_nobody_listens(asking: Asking, protocol: str) -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(
        ClicklineError, match=f"{address} cannot be reached: .*refused.*clickline serve"
    ) as error:
        asking(address, ask, protocol=protocol)
    assert not isinstance(error.value, RequestRefused)
    assert asking(address, lambda client: client.ready(), protocol=protocol) is False


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_no_such_host(asking: Asking, protocol: str) -> None:
    with pytest.raises(ClicklineError, match=r"nohost.invalid:85 cannot be reached"):
        asking("nohost.invalid:85", ask, protocol=protocol, retries=0)


def test_grpc_to_an_http_port(asking: Asking) -> None:
    with (
        http_server(Script()) as address,
        pytest.raises(ClicklineError, match=r"does not speak gRPC; .*serve.grpc_port.*protocol http"),
    ):
        asking(address, ask)


def test_http_to_a_grpc_port(asking: Asking) -> None:
    with (
        grpc_server(Script()) as address,
        pytest.raises(ClicklineError, match=r"does not speak HTTP; .*serve.http_port.*protocol grpc"),
    ):
        asking(address, ask, protocol="http")


@pytest.mark.parametrize(("protocol", "server"), [("grpc", grpc_server), ("http", http_server)])
def test_tls_to_a_server_without(asking: Asking, protocol: str, server: Any) -> None:
    with server(Script()) as address, pytest.raises(ClicklineError, match="does not speak TLS"):
        asking(address, ask, protocol=protocol, tls=True)


def test_a_server_of_something_else(asking: Asking) -> None:
    wrong = Script((200, "<html>hello</html>"))
    with http_server(wrong) as address, pytest.raises(ClicklineError, match="something else than scores"):
        asking(address, ask, protocol="http")
    with grpc_server(Script()) as address, pytest.raises(ClicklineError, match="does not know this request"):
        asking(address, ask, protocol="v2-grpc")


# ── how clients are made ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "address", ["localhost", "localhost:", ":80", "h:99999", "http://h:80", "::1:80", "a/b:1"]
)
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(ConfigError, match=r"HOST:PORT is allowed"):
        Client(address)


def test_addresses() -> None:
    assert str(ServerAddress.of("localhost:80")) == "localhost:80"
    assert (ServerAddress.of("[::1]:80").host, str(ServerAddress.of("[::1]:80"))) == ("::1", "[::1]:80")


def test_unknown_protocol() -> None:
    with pytest.raises(ConfigError, match="'smtp'; allowed: grpc, http"):
        Client("h:1", protocol="smtp")  # type: ignore[arg-type]


def test_nonsense_is_refused_before_it_is_sent(asking: Asking) -> None:
    with pytest.raises(RequestRefused, match="version is -1"):
        asking("127.0.0.1:1", lambda client: client.predict(ROWS, version=-1))
    with pytest.raises(RequestRefused, match="top_k is 0"):
        asking("127.0.0.1:1", lambda client: client.rank({}, ROWS, top_k=0))


def test_importing_it_is_light() -> None:
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
