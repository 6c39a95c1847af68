"""Escapes in patterns: `[*]`, `[?]` and `[[]`, as `glob.escape` writes them, and `[{]` mean the character itself."""

from __future__ import annotations

import re

_ESCAPED = re.compile(r"\[([*?[{])\]")
_WILDCARD = re.compile(rf"{_ESCAPED.pattern}|[*?[{{]")  # an escape matches before a wildcard


def is_glob(text: str, wildcards: str = "*?[") -> bool:
    """Whether the text has an unescaped wildcard."""
    return any(wildcard in remove_escaped(text) for wildcard in wildcards)


def remove_escaped(text: str) -> str:
    """The text without its escaped characters."""
    return _ESCAPED.sub("", text)


def unescape(text: str) -> str:
    """The text with its escapes resolved: the name that a pattern without wildcards matches."""
    return _ESCAPED.sub(r"\1", text)


def fixed_prefix(pattern: str) -> str:
    """The part before the first wildcard or {placeholder}, with escapes resolved."""
    first = next((match.start() for match in _WILDCARD.finditer(pattern) if match[1] is None), len(pattern))
    return unescape(pattern[:first])
