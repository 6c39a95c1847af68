"""The exit codes of the `clickline` command."""

from __future__ import annotations

from enum import IntEnum

from clickline.errors import ClicklineError, ConfigError, DataError, GateRefused


class ExitCode(IntEnum):
    DONE = 0
    FAILED = 1
    BAD_CONFIG = 2
    """A bad config or bad arguments; for `deploy diff`, whose 1 means differences, any error."""
    GATE_REFUSED = 3
    BAD_DATA = 4
    INTERRUPTED = 130


class Undecided(ClicklineError):
    """A command whose exit code 1 is an answer could not find the answer."""


def exit_code(error: ClicklineError) -> ExitCode:
    """The exit code of a command that failed with this error."""
    if isinstance(error, ConfigError | Undecided):
        return ExitCode.BAD_CONFIG
    if isinstance(error, DataError):
        return ExitCode.BAD_DATA
    if isinstance(error, GateRefused):
        return ExitCode.GATE_REFUSED
    return ExitCode.FAILED
