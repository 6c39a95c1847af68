"""Every error Clickline raises on purpose, in domain words.

    ClicklineError
    ├── ConfigError            the YAML, a --set or an argument is wrong; holds every mistake found
    ├── DataError              the input cannot be learned from as it is
    │   ├── SourceNotFound     a path, glob or pattern matches nothing
    │   ├── HourNotReady       hours without their donefile
    │   ├── TooManyBadRows     more rows in quarantine than `data.max_bad` allows
    │   └── ReaderFault        a custom reader raised, or yielded something that is not rows
    ├── StorageError           a store did not answer, refused, or its driver is not installed
    │   └── CacheFull          a file does not fit under `cache.size`, or the rest of it is in use
    ├── GateRefused            the model did not reach what the gate asks for
    ├── ArtifactError          a dataset, checkpoint or version is absent, torn or of another format
    │   ├── RegistryMoved      somebody else moved the current version meanwhile
    │   └── VersionUntrusted   a version that no trusted key has signed
    ├── ClusterError           the cluster is not there, has no room, or lost more than training can mend
    │   └── Fenced             a late word of a process whose work was given to another
    └── RequestRefused         a request that a server does not answer, and why

A message says what was found, what is allowed, and what to do about it. Which exit code an error
becomes is decided in `cli/exit_codes.py`, never here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


class ClicklineError(Exception):
    """Anything Clickline reports to its user; the message is meant to be read as it is."""


@dataclass(frozen=True)
class Mistake:
    """One thing wrong in a config: where it stands, what is wrong, what to do."""

    file: str
    line: int
    key: str
    problem: str
    remedy: str

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.line else self.file
        return " ".join(part for part in (where, self.key, self.problem, self.remedy) if part)


class ConfigError(ClicklineError):
    """The config, an override or an argument is wrong. `mistakes` lists all that was found."""

    def __init__(self, mistakes: list[Mistake]) -> None:
        super().__init__("\n".join(str(m) for m in mistakes))
        self.mistakes = mistakes


class DataError(ClicklineError):
    """The input data cannot be used as it is."""


class SourceNotFound(DataError):
    """A path, glob or {date}/{hour} pattern of the config matches no file."""


class HourNotReady(DataError):
    """Hours of the requested range have no donefile and the time to wait for them is over."""


class TooManyBadRows(DataError):
    """The share of quarantined rows is above `data.max_bad`."""


class ReaderFault(DataError):
    """A custom reader raised, or yielded something that is not a record batch."""


class StorageError(ClicklineError):
    """A store could not be reached, refused the request, or needs a driver that is not installed."""


class CacheFull(StorageError):
    """A remote file finds no room: it is larger than `cache.size`, or running work uses all the rest."""


class GateRefused(ClicklineError):
    """The model did not reach what `gate` asks for, after all retries. Nothing was published."""

    def __init__(self, message: str, reasons: Sequence[str] = (), report: Path | None = None) -> None:
        super().__init__(message)
        self.reasons = tuple(reasons) or (message,)  # what was not reached
        self.report = report  # all that was measured, if training ended so


class ArtifactError(ClicklineError):
    """A dataset, checkpoint or version is absent, torn, or written in a format this release cannot read."""


class RegistryMoved(ArtifactError):
    """Somebody else moved the registry's current version since it was looked at. Look again, then decide."""


class VersionUntrusted(ArtifactError):
    """A version is not signed, or by none of the keys in `serve.trusted_keys_file`, or its manifest was changed."""


class ClusterError(ClicklineError):
    """The Ray cluster cannot be reached, has no room for what is asked, or lost more than can be mended."""


class Fenced(ClusterError):
    """A process spoke for work that was given to another meanwhile. Nothing of what it said was taken."""


Refusal = Literal["invalid", "not_found", "unauthenticated", "overloaded", "late", "unavailable", "internal"]
"""Kinds of refused requests; each is one gRPC status and one HTTP status."""


class RequestRefused(ClicklineError):
    """A request that gets no answer: malformed, for another model, too late, or too much at once."""

    def __init__(self, kind: Refusal, message: str) -> None:
        super().__init__(message)
        self.kind = kind
