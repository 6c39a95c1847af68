"""The known name that a mistyped one probably means, at a cost that does not grow with the number of names.

Comparing takes some ten microseconds a name, on the event loop, and whoever sends wrong names can send many. So of many
names only a few are compared: those that stand beside it in the order of the alphabet, read forwards (a mistake near
the end) and backwards (one near the beginning), and those that it becomes without one of its letters.
"""

from __future__ import annotations

from bisect import bisect
from difflib import get_close_matches
from functools import lru_cache

_ALL = 48  # names that are all compared
_BESIDE = 6  # names on each side, where there are more
_LONGEST = 60  # letters that are looked at


def nearest_name(name: str, known: tuple[str, ...], cutoff: float = 0.6) -> str | None:
    """The one of `known` that is most like `name`, without regard to case; None if none is."""
    by_text, forwards, backwards = _ordered(known)
    text = name[:_LONGEST].lower()
    if text in by_text:
        return by_text[text]
    compared = forwards
    if len(forwards) > _ALL:
        beside = dict.fromkeys(_beside(text, forwards))
        beside |= dict.fromkeys(other[::-1] for other in _beside(text[::-1], backwards))
        shorter = (text[:place] + text[place + 1 :] for place in range(len(text)))
        beside |= dict.fromkeys(other for other in shorter if other in by_text)
        compared = tuple(beside)
    near = get_close_matches(text, compared, n=1, cutoff=cutoff)
    return by_text[near[0]] if near else None


def _beside(text: str, ordered: tuple[str, ...]) -> tuple[str, ...]:
    place = bisect(ordered, text)
    return ordered[max(0, place - _BESIDE) : place + _BESIDE]


@lru_cache(maxsize=16)
def _ordered(known: tuple[str, ...]) -> tuple[dict[str, str], tuple[str, ...], tuple[str, ...]]:
    """Names by what is compared of them, in the order of the alphabet, and from behind."""
    by_text = {name[:_LONGEST].lower(): name for name in reversed(known)}  # of equal ones the first
    return by_text, tuple(sorted(by_text)), tuple(sorted(text[::-1] for text in by_text))
