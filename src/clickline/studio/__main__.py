"""The studio as a child of `clickline up`: it shows the run's home, and ends with its parent.

    python -P -m clickline.studio child FD

FD is one end of a pair of sockets: {"config": …} comes in, {"studio": {…}} or {"error": {…}} goes out. For people there
is `clickline studio`.
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
    words = end.makefile("rb")
    first = words.readline()
    if not first:
        os._exit(1)
    threading.Thread(target=_leave_with_parent, args=(words,), daemon=True).start()
    teller = ProgressSender(end)
    try:
        from clickline.config import Config
        from clickline.studio.homes import home_of
        from clickline.studio.run import Address, run

        config = Config.model_validate(json.loads(first)["config"])

        def up(address: Address) -> None:
            token = None if address.token_file is None else str(address.token_file)
            teller.send(studio={"url": address.url, "token_file": token})

        run([home_of(config, None, set())], config.studio.host, config.studio.port, up)
        os._exit(0)
    except ClicklineError as error:
        teller.send(error=error_to_json(error))
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("clickline"):
            raise
        needed = f"the studio needs the package {error.name}: pip install 'clickline[studio]'"
        teller.send(error=error_to_json(ClicklineError(needed)))
    os._exit(1)


def _leave_with_parent(words: IO[bytes]) -> None:
    with suppress(OSError):
        words.read()
    os._exit(1)


if __name__ == "__main__":
    if sys.argv[1:2] != ["child"]:
        sys.exit("This is for `clickline up`. Run `clickline studio`: it takes -c FILE and --home DIR.")
    main(int(sys.argv[2]))
