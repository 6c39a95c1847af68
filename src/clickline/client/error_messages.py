"""What is said when a server does not answer: whom was asked, what happened, what to look at."""

from __future__ import annotations

import ssl
from pathlib import Path

from clickline.client.request import Address, Failed
from clickline.errors import ClicklineError, RequestRefused


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


def read_authority(file: str) -> str:
    """The certificates of a PEM file; gRPC itself would not say what is wrong with it."""
    try:
        certificates = Path(file).read_text("ascii")
        if not certificates.strip():
            raise ValueError("it is empty")
        ssl.create_default_context(cadata=certificates)
    except OSError as error:  # that no certificate is in it is one, too
        raise ClicklineError(
            f"{file} does not serve as an authority to trust: {error.strerror or error}. Name a PEM file with its "
            "certificate."
        ) from error
    except ValueError as error:
        raise ClicklineError(f"{file} is no PEM file: {error}. Name one with a certificate.") from error
    return certificates
