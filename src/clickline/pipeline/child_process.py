"""A child process of `clickline up`: runs one role, reports progress, and exits with its parent.

    python -P -m clickline.pipeline.child_process ROLE FD

The parent sends one message, {"config": …, "backfill": …}. Work exits at once when the parent dies, because it resumes
exactly wherever it was killed; the endpoint drains its requests first.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

from clickline.config import Config
from clickline.errors import ClicklineError
from clickline.pipeline.ipc import ProgressSender, error_to_json
from clickline.processes import ParentConnection

if TYPE_CHECKING:
    from clickline.serving.supervisor import ServerInfo


def main() -> None:
    role = sys.argv[1]
    # Until the server installs its own handler, which drains, SIGTERM ends it.
    signal.signal(signal.SIGTERM, signal.SIG_DFL if role == "serve" else _interrupt)
    parent = ParentConnection(int(sys.argv[2]))
    config = Config.model_validate(parent.request["config"])
    parent.exit_with_parent(drain=config.serve.drain_timeout if role == "serve" else None)
    code = _run(role, config, parent.request["backfill"], ProgressSender(parent.socket))
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)  # without waiting for threads that still run


def _run(role: str, config: Config, backfill: str | None, sender: ProgressSender) -> int:
    try:
        _run_role(role, config, backfill, sender)
        sender.send(done=True)
        return 0
    except KeyboardInterrupt:
        return 130
    except ClicklineError as error:
        sender.send(error=error_to_json(error))
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("clickline"):
            return _crashed(error, sender)
        needed = ClicklineError(
            f"`clickline up` needs the package {error.name}: pip install 'clickline[train,serve]'"
        )
        sender.send(error=error_to_json(needed))
    except Exception as error:  # noqa: BLE001 - the parent decides what to do
        return _crashed(error, sender)
    return 1


def _run_role(role: str, config: Config, backfill: str | None, sender: ProgressSender) -> None:
    # Imported late: this takes a second, and errors are reported to the parent from here on.
    if role == "flow":
        from clickline.pipeline.flow import run_flow

        run_flow(config, sender)
    elif role == "follow":
        from clickline.pipeline.backfill import parse_backfill
        from clickline.pipeline.follow import follow

        follow(config, sender, backfill=None if backfill is None else parse_backfill(backfill))
    else:
        from clickline.pipeline.endpoint import endpoint_of
        from clickline.serving.run import serve

        def report(server: ServerInfo) -> None:
            addresses = endpoint_of(config, server.example).to_json()
            sender.send(up={"version": server.version, "processes": server.processes, **addresses})

        serve(config, report)


def _crashed(error: Exception, sender: ProgressSender) -> int:
    traceback.print_exc()
    crash: dict[str, Any] = {"type": type(error).__name__, "message": str(error)}
    if isinstance(error, OSError):
        crash |= {"errno": error.errno, "strerror": error.strerror, "filename": error.filename}
    with suppress(OSError):  # the parent may be gone
        sender.send(crash=crash)
    return 1


def _interrupt(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # one is enough; the parent kills this process if it takes too long
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
