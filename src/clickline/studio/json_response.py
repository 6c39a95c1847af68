"""Encodes responses as JSON that every browser can parse, without secrets."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import cache
from typing import Any


def encode_json(document: Any, redact: Callable[[str], str]) -> bytes:
    """A document as ASCII JSON. NaN and infinity become null."""
    return json.dumps(_plain(document, cache(redact)), separators=(",", ":")).encode("ascii")


def _plain(value: Any, redact: Callable[[str], str]) -> Any:
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {redact(str(key)): _plain(below, redact) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(below, redact) for below in value]
    return _plain(value.item(), redact) if hasattr(value, "item") else redact(str(value))  # NumPy's; paths
