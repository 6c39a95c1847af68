"""Finds the known name that a mistyped one probably means, at a cost independent of the number of names.

Comparing takes some ten microseconds per name, on the event loop, and a client can send many wrong names. So among many
names only a few are compared: the neighbors in alphabetical order, read forwards (a typo near the end) and backwards (a
typo near the beginning), and the names that result from removing one letter.
"""

from __future__ import annotations

from bisect import bisect
from difflib import get_close_matches
from functools import lru_cache

_COMPARE_ALL = 48  # up to this many names, all are compared
_NEIGHBORS = 6  # names compared on each side, if there are more
_MAX_LENGTH = 60  # letters that are compared


def nearest_name(name: str, known: tuple[str, ...], cutoff: float = 0.6) -> str | None:
    """The name in `known` that is most similar to `name`, ignoring case; None if none is similar."""
    by_text, forwards, backwards = _sorted_names(known)
    text = name[:_MAX_LENGTH].lower()
    if text in by_text:
        return by_text[text]
    compared = forwards
    if len(forwards) > _COMPARE_ALL:
        candidates = dict.fromkeys(_neighbors(text, forwards))
        candidates |= dict.fromkeys(other[::-1] for other in _neighbors(text[::-1], backwards))
        shorter = (text[:at] + text[at + 1 :] for at in range(len(text)))
        candidates |= dict.fromkeys(other for other in shorter if other in by_text)
        compared = tuple(candidates)
    near = get_close_matches(text, compared, n=1, cutoff=cutoff)
    return by_text[near[0]] if near else None


def _neighbors(text: str, ordered: tuple[str, ...]) -> tuple[str, ...]:
    at = bisect(ordered, text)
    return ordered[max(0, at - _NEIGHBORS) : at + _NEIGHBORS]


@lru_cache(maxsize=16)
def _sorted_names(known: tuple[str, ...]) -> tuple[dict[str, str], tuple[str, ...], tuple[str, ...]]:
    """Names by their compared text; these texts sorted, and sorted by their reversed form."""
    by_text = {
        name[:_MAX_LENGTH].lower(): name for name in reversed(known)
    }  # among equal texts the first name wins
    return by_text, tuple(sorted(by_text)), tuple(sorted(text[::-1] for text in by_text))
