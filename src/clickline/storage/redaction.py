"""Removes passwords, signatures and keys from URIs and messages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import quote

_USER_INFO = re.compile(r"(\w+://)[^/\s]*@")
# A query string may be a signature or a token, even in a driver's "url: /path?delegation=…" without a host.
_QUERY = re.compile(r"\?[\w.%~-]+=[^\s\"'<>)]*")

# Values of these keys are useful in a message and are not secret.
_NOT_SECRET = {"user", "username", "host", "port", "endpoint_url", "region_name", "project", "type"}


def redacted(text: str) -> str:
    """A URI, or a message with URIs, without user:password@ and query strings."""
    return _QUERY.sub("?***", _USER_INFO.sub(r"\1***@", text))


class Redactor:
    """Like `redacted`, but also removes the given secrets."""

    def __init__(self, secrets: Iterable[str]) -> None:
        spellings = {form for secret in secrets for form in (secret, quote(secret, safe=""))}
        # Removing a short secret such as "s" everywhere would make messages unreadable.
        self._spellings = sorted((s for s in spellings if len(s) >= 4), key=len, reverse=True)

    def __call__(self, text: str) -> str:
        text = redacted(text)
        for spelling in self._spellings:
            text = text.replace(spelling, "***")
        return text


def secrets_in(credentials: Any, key: str = "") -> Iterator[str]:
    """Every text in a tree of credentials that must never be shown."""
    if isinstance(credentials, dict):
        for name, value in credentials.items():
            yield from secrets_in(value, str(name))
    elif isinstance(credentials, list | tuple):
        for value in credentials:
            yield from secrets_in(value, key)
    elif isinstance(credentials, str) and key not in _NOT_SECRET:
        yield from {credentials, *credentials.split()} - {""}  # "Bearer abc": the token alone is secret too
    elif isinstance(credentials, int) and not isinstance(credentials, bool) and key not in _NOT_SECRET:
        yield str(credentials)  # an unquoted numeric password in YAML
