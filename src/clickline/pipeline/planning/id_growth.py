"""How many ids there will be after more rows than were seen: Heaps' law with an exponent that fades.

Between n/8 and n rows the number of ids grows by some factor with each doubling. The factor falls as the ids that
exist run out, and keeps falling as it did: so each further doubling takes the slope (the factor's logarithm) times the
same ratio. A slope that stays as it is (plain Heaps' law) is the upper bound that is told, one that fades twice as fast
the lower one.

Rows are taken in the order of the log. Ids born as time goes by then count as what they are, growth. Estimators that
see only how often each id occurs (Chao1, Good and Toulmin) take a stretch of time for a fair sample of all of it: a
mixture of Poisson distributions, fitted to the same samples, found a tenth too few ids and a quarter too few that
were shown twice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from clickline.records import LabelledRows

PREFIXES = (8, 4, 2, 1)  # the sample's first eighth, quarter, half, and all of it


@dataclass(frozen=True)
class Estimate:
    """A number that is not known, and where it most likely lies."""

    expected: float
    low: float
    high: float

    def __add__(self, other: Estimate) -> Estimate:
        return Estimate(self.expected + other.expected, self.low + other.low, self.high + other.high)

    def __mul__(self, factor: float) -> Estimate:
        return Estimate(self.expected * factor, self.low * factor, self.high * factor)


def occurrences(rows: LabelledRows, slot: int) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """For each of `PREFIXES` the shows and the clicks of every id of the slot."""
    ids, found = rows.encoded.slots[slot], []
    for part in PREFIXES:
        count = rows.rows // part
        few = ids.slice(0, count)
        several = None if few.offsets_B1 is None else np.diff(few.offsets_B1)
        order_N = np.argsort(few.ids_N)
        rising_N = few.ids_N[order_N]
        first_D = np.flatnonzero(np.concatenate([[True], rising_N[1:] != rising_N[:-1]])[: rising_N.size])
        totals = []
        for counts_B in (rows.impression_B[:count], rows.click_B[:count]):
            counts_N = counts_B if several is None else np.repeat(counts_B, several)
            totals.append(_sums(counts_N[order_N].astype(np.float64), first_D))
        found.append((totals[0], totals[1]))
    return found


def _sums(values_N: NDArray[np.float64], first_D: NDArray[np.int64]) -> NDArray[np.float64]:
    return np.add.reduceat(values_N, first_D) if first_D.size else np.zeros(0)


def extrapolate(values: Sequence[float], scale: float) -> Estimate:
    """What values at each of `PREFIXES` come to at `scale` times as many rows as the whole sample has."""
    last = values[-1]
    if last <= 0:
        return Estimate(0.0, 0.0, 0.0)
    slopes = [math.log2(max(late, 1e-9) / max(early, 1e-9)) for early, late in pairwise(values)]
    doublings = math.log2(scale)
    if doublings <= 0:
        back = max(0.0, slopes[-1]) * doublings  # fewer rows than the sample
        return Estimate(*[last * 2.0**back] * 3)
    slope = max(0.0, slopes[-1])
    ratio = 1.0
    if slopes[0] > 0:
        ratio = min(1.0, (slope / slopes[0]) ** (1 / (len(slopes) - 1)))
    return Estimate(
        last * 2.0 ** _risen(slope, ratio, doublings),
        last * 2.0 ** _risen(slope, ratio * ratio, doublings),
        last * 2.0 ** (slope * doublings),
    )


def _risen(slope: float, ratio: float, doublings: float) -> float:
    """The sum of a slope that takes `ratio` at each doubling."""
    if ratio >= 1.0:
        return slope * doublings
    return float(slope * ratio * (1.0 - ratio**doublings) / (1.0 - ratio))
