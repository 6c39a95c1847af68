"""Error messages for a server that does not answer: its address, what happened, what to check."""

from __future__ import annotations

import ssl
from pathlib import Path

from clickline.client.attempts import AttemptFailed, ServerAddress
from clickline.errors import ClicklineError, RequestRefused


def timed_out(address: ServerAddress, seconds: float) -> AttemptFailed:
    return AttemptFailed(RequestRefused("late", f"{address} did not answer within {seconds:.3g} seconds."))


def unreachable(address: ServerAddress, reason: str, port: str) -> AttemptFailed:
    return AttemptFailed(
        ClicklineError(
            f"{address} cannot be reached: {reason.rstrip('. ')}. Is `clickline serve` running there, is this its "
            f"port ({port}), and does it require TLS (serve.tls)?"
        ),
        retryable=True,
    )


def no_tls(address: ServerAddress) -> AttemptFailed:
    return AttemptFailed(
        ClicklineError(f"{address} does not use TLS. Connect without TLS, or set serve.tls on the server.")
    )


def untrusted_certificate(address: ServerAddress, reason: str) -> AttemptFailed:
    return AttemptFailed(
        ClicklineError(
            f"the certificate of {address} is not trusted: {reason.rstrip('. ')}. Name the PEM file of the CA that "
            "signed it, and use a host name that is in the certificate."
        )
    )


def read_ca_file(file: str) -> str:
    """The certificates of a PEM file; gRPC itself would not report what is wrong with it."""
    try:
        certificates = Path(file).read_text("ascii")
        if not certificates.strip():
            raise ValueError("it is empty")
        ssl.create_default_context(cadata=certificates)
    except OSError as error:  # also raised if it contains no certificate
        raise ClicklineError(
            f"{file} cannot be used as a CA file: {error.strerror or error}. Name a PEM file with the certificate of "
            "the CA."
        ) from error
    except ValueError as error:
        raise ClicklineError(
            f"{file} is not a PEM file: {error}. Name one with the certificate of the CA."
        ) from error
    return certificates
