"""Small files that others write, read whenever somebody looks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Stamp = tuple[int, int]
"""When a file was written and how large it is; zeros where there is none."""


def read_document(path: Path) -> dict[str, Any]:
    """Empty when it is not there, or what a power cut left of it."""
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def stamp_of(path: Path) -> Stamp:
    try:
        found = path.stat()
    except OSError:
        return (0, 0)
    return found.st_mtime_ns, found.st_size
