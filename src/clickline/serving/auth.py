"""Access control: the bearer token, TLS, and the warning when neither protects a reachable port."""

from __future__ import annotations

import hmac
import ssl
from pathlib import Path

from clickline.config.sections import ServeSection, TlsSection, unguarded
from clickline.errors import ClicklineError, RequestRefused


def read_token(file: str | None, section: str = "serve") -> str | None:
    """Return the first line of the token file of a config section, or None if no token is required."""
    if file is None:
        return None
    try:
        token = Path(file).read_text().partition("\n")[0].strip()
    except OSError as error:
        raise ClicklineError(
            f"{section}.token_file {file} cannot be read: {error.strerror or error}. Put the token into its first "
            "line, readable by the user that runs the server."
        ) from error
    except UnicodeDecodeError as error:
        raise ClicklineError(
            f"{section}.token_file {file} is not text. Put the token into its first line."
        ) from error
    if not token:
        raise ClicklineError(f"the first line of {section}.token_file {file} is empty. Put the token there.")
    if not (token.isascii() and token.isprintable()):
        raise ClicklineError(
            f"the first line of {section}.token_file {file} has characters that are not allowed in a header. Allowed: "
            "printable ASCII."
        )
    return token


def server_tls(tls: TlsSection | None, section: str = "serve") -> ssl.SSLContext | None:
    """Build the server's TLS context, or None if TLS is not configured. Refuses files that are not a certificate and
    its key. `section` is the config section that `tls` belongs to."""
    if tls is None:
        return None
    for key, path in (("certificate", tls.certificate), ("key", tls.key)):
        if not Path(path).is_file():
            raise ClicklineError(f"{section}.tls.{key} {path} is not a file. Put the PEM file there.")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(tls.certificate, tls.key, password=_no_password)
    except (OSError, ValueError) as error:
        raise ClicklineError(
            f"{section}.tls: {tls.certificate} and {tls.key} cannot be used as certificate and key: "
            f"{getattr(error, 'strerror', None) or error}. Both are PEM files; the key belongs to the first "
            "certificate."
        ) from error
    return context


def _no_password() -> str:
    raise ValueError("the key is protected by a password, which a server cannot enter")


class BearerAuth:
    """Accepts requests that carry the bearer token."""

    def __init__(self, token: str | None) -> None:
        self.allow_all = token is None
        self._expected = f"Bearer {token}".encode()

    def check(self, authorization: bytes | None) -> None:
        """Raise RequestRefused unless `authorization`, the header or metadata of that name, holds the token."""
        if self.allow_all:
            return
        scheme, _, value = (authorization or b"").partition(b" ")
        given = scheme.title() + b" " + value.strip()
        if not hmac.compare_digest(given, self._expected):
            raise RequestRefused(
                "unauthenticated",
                "The bearer token is missing or wrong. Send `authorization: Bearer TOKEN`, with the first line of "
                "the server's serve.token_file.",
            )


def exposure_warning(serve: ServeSection) -> str | None:
    """Return a warning if other machines can reach the ports without TLS or a token."""
    missing = [f"serve.{key}" for key in unguarded(serve.host, serve.tls, serve.token_file)]
    if not missing:
        return None
    return (
        f"serve.host is {serve.host}: other machines can reach the ports, and {' and '.join(missing)} "
        f"{'is' if len(missing) == 1 else 'are'} not set. Set them, or keep the ports behind a firewall."
    )
