"""Kills a training process of `up --follow` by SIGKILL at an exact call, if this file is on its path.

The file that CLICKLINE_KILL_POINTS names has one kill point per line, as a JSON list: module[:class], function, number of the
call, whether after it. Each training process takes the first one; without any it keeps running.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def _take(kill_points: Path) -> list | None:
    first, *left = [*kill_points.read_text().splitlines(), ""]
    kill_points.write_text("\n".join(left))
    return json.loads(first) if first else None


if "CLICKLINE_KILL_POINTS" in os.environ and sys.orig_argv[-3:-1] == [
    "clickline.pipeline.child_process",
    "follow",
]:
    _kill = _take(Path(os.environ["CLICKLINE_KILL_POINTS"]))
    if _kill is not None:
        sys.path.append(str(Path(__file__).parents[1]))
        from kill_point import kill_at

        kill_at(*_kill)
