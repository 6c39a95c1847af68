"""The studio as a child process of `clickline up`: it shows the run's home and exits with its parent.

    python -P -m clickline.studio child FD

FD is one end of a socket pair: {"config": …} comes in, {"studio": {…}} or {"error": {…}} goes out. Users run
`clickline studio` instead.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from contextlib import suppress
from typing import IO

from clickline.errors import ClicklineError
from clickline.pipeline.ipc import ProgressSender, error_to_json


def main(descriptor: int) -> None:
    end = socket.socket(fileno=descriptor)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    lines = end.makefile("rb")
    first = lines.readline()
    if not first:
        os._exit(1)
    threading.Thread(target=_exit_with_parent, args=(lines,), daemon=True).start()
    sender = ProgressSender(end)
    try:
        from clickline.config import Config
        from clickline.studio.homes import home_of
        from clickline.studio.run import StudioAddress, run

        config = Config.model_validate(json.loads(first)["config"])

        def report(address: StudioAddress) -> None:
            token = None if address.token_file is None else str(address.token_file)
            sender.send(studio={"url": address.url, "token_file": token})

        run([home_of(config, None, set())], config.studio.host, config.studio.port, report)
        os._exit(0)
    except ClicklineError as error:
        sender.send(error=error_to_json(error))
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("clickline"):
            raise
        problem = f"the studio needs the package {error.name}: pip install 'clickline[studio]'"
        sender.send(error=error_to_json(ClicklineError(problem)))
    os._exit(1)


def _exit_with_parent(lines: IO[bytes]) -> None:
    with suppress(OSError):
        lines.read()
    os._exit(1)


if __name__ == "__main__":
    if sys.argv[1:2] != ["child"]:
        sys.exit(
            "This module is for `clickline up`. Run `clickline studio`, which takes -c FILE and --home DIR."
        )
    main(int(sys.argv[2]))
