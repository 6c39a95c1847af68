"""One request and what can become of it: the same for every protocol, waiting or not.

A protocol makes an `Ask`, a transport brings back its `Reply` or raises `Failed`, `Attempts` decides whether to try
again. Predictions change nothing on the server, so asking twice is always safe.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Generic, TypeVar

from clickline.errors import ClicklineError, ConfigError, Mistake

Answer = TypeVar("Answer")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0  # seconds


@dataclass(frozen=True)
class Reply:
    """What a server sent."""

    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Ask(Generic[Answer]):
    """A request, ready to be sent any number of times."""

    where: str  # a gRPC method, or a path
    body: bytes | None  # None: nothing is sent, only asked for
    decode: Callable[[Reply], Answer]
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Address:
    """A server's HOST:PORT."""

    host: str
    port: int

    @classmethod
    def of(cls, text: str) -> Address:
        host, colon, port = text.rpartition(":")
        bare = host.removeprefix("[").removesuffix("]")
        if not (colon and bare and port.isascii() and port.isdigit() and 0 < int(port) < 65536) or (
            "/" in host or (":" in bare and bare == host)
        ):
            problem = f"is {text[:100]!r}; HOST:PORT is allowed, as in 127.0.0.1:8500."
            raise ConfigError([Mistake("", 0, "the server's address", problem, "Name the server's port.")])
        return cls(bare, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Failed(Exception):
    """A request without an answer."""

    def __init__(self, error: ClicklineError, *, again: bool = False, wait: float = 0.0) -> None:
        super().__init__(str(error))
        self.error = error
        self.again = again  # another try may help
        self.wait = wait  # seconds that the server asks to wait before it


class Attempts:
    """How long to go on trying."""

    def __init__(self, timeout: float, retries: int) -> None:
        self._deadline = monotonic() + timeout
        self._retries = retries
        self._pause = _FIRST_PAUSE

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return max(self._deadline - monotonic(), 0.0)

    def pause(self, failed: Failed) -> float | None:
        """How long to wait before another try; None: it is over."""
        if not failed.again or self._retries <= 0:
            return None
        self._retries -= 1
        pause = max(failed.wait, self._pause * random.uniform(0.5, 1.0))  # not all clients at once
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        return pause if pause < self.left else None
