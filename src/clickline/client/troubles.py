"""What is said when a server does not answer: whom was asked, what happened, what to look at."""

from __future__ import annotations

from pathlib import Path

from clickline.client.calls import Address, Failed
from clickline.errors import ClicklineError, RequestRefused

__all__ = ["late", "no_tls", "read_authority", "unreachable", "untrusted"]


def late(address: Address, seconds: float) -> Failed:
    return Failed(RequestRefused("late", f"{address} did not answer within {seconds:.3g} seconds."))


def unreachable(address: Address, reason: str, port: str) -> Failed:
    return Failed(
        ClicklineError(
            f"{address} cannot be reached: {reason.rstrip('. ')}. Is `clickline serve` running there, is this its "
            f"port ({port}), and does it ask for TLS (serve.tls)?"
        ),
        again=True,
    )


def no_tls(address: Address) -> Failed:
    return Failed(
        ClicklineError(f"{address} does not speak TLS. Leave TLS out, or set serve.tls on the server.")
    )


def untrusted(address: Address, reason: str) -> Failed:
    return Failed(
        ClicklineError(
            f"the certificate of {address} is not trusted: {reason.rstrip('. ')}. Name the PEM file of the authority "
            "that signed it, and call the server by a name that its certificate has."
        )
    )


def read_authority(file: str) -> bytes:
    """A PEM file of certificates that are trusted."""
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise ClicklineError(
            f"the certificates in {file} cannot be read: {error.strerror or error}."
        ) from error
