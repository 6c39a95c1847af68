"""Makes a learner of `up --follow` that finds this on its path die by SIGKILL at an exact moment.

The file that CLICKLINE_DEATHS names holds one death a line, a list as JSON: module[:class], function, at which call,
whether after it. Each learner that is started takes the first one away; without any it lives on.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from pathlib import Path

__all__: list[str] = []


def _take(deaths: Path) -> list | None:
    first, *left = [*deaths.read_text().splitlines(), ""]
    deaths.write_text("\n".join(left))
    return json.loads(first) if first else None


def _arrange(place: str, name: str, calls: int, after: bool) -> None:
    module, _, owner = place.partition(":")
    holder = importlib.import_module(module)
    if owner:
        holder = getattr(holder, owner)
    real, seen = getattr(holder, name), []

    def dies(*arguments, **options):
        seen.append(1)
        if len(seen) == calls and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*arguments, **options)
        if len(seen) == calls:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(holder, name, dies)


if "CLICKLINE_DEATHS" in os.environ and sys.orig_argv[-3:-1] == ["clickline.pipeline.child", "follow"]:
    _death = _take(Path(os.environ["CLICKLINE_DEATHS"]))
    if _death is not None:
        _arrange(*_death)
