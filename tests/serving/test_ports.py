"""Ports that cannot be bound and invalid tokens are reported with a remedy."""

from __future__ import annotations

import resource
import socket
from pathlib import Path

import pytest

from clickline.errors import ClicklineError
from clickline.serving.auth import read_token
from clickline.serving.ports import bound_socket, raise_file_limit


def test_port_in_use_is_explained() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ClicklineError, match=rf"serve\.http_port: 127\.0\.0\.1:{port} .*in use.*--set serve\.http_port"
        ):
            bound_socket("127.0.0.1", port, "http_port")


def test_only_a_shared_port_can_be_bound_twice() -> None:
    with bound_socket("127.0.0.1", 0, "http_port", shared=True) as one:
        port = one.getsockname()[1]
        bound_socket("127.0.0.1", port, "http_port", shared=True).close()
    with (
        bound_socket("::1", 0, "http_port", listen=True) as one,
        pytest.raises(ClicklineError, match=r"\[::1\]:"),
    ):
        bound_socket("::1", one.getsockname()[1], "http_port", listen=True)


@pytest.mark.parametrize(
    ("host", "message"),
    [("203.0.113.9", "Set serve.host to an address of this machine"), ("a..b", "is not an address")],
)
def test_host_that_is_not_this_machine_is_explained(host: str, message: str) -> None:
    with pytest.raises(ClicklineError, match=message):
        bound_socket(host, 0, "http_port")


def test_token_not_allowed_in_a_header_is_refused(tmp_path: Path) -> None:
    for content in ("geheim ü\n".encode(), b"a\x01b\n"):
        (tmp_path / "token").write_bytes(content)
        with pytest.raises(ClicklineError, match="not allowed in a header"):
            read_token(str(tmp_path / "token"))
    (tmp_path / "token").write_bytes(b"\xff\xfe")
    with pytest.raises(ClicklineError, match="is not text"):
        read_token(str(tmp_path / "token"))


def test_file_limit_is_raised_to_the_hard_limit() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, before[1]), before[1]))
        raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == before[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
