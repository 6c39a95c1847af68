"""A child process of `clickline up`: runs one role, reports progress, and exits with its parent.

    python -P -m clickline.pipeline.child_process ROLE FD

FD is one end of a socket pair. The parent sends one line, {"config": …, "backfill": …}, and nothing more: the end of
the stream means that the parent has ended, however it died.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from types import FrameType
from typing import IO, TYPE_CHECKING, Any

from clickline.config import Config
from clickline.errors import ClicklineError
from clickline.pipeline.ipc import ProgressSender, error_to_json

if TYPE_CHECKING:
    from clickline.serving.supervisor import ServerInfo

_EXIT_SECONDS = 8.0  # after the drain timeout, then exit even if the endpoint still runs


def main() -> None:
    role = sys.argv[1]
    connection = socket.socket(fileno=int(sys.argv[2]))
    if role == "serve":
        signal.signal(
            signal.SIGTERM, signal.SIG_DFL
        )  # until the server installs its own handler, which drains
    else:
        signal.signal(signal.SIGTERM, _interrupt)
    inbound = connection.makefile("rb")
    first = inbound.readline()
    if not first:
        os._exit(1)
    request = json.loads(first)
    config = Config.model_validate(request["config"])
    drain = config.serve.drain_timeout if role == "serve" else None
    threading.Thread(target=_exit_with_parent, args=(inbound, drain), daemon=True).start()
    code = _run(role, config, request["backfill"], ProgressSender(connection))
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

        def started(server: ServerInfo) -> None:
            addresses = endpoint_of(config, server.example).to_json()
            sender.send(up={"version": server.version, "processes": server.processes, **addresses})

        serve(config, started)


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


def _exit_with_parent(inbound: IO[bytes], drain: int | None) -> None:
    """Exit when the parent has ended. Work exits at once, because it resumes exactly wherever it was killed; a server
    drains its requests first."""
    with suppress(OSError):  # ECONNRESET if the parent died before it had read all messages
        inbound.read()
    if drain is not None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(drain + _EXIT_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    main()
