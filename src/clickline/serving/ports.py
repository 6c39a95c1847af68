"""Binds ports, with messages that explain why one cannot be bound."""

from __future__ import annotations

import errno
import resource
import socket

from clickline.errors import ClicklineError


def address(host: str, port: int) -> str:
    """Format host and port, with brackets around IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bound_socket(
    host: str, port: int, key: str, *, section: str = "serve", shared: bool = False, listen: bool = False
) -> socket.socket:
    """Bind a socket to the port of `<section>.<key>`. A shared one can be bound by several processes, so success does
    not show that the port is free; with `listen` it does."""
    try:
        family, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # With IPPROTO_TCP set, asyncio enables TCP_NODELAY.
        bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
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
            f"{section}.host: {host} is not an address: {getattr(error, 'strerror', None) or error}. "
            "Use an address of this machine: 127.0.0.1 for local clients only, 0.0.0.0 for all interfaces."
        ) from error
    except OSError as error:
        raise ClicklineError(
            f"{section}.{key}: {address(host, port)} cannot be listened on: {error.strerror or error}. "
            + _remedy(error, section, key)
        ) from error
    return bound


def _remedy(error: OSError, section: str, key: str) -> str:
    if error.errno == errno.EADDRNOTAVAIL:
        return f"Set {section}.host to an address of this machine; 0.0.0.0 means all interfaces."
    if error.errno == errno.EACCES:
        return f"Ports below 1024 need root; choose another port with --set {section}.{key}=…"
    return f"Stop the process that uses it, or choose another port with --set {section}.{key}=…"


def raise_file_limit() -> None:
    """Raise the limit of open files to the hard limit, for many connections."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
