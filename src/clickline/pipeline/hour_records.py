"""One small file per hour with its outcome: <home>/follow/hours/20260101-03.json.

The checkpoint alone decides which hours are trained. These files are for people, and they record which hours were
skipped, so that a restart does not wait for them again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clickline.artifacts.manifest import as_json
from clickline.storage.log_files import hour_label
from clickline.storage.storage import Storage

SKIPPED_STATES = ("skipped", "corrupt", "empty")
"""States of an hour that was not trained and is no longer waited for."""


class HourRecords:
    """The records of one home."""

    def __init__(self, home: str, step: int) -> None:
        self._folder = Path(home, "follow", "hours")
        self._step = step

    def write(self, hour: int, record: Mapping[str, Any]) -> None:
        Storage().put(str(self._path(hour)), as_json(record, indent=1))

    def state(self, hour: int) -> str | None:
        """The state of an hour: learned, skipped, corrupt or empty; None if it has no record yet."""
        path = self._path(hour)
        return str(json.loads(path.read_text())["state"]) if path.exists() else None

    def _path(self, hour: int) -> Path:
        return self._folder / f"{hour_label(hour, self._step).replace('/', '-')}.json"
