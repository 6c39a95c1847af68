"""The serve stage as a process of its own; says on stdout when its ports are open."""

from __future__ import annotations

import sys
from pathlib import Path

from clickline.config import load_config
from clickline.stages.serve.run import Up, serve


def _say(up: Up) -> None:
    sys.stdout.write(f"up {up.version}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    serve(load_config(Path(sys.argv[1])), _say)
