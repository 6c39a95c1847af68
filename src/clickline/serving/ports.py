"""Ports to listen on, and what is said when one cannot be had."""

from __future__ import annotations

import errno
import resource
import socket

from clickline.errors import ClicklineError


def address(host: str, port: int) -> str:
    """As people write it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bound_socket(
    host: str, port: int, key: str, *, shared: bool = False, listen: bool = False
) -> socket.socket:
    """A socket on the port of `serve.<key>`. To a shared one other processes of ours are bound as well, so having it
    says nothing of whether somebody else has it too; one that listens does."""
    try:
        family, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, socket.SOCK_STREAM)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shared:
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            bound.bind(place)
            if listen:
                bound.listen()
        except BaseException:
            bound.close()
            raise
    except (socket.gaierror, UnicodeError) as error:
        raise ClicklineError(
            f"serve.host: {host} is no address: {getattr(error, 'strerror', None) or error}. Give one of this machine: "
            "127.0.0.1 for this machine only, 0.0.0.0 for all that can reach it."
        ) from error
    except OSError as error:
        raise ClicklineError(
            f"serve.{key}: {address(host, port)} cannot be listened on: {error.strerror or error}. "
            + _remedy(error, key)
        ) from error
    return bound


def _remedy(error: OSError, key: str) -> str:
    if error.errno == errno.EADDRNOTAVAIL:
        return "Set serve.host to an address of this machine; 0.0.0.0 is all of them."
    if error.errno == errno.EACCES:
        return f"Ports below 1024 are for root; choose another one by --set serve.{key}=…"
    return f"Stop what uses it, or choose another port by --set serve.{key}=…"


def raise_file_limit() -> None:
    """As many connections as the system allows this process; the usual limit is made for shells."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
