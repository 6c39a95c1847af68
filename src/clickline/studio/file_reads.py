"""Reads small files that other processes write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Stamp = tuple[int, int]
"""Modification time and size of a file; zeros if it does not exist."""


def read_document(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if the file is missing or damaged."""
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def current_dataset(home: Path) -> Path | None:
    """The folder of the newest complete dataset of a home."""
    try:
        return home / "datasets" / Path((home / "datasets" / "current").read_text().strip()).name
    except (OSError, ValueError):
        return None


def stamp_of(path: Path) -> Stamp:
    try:
        stat = path.stat()
    except OSError:
        return (0, 0)
    return stat.st_mtime_ns, stat.st_size
