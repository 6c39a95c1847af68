"""Every error that Clickline raises on purpose.

    ClicklineError
    ├── ConfigError            the YAML, a --set or an argument is wrong; lists every mistake found
    ├── DataError              the input data cannot be used
    │   ├── SourceNotFound     a path, glob or pattern matches nothing
    │   ├── HourNotReady       hours whose donefile has not arrived
    │   ├── TooManyBadRows     more rows in quarantine than `data.max_bad_ratio` allows
    │   └── ReaderError        a custom reader raised an exception, or yielded something that is not rows
    ├── StorageError           a store did not answer, refused, or its driver is not installed
    │   └── CacheFull          a file does not fit into `cache.size`, or the rest of the cache is in use
    ├── GateRefused            the model did not pass the gate
    ├── ArtifactError          a dataset, checkpoint or version is missing, damaged or of another format
    │   ├── RegistryMoved      another process changed the current version meanwhile
    │   └── VersionUntrusted   a version that no trusted key has signed
    ├── ClusterError           the cluster is unreachable, has no room, or lost more than training can recover from
    │   └── Fenced             a late message from a process whose work was given to another
    └── RequestRefused         a request that the server rejects, with the reason

A message says what was found, what is allowed, and what to do about it. The exit codes are in
`cli/exit_codes.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


class ClicklineError(Exception):
    """Any error that Clickline reports to its user; the message is shown unchanged."""


@dataclass(frozen=True)
class Mistake:
    """One mistake in a config: its place, the problem, the remedy."""

    file: str
    line: int
    key: str
    problem: str
    remedy: str

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.line else self.file
        return " ".join(part for part in (where, self.key, self.problem, self.remedy) if part)


class ConfigError(ClicklineError):
    """The config, an override or an argument is wrong. `mistakes` lists all mistakes found."""

    def __init__(self, mistakes: list[Mistake]) -> None:
        super().__init__("\n".join(str(m) for m in mistakes))
        self.mistakes = mistakes


class DataError(ClicklineError):
    """The input data cannot be used."""


class SourceNotFound(DataError):
    """A path, glob or {date}/{hour} pattern of the config matches no file."""


class HourNotReady(DataError):
    """Hours of the requested range have no donefile, and the time to wait for them is over."""


class TooManyBadRows(DataError):
    """The share of quarantined rows is above `data.max_bad_ratio`."""


class ReaderError(DataError):
    """A custom reader raised an exception, or yielded something that is not a record batch."""


class StorageError(ClicklineError):
    """A store could not be reached, refused the request, or needs a driver that is not installed."""


class CacheFull(StorageError):
    """There is no room for a remote file: it is larger than `cache.size`, or all other files are in use."""


class GateRefused(ClicklineError):
    """The model did not pass the `gate`, after all extra epochs. Nothing was published."""

    def __init__(self, message: str, reasons: Sequence[str] = (), report: Path | None = None) -> None:
        super().__init__(message)
        self.reasons = tuple(reasons) or (message,)  # the conditions that failed
        self.report = report  # the report with all metrics, if training wrote one


class ArtifactError(ClicklineError):
    """A dataset, checkpoint or version is missing, damaged, or in a format that this release cannot read."""


class RegistryMoved(ArtifactError):
    """Another process changed the registry's current version since it was read. Read it again, then decide."""


class VersionUntrusted(ArtifactError):
    """A version is not signed by a key in `serve.trusted_keys_file`, or its manifest was changed."""


class ClusterError(ClicklineError):
    """The Ray cluster cannot be reached, has no room for the job, or lost more than can be recovered."""


class Fenced(ClusterError):
    """A process sent a result for work that was given to another meanwhile. The result was ignored."""


Refusal = Literal["invalid", "not_found", "unauthenticated", "overloaded", "late", "unavailable", "internal"]
"""Kinds of rejected requests; each maps to one gRPC status and one HTTP status."""


class RequestRefused(ClicklineError):
    """A request that is rejected: malformed, for an unknown model, too late, or too much at once."""

    def __init__(self, kind: Refusal, message: str) -> None:
        super().__init__(message)
        self.kind = kind
