"""The console entry point: runs a command and turns its outcome into messages and an exit code."""

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

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_RENAMED = {"No such command 'data'.": "It is now `clickline cache`: status, prefetch, clear."}


def main() -> NoReturn:
    """The entry point of the `clickline` command."""
    try:
        listen()
        code = _run(sys.argv[1:])
        sys.stdout.flush()
    except KeyboardInterrupt:
        leave()
    except BrokenPipeError:
        # The reader of our output closed it. The interpreter flushes once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = ExitCode.FAILED
    sys.exit(code)


def _run(arguments: list[str]) -> int:
    # Commands and their dependencies are imported here because interrupts are handled from here on.
    import typer

    from clickline.cli.app import app

    debug = "--debug" in arguments
    as_json = "--json" in arguments

    def report(kind: str, message: str, **more: Any) -> None:
        """Plain lines on stderr, and with --json a document on stdout."""
        if debug:
            traceback.print_exc()
        sys.stderr.write(f"{printable(message)}\n")
        if as_json:
            from clickline.cli.console import emit

            emit({"error": {"kind": kind, "message": message, **more}})

    try:
        command = typer.main.get_command(app)
        with command.make_context("clickline", [a for a in arguments if a != "--debug"]) as context:
            command.invoke(context)
    except typer.Exit as done:
        return done.exit_code
    except typer.TyperException as error:
        usage = getattr(error, "ctx", None)
        path = usage.command_path if usage else "clickline"
        report("UsageError", f"{path}: {_usage_message(error)} See `{path} --help`.")
        return ExitCode.BAD_CONFIG
    except ConfigError as error:
        mistakes = [vars(mistake) for mistake in error.mistakes]
        report("ConfigError", str(error), mistakes=mistakes)
        return exit_code(error)
    except ClicklineError as error:
        report(type(error).__name__, str(error))
        return exit_code(error)
    except BrokenPipeError:
        raise
    except OSError as error:
        # A problem of the machine, not a bug: a full disk, a folder without permission.
        path = f"{error.filename}: " if error.filename else ""
        remedy = ". Free some space, then run the same command again." if error.errno in _DISK_FULL else ""
        report(type(error).__name__, f"{path}{error.strerror or error}{remedy}")
        return ExitCode.FAILED
    except Exception as error:  # noqa: BLE001 - anything else is a bug, and the user should know
        first_line = (str(error).splitlines() or [""])[0]
        report(
            type(error).__name__,
            f"this is a bug in Clickline: {type(error).__name__}: {first_line}"
            + ("" if debug else " (run the same command with --debug to see the traceback)"),
        )
        return ExitCode.FAILED
    return ExitCode.DONE


def _usage_message(error: Any) -> str:
    """Typer's message for a wrong argument, without the phrases of its parsing library."""
    message = error.format_message().replace("Value error, ", "").partition(", unable to parse")[0]
    message = message.replace("Input should be", "it should be").rstrip(".")
    message = message if message.endswith("?") else f"{message}."
    return f"{message} {_RENAMED[message]}" if message in _RENAMED else message
