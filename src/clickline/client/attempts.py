"""One request, its response and its retries: the same for every protocol, blocking or async.

A codec builds a `PreparedRequest`, a transport returns its `RawResponse` or raises `AttemptFailed`, and `RetryBudget`
decides whether to try again. Predictions change nothing on the server, so a retry is always safe.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Generic, TypeVar

from clickline.errors import ClicklineError, ConfigError, Mistake

Result = TypeVar("Result")

_FIRST_DELAY, _MAX_DELAY = 0.05, 1.0  # seconds


@dataclass(frozen=True)
class RawResponse:
    """A server's response, not yet decoded."""

    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PreparedRequest(Generic[Result]):
    """A request, ready to be sent any number of times."""

    path: str  # an HTTP path, or a gRPC method
    body: bytes | None  # None: a GET request
    decode: Callable[[RawResponse], Result]
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ServerAddress:
    """A server's HOST:PORT."""

    host: str
    port: int

    @classmethod
    def of(cls, text: str) -> ServerAddress:
        host, colon, port = text.rpartition(":")
        bare = host.removeprefix("[").removesuffix("]")
        if not (colon and bare and port.isascii() and port.isdigit() and 0 < int(port) < 65536) or (
            "/" in host or (":" in bare and bare == host)
        ):
            problem = f"is {text[:100]!r}; allowed: HOST:PORT, as in 127.0.0.1:8500."
            raise ConfigError([Mistake("", 0, "the server's address", problem, "Name the server's port.")])
        return cls(bare, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class AttemptFailed(Exception):
    """One attempt at a request failed."""

    def __init__(self, error: ClicklineError, *, retryable: bool = False, retry_after: float = 0.0) -> None:
        super().__init__(str(error))
        self.error = error
        self.retryable = retryable  # another attempt may succeed
        self.retry_after = retry_after  # seconds that the server asks to wait before it


class RetryBudget:
    """How often and how long a request may be retried."""

    def __init__(self, timeout: float, retries: int) -> None:
        self._deadline = monotonic() + timeout
        self._retries = retries
        self._delay = _FIRST_DELAY

    @property
    def remaining(self) -> float:
        """Seconds until the deadline."""
        return max(self._deadline - monotonic(), 0.0)

    def next_delay(self, failed: AttemptFailed) -> float | None:
        """Seconds to wait before the next attempt; None: give up."""
        if not failed.retryable or self._retries <= 0:
            return None
        self._retries -= 1
        jittered = self._delay * random.uniform(0.5, 1.0)  # so that clients do not retry all at once
        delay = max(failed.retry_after, jittered)
        self._delay = min(2 * self._delay, _MAX_DELAY)
        return delay if delay < self.remaining else None
