"""The studio as a child process of `clickline up`: it shows the run's home and exits with its parent.

    python -P -m clickline.studio child FD

{"config": …} comes in, {"studio": {…}} or {"error": {…}} goes out. Users run
`clickline studio` instead.
"""

from __future__ import annotations

import os
import signal
import sys

from clickline.errors import ClicklineError
from clickline.pipeline.ipc import error_to_json
from clickline.processes import ParentConnection


def main(descriptor: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parent = ParentConnection(descriptor)
    parent.exit_with_parent()
    try:
        from clickline.config import Config
        from clickline.studio.homes import home_of
        from clickline.studio.run import StudioAddress, run

        config = Config.model_validate(parent.request["config"])

        def report(address: StudioAddress) -> None:
            token = None if address.token_file is None else str(address.token_file)
            parent.send(studio={"url": address.url, "token_file": token})

        run([home_of(config, None, set())], config.studio.host, config.studio.port, report)
        os._exit(0)
    except ClicklineError as error:
        parent.send(error=error_to_json(error))
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("clickline"):
            raise
        problem = f"the studio needs the package {error.name}: pip install 'clickline[studio]'"
        parent.send(error=error_to_json(ClicklineError(problem)))
    os._exit(1)


if __name__ == "__main__":
    if sys.argv[1:2] != ["child"]:
        sys.exit(
            "This module is for `clickline up`. Run `clickline studio`, which takes -c FILE and --home DIR."
        )
    main(int(sys.argv[2]))
