"""Which signs of a pattern stand for themselves: `[*]`, `[?]` and `[[]`, as `glob.escape` writes them, and `[{]`."""

from __future__ import annotations

import re

_ESCAPED = re.compile(r"\[([*?[{])\]")
_LIVE = re.compile(rf"{_ESCAPED.pattern}|[*?[{{]")  # of two matches at one place the escape is the first


def is_glob(text: str, signs: str = "*?[") -> bool:
    """Whether a sign in it stands for other names."""
    return any(sign in live_part(text) for sign in signs)


def live_part(text: str) -> str:
    """The text without the signs that stand for themselves."""
    return _ESCAPED.sub("", text)


def literal(text: str) -> str:
    """The text without escapes: the name that a pattern without wildcards means, or a pattern as people read it."""
    return _ESCAPED.sub(r"\1", text)


def fixed_part(pattern: str) -> str:
    """What stands in front of the first wildcard or {placeholder}, without escapes."""
    first = next((match.start() for match in _LIVE.finditer(pattern) if match[1] is None), len(pattern))
    return literal(pattern[:first])
