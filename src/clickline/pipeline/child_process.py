"""A child of `clickline up`: runs one role, tells what happens, and ends with its parent.

    python -P -m clickline.pipeline.child_process ROLE FD

FD is one end of a pair of sockets. The first line that comes in is {"config": …, "backfill": …}, and none after it: the
end of the stream is the end of the parent, however it died.
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
from clickline.pipeline.ipc import Teller, told_error

if TYPE_CHECKING:
    from clickline.serving.supervisor import Up

_LAST_SECONDS = 8.0  # after the time to drain: the endpoint is gone by then, or never will be


def main() -> None:
    role = sys.argv[1]
    end = socket.socket(fileno=int(sys.argv[2]))
    if role == "serve":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # until the service takes it, to drain
    else:
        signal.signal(signal.SIGTERM, _interrupt)
    words = end.makefile("rb")
    first = words.readline()
    if not first:
        os._exit(1)
    told = json.loads(first)
    config = Config.model_validate(told["config"])
    drain = config.serve.drain if role == "serve" else None
    threading.Thread(target=_leave_with_parent, args=(words, drain), daemon=True).start()
    code = _run(role, config, told["backfill"], Teller(end))
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)  # threads that still run have nothing to say any more


def _run(role: str, config: Config, backfill: str | None, teller: Teller) -> int:
    try:
        _play(role, config, backfill, teller)
        teller.send(done=True)
        return 0
    except KeyboardInterrupt:
        return 130
    except ClicklineError as error:
        teller.send(error=told_error(error))
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("clickline"):
            return _crashed(error, teller)
        needed = ClicklineError(
            f"`clickline up` needs the package {error.name}: pip install 'clickline[train,serve]'"
        )
        teller.send(error=told_error(needed))
    except Exception as error:  # noqa: BLE001 - the parent decides what becomes of it
        return _crashed(error, teller)
    return 1


def _play(role: str, config: Config, backfill: str | None, teller: Teller) -> None:
    # What a role needs is imported here: it takes a second, and errors are told from here on.
    if role == "flow":
        from clickline.pipeline.flow import build

        build(config, teller)
    elif role == "follow":
        from clickline.pipeline.backfill import hours_between
        from clickline.pipeline.follow import follow

        follow(config, teller, backfill=None if backfill is None else hours_between(backfill))
    else:
        from clickline.pipeline.endpoint import endpoint
        from clickline.serving.run import serve

        def up(now: Up) -> None:
            where = endpoint(config, now.example).to_json()
            teller.send(up={"version": now.version, "processes": now.processes, **where})

        serve(config, up)


def _crashed(error: Exception, teller: Teller) -> int:
    traceback.print_exc()
    told: dict[str, Any] = {"type": type(error).__name__, "message": str(error)}
    if isinstance(error, OSError):
        told |= {"errno": error.errno, "strerror": error.strerror, "filename": error.filename}
    with suppress(OSError):  # the crash may be that the parent is gone
        teller.send(crash=told)
    return 1


def _interrupt(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # the first one ends us; the parent kills if that takes too long
    raise KeyboardInterrupt


def _leave_with_parent(words: IO[bytes], drain: int | None) -> None:
    """Work ends at once: it can be killed anywhere and goes on exactly. A service lets running requests end."""
    with suppress(OSError):  # ECONNRESET, where the parent died before it had read all that we told it
        words.read()
    if drain is not None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(drain + _LAST_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    main()
