"""Makes a learner of `up --follow` that finds this on its path die by SIGKILL at an exact moment.

The file that CLICKLINE_DEATHS names holds one death a line, a list as JSON: module[:class], function, at which call,
whether after it. Each learner that is started takes the first one away; without any it lives on.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def _take(deaths: Path) -> list | None:
    first, *left = [*deaths.read_text().splitlines(), ""]
    deaths.write_text("\n".join(left))
    return json.loads(first) if first else None


if "CLICKLINE_DEATHS" in os.environ and sys.orig_argv[-3:-1] == [
    "clickline.pipeline.child_process",
    "follow",
]:
    _death = _take(Path(os.environ["CLICKLINE_DEATHS"]))
    if _death is not None:
        sys.path.append(str(Path(__file__).parents[1]))
        from dying import die_at

        die_at(*_death)
