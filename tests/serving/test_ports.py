"""Ports that cannot be had, and tokens that cannot be sent, are told with what to do."""

from __future__ import annotations

import resource
import socket
from pathlib import Path

import pytest

from clickline.errors import ClicklineError
from clickline.serving.auth import read_token
from clickline.serving.ports import bound_socket, raise_file_limit


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ClicklineError, match=rf"serve\.http_port: 127\.0\.0\.1:{port} .*in use.*--set serve\.http_port"
        ):
            bound_socket("127.0.0.1", port, "http_port")


def test_a_shared_port_is_had_twice_and_one_that_is_not_once() -> None:
    with bound_socket("127.0.0.1", 0, "http_port", shared=True) as one:
        port = one.getsockname()[1]
        bound_socket("127.0.0.1", port, "http_port", shared=True).close()
    with (
        bound_socket("::1", 0, "http_port", listen=True) as one,
        pytest.raises(ClicklineError, match=r"\[::1\]:"),
    ):
        bound_socket("::1", one.getsockname()[1], "http_port", listen=True)


@pytest.mark.parametrize(
    ("host", "words"),
    [("203.0.113.9", "Set serve.host to an address of this machine"), ("a..b", "is no address")],
)
def test_a_host_that_is_not_this_machine(host: str, words: str) -> None:
    with pytest.raises(ClicklineError, match=words):
        bound_socket(host, 0, "http_port")


def test_a_token_that_no_header_can_carry(tmp_path: Path) -> None:
    for content in ("geheim ü\n".encode(), b"a\x01b\n"):
        (tmp_path / "token").write_bytes(content)
        with pytest.raises(ClicklineError, match="no header may carry"):
            read_token(str(tmp_path / "token"))
    (tmp_path / "token").write_bytes(b"\xff\xfe")
    with pytest.raises(ClicklineError, match="is no text"):
        read_token(str(tmp_path / "token"))


def test_the_limit_on_files_is_what_the_system_allows() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, before[1]), before[1]))
        raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == before[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
