"""The console entry: runs a command and turns whatever happens into lines and an exit code."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from typing import Any, NoReturn

from clickline.cli.exit_codes import ExitCode, exit_code
from clickline.cli.signals import leave, listen
from clickline.errors import ClicklineError, ConfigError
from clickline.progress import printable

_FULL = (errno.ENOSPC, errno.EDQUOT)


def main() -> NoReturn:
    """`clickline …`"""
    try:
        listen()
        code = _run(sys.argv[1:])
        sys.stdout.flush()
    except KeyboardInterrupt:
        leave()
    except BrokenPipeError:
        # Whoever read our output has seen enough. The interpreter flushes once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = ExitCode.FAILED
    sys.exit(code)


def _run(arguments: list[str]) -> int:
    # Commands and what they need are imported here, where an interrupt is handled already.
    import typer

    from clickline.cli.app import app

    debug = "--debug" in arguments
    failure = _Failure(debug=debug, as_json="--json" in arguments)
    try:
        command = typer.main.get_command(app)
        with command.make_context("clickline", [a for a in arguments if a != "--debug"]) as context:
            command.invoke(context)
    except typer.Exit as done:
        return done.exit_code
    except typer.TyperException as error:
        where = getattr(error, "ctx", None)
        path = where.command_path if where else "clickline"
        failure.tell("UsageError", f"{path}: {_plainly(error.format_message())} See `{path} --help`.")
        return ExitCode.BAD_CONFIG
    except ConfigError as error:
        mistakes = [vars(mistake) for mistake in error.mistakes]
        failure.tell("ConfigError", str(error), mistakes=mistakes)
        return exit_code(error)
    except ClicklineError as error:
        failure.tell(type(error).__name__, str(error))
        return exit_code(error)
    except BrokenPipeError:
        raise
    except OSError as error:
        # The machine's trouble, not a bug: a full disk, a folder without permission.
        place = f"{error.filename}: " if error.filename else ""
        remedy = ". Free some space, then run the same command again." if error.errno in _FULL else ""
        failure.tell(type(error).__name__, f"{place}{error.strerror or error}{remedy}")
        return ExitCode.FAILED
    except Exception as error:  # noqa: BLE001 - whatever else comes is a bug, and the user should hear so
        first_line = (str(error).splitlines() or [""])[0]
        failure.tell(
            type(error).__name__,
            f"this is a bug in Clickline: {type(error).__name__}: {first_line}"
            + ("" if debug else " (run the same command with --debug to see where)"),
        )
        return ExitCode.FAILED
    return ExitCode.DONE


def _plainly(message: str) -> str:
    """Typer's words for a wrong argument without those of the library that it parses with."""
    message = message.replace("Value error, ", "").partition(", unable to parse")[0]
    message = message.replace("Input should be", "it should be").rstrip(".")
    return message if message.endswith("?") else f"{message}."


class _Failure:
    """How an error is told: plain lines on stderr, and with --json a document on stdout."""

    def __init__(self, *, debug: bool, as_json: bool) -> None:
        self.debug = debug
        self.as_json = as_json

    def tell(self, kind: str, message: str, **more: Any) -> None:
        if self.debug:
            traceback.print_exc()
        sys.stderr.write(f"{printable(message)}\n")
        if self.as_json:
            from clickline.cli.console import emit

            emit({"error": {"kind": kind, "message": message, **more}})
