"""What became of each hour, one small file an hour: <home>/follow/hours/20260101-03.json.

The checkpoint alone decides which hours were learned. These files tell people, and they hold which hours were passed
over, so that a restart does not wait for them once more.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clickline.artifacts.manifest import as_json
from clickline.storage.log_files import hour_label
from clickline.storage.storage import Storage

PASSED_OVER = ("skipped", "corrupt", "empty")
"""States of an hour that was not learned and is not waited for any more."""


class HourRecords:
    """The records of one home."""

    def __init__(self, home: str, step: int) -> None:
        self._folder = Path(home, "follow", "hours")
        self._step = step

    def write(self, hour: int, record: Mapping[str, Any]) -> None:
        Storage().put(str(self._path(hour)), as_json(record, indent=1))

    def state(self, hour: int) -> str | None:
        """What became of an hour: learned, skipped, corrupt, empty; None: nothing yet."""
        path = self._path(hour)
        return str(json.loads(path.read_text())["state"]) if path.exists() else None

    def _path(self, hour: int) -> Path:
        return self._folder / f"{hour_label(hour, self._step).replace('/', '-')}.json"
