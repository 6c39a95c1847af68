"""Fits a calibration (models/calibration.py) on the binned counts of held-out rows (`Counts.bins()`)."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from clickline.errors import DataError
from clickline.evaluation.score_digest import Bins
from clickline.models.calibration import CLIP, Isotonic, Platt

Doubles = NDArray[np.float64]

MOST_STEPS = 500
LEAST_ROWS = 20
"""Isotonic regression starts from this many groups of equal weight, or fewer that have so many rows each:
enough for any bend, few enough not to chase noise."""

LEAN = 0.25
"""How far the ends of a block lean towards its neighbours, as a part of the smaller distance to them."""

LEAST_SLOPE = 1e-3
"""Platt scaling never turns the order round, even if clicks fall as predictions rise."""


def fit_isotonic(bins: Bins) -> Isotonic:
    """The rising function closest to what was observed (pool adjacent violators), made strictly rising.

    A pooled block is not level, which would tie what the model tells apart: it leans towards the blocks
    beside it. Each block also counts the model's own prediction as one row, so that a block without a click
    is not called impossible.
    """
    _need_rows(bins)
    shows_N, row = bins.shows_N, bins.row_weight
    total = float(shows_N.sum())
    steps = max(1, min(MOST_STEPS, int(total / row / LEAST_ROWS)))
    group_N = ((np.cumsum(shows_N) - shows_N / 2) / total * steps).astype(np.int64)
    starts_G = np.flatnonzero(np.concatenate(([True], group_N[1:] != group_N[:-1])))
    shows_G = np.add.reduceat(shows_N, starts_G)
    clicks_G = np.add.reduceat(bins.clicks_N, starts_G)
    score_G = np.add.reduceat(bins.score_N * shows_N, starts_G) / shows_G

    starts_K = _blocks(shows_G, clicks_G)
    while True:  # until the prior leaves no two blocks out of order
        shows_K = np.add.reduceat(shows_G, starts_K)
        score_K = np.add.reduceat(score_G * shows_G, starts_K) / shows_K
        clicks_K = np.add.reduceat(clicks_G, starts_K) + row * score_K
        again = _blocks(shows_K + row, clicks_K)
        if len(again) == len(starts_K):
            break
        starts_K = starts_K[again]

    value_K = clicks_K / (shows_K + row)
    gap_K1 = np.diff(np.concatenate(([0.0], value_K, [1.0])))
    lean_K = LEAN * np.minimum(gap_K1[:-1], gap_K1[1:])
    first_K, last_K = score_G[starts_K], score_G[np.append(starts_K[1:], len(score_G)) - 1]
    lean_K[first_K == last_K] = 0.0
    points = dict(zip(first_K.tolist(), (value_K - lean_K).tolist(), strict=True))
    points |= dict(zip(last_K.tolist(), (value_K + lean_K).tolist(), strict=True))
    points = {0.0: 0.0, 1.0: 1.0} | points
    scores = sorted(points)
    return Isotonic(tuple(scores), tuple(points[score] for score in scores))


def fit_platt(bins: Bins) -> Platt:
    """Slope and offset of the log odds with the smallest log loss, by Newton's method.

    The prior, as strong as one row, is that the model is right (slope 1, offset 0): so there is one answer
    even where rows are few or all alike.
    """
    _need_rows(bins)
    logit_N, shows_N, clicks_N = _logit(bins.score_N), bins.shows_N, bins.clicks_N
    both = _newton(logit_N, shows_N, clicks_N, bins.row_weight, slope=None)
    if both[0] >= LEAST_SLOPE:
        return Platt(*both)
    return Platt(*_newton(logit_N, shows_N, clicks_N, bins.row_weight, slope=LEAST_SLOPE))


def _need_rows(bins: Bins) -> None:
    if not bins.shows_N.sum() > 0:
        raise DataError("no rows are held out to fit the calibration on: give it rows with a weight above 0.")


def _logit(probability_N: Doubles) -> Doubles:
    clipped_N = np.clip(probability_N, CLIP, 1 - CLIP)
    return np.log(clipped_N) - np.log1p(-clipped_N)


def _newton(
    logit_N: Doubles, shows_N: Doubles, clicks_N: Doubles, prior: float, slope: float | None
) -> tuple[float, float]:
    """The slope and offset of least loss; with a slope given, the offset for it."""
    free = np.array([slope is None, True])
    at = np.array([1.0 if slope is None else slope, 0.0])

    def loss(point: Doubles) -> float:
        line_N = point[0] * logit_N + point[1]
        fit = np.sum(shows_N * np.logaddexp(0.0, line_N)) - np.sum(clicks_N * line_N)
        return float(fit + prior / 2 * np.sum((point - [1.0, 0.0]) ** 2))

    for _ in range(100):
        rate_N = 0.5 * (1 + np.tanh(0.5 * (at[0] * logit_N + at[1])))  # the sigmoid, without overflow
        miss_N, bend_N = shows_N * rate_N - clicks_N, shows_N * rate_N * (1 - rate_N)
        gradient = np.array([np.sum(miss_N * logit_N), miss_N.sum()]) + prior * (at - [1.0, 0.0])
        cross = np.sum(bend_N * logit_N)
        hessian = np.array([[np.sum(bend_N * logit_N**2), cross], [cross, bend_N.sum()]]) + prior * np.eye(2)
        step = np.zeros(2)
        step[free] = np.linalg.solve(hessian[np.ix_(free, free)], gradient[free])
        before, size = loss(at), 1.0
        while loss(at - size * step) > before and size > 1e-9:
            size /= 2
        at = at - size * step
        if np.abs(size * step).max() < 1e-10:
            break
    return float(at[0]), float(at[1])


# ── kernels ────────────────────────────────────────────────────────────────────────────────────


@njit(cache=True, nogil=True)
def _blocks(shows_G: Doubles, clicks_G: Doubles) -> NDArray[np.int64]:
    """Where the blocks start in which neighbours are pooled, so that the rate of clicks rises with each."""
    starts_K = np.empty(shows_G.size, dtype=np.int64)
    shows_K, clicks_K = np.empty(shows_G.size), np.empty(shows_G.size)
    count = 0
    for g in range(shows_G.size):
        start, shows, clicks = g, shows_G[g], clicks_G[g]
        while count > 0 and clicks_K[count - 1] * shows >= clicks * shows_K[count - 1]:
            count -= 1
            start = starts_K[count]
            shows += shows_K[count]
            clicks += clicks_K[count]
        starts_K[count], shows_K[count], clicks_K[count] = start, shows, clicks
        count += 1
    return starts_K[:count]
