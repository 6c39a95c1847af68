"""Fits a calibration (models/calibration.py) on the binned counts of held-out rows (`MetricCounts.bins()`)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from clickline.errors import DataError
from clickline.evaluation.score_digest import Bins
from clickline.models.calibration import CLIP, Calibration, Isotonic, Platt
from clickline.numba_cache import njit

Doubles = NDArray[np.float64]

MAX_GROUPS = 500
MIN_GROUP_ROWS = 20
"""Isotonic regression starts from MAX_GROUPS groups of equal weight, or fewer with this many rows each: enough to
follow any shape, few enough not to fit noise."""

MAX_TILT = 0.25
"""How far the ends of a block tilt towards its neighbours, as a share of the smaller distance to them."""

MIN_SLOPE = 1e-3
"""Platt scaling never reverses the order, even if clicks fall as predictions rise."""


def fit_calibration(method: str, bins: Bins) -> Calibration:
    """Fit the calibration that `train.calibration.method` names."""
    return fit_isotonic(bins) if method == "isotonic" else fit_platt(bins)


def fit_isotonic(bins: Bins) -> Isotonic:
    """The increasing function closest to the observations (pool adjacent violators), made strictly increasing.

    A pooled block is tilted towards its neighbours instead of flat, so that it does not tie scores that the model
    distinguishes. As a prior, each block counts the model's own prediction as one row, so that a block without clicks
    does not get probability 0.
    """
    _check_rows(bins)
    impressions_N, row = bins.impressions_N, bins.row_weight
    total = float(impressions_N.sum())
    steps = max(1, min(MAX_GROUPS, int(total / row / MIN_GROUP_ROWS)))
    group_N = ((np.cumsum(impressions_N) - impressions_N / 2) / total * steps).astype(np.int64)
    starts_G = np.flatnonzero(np.concatenate(([True], group_N[1:] != group_N[:-1])))
    impressions_G = np.add.reduceat(impressions_N, starts_G)
    clicks_G = np.add.reduceat(bins.clicks_N, starts_G)
    score_G = np.add.reduceat(bins.score_N * impressions_N, starts_G) / impressions_G

    starts_K = _pool_adjacent(impressions_G, clicks_G)
    while True:  # until the blocks with the prior are in order
        impressions_K = np.add.reduceat(impressions_G, starts_K)
        score_K = np.add.reduceat(score_G * impressions_G, starts_K) / impressions_K
        clicks_K = np.add.reduceat(clicks_G, starts_K) + row * score_K
        pooled = _pool_adjacent(impressions_K + row, clicks_K)
        if len(pooled) == len(starts_K):
            break
        starts_K = starts_K[pooled]

    value_K = clicks_K / (impressions_K + row)
    gap_K1 = np.diff(np.concatenate(([0.0], value_K, [1.0])))
    tilt_K = MAX_TILT * np.minimum(gap_K1[:-1], gap_K1[1:])
    first_K, last_K = score_G[starts_K], score_G[np.append(starts_K[1:], len(score_G)) - 1]
    tilt_K[first_K == last_K] = 0.0
    points = dict(zip(first_K.tolist(), (value_K - tilt_K).tolist(), strict=True))
    points |= dict(zip(last_K.tolist(), (value_K + tilt_K).tolist(), strict=True))
    points = {0.0: 0.0, 1.0: 1.0} | points
    scores = sorted(points)
    return Isotonic(tuple(scores), tuple(points[score] for score in scores))


def fit_platt(bins: Bins) -> Platt:
    """The slope and offset of the log odds that minimise the log loss, by Newton's method.

    A prior of the weight of one row says that the model is right (slope 1, offset 0), so the solution is unique even if
    there are few rows or all are alike.
    """
    _check_rows(bins)
    logit_N, impressions_N, clicks_N = _logit(bins.score_N), bins.impressions_N, bins.clicks_N
    fitted = _newton(logit_N, impressions_N, clicks_N, bins.row_weight, slope=None)
    if fitted[0] >= MIN_SLOPE:
        return Platt(*fitted)
    return Platt(*_newton(logit_N, impressions_N, clicks_N, bins.row_weight, slope=MIN_SLOPE))


def _check_rows(bins: Bins) -> None:
    if not bins.impressions_N.sum() > 0:
        raise DataError(
            "no rows are held out to fit the calibration on: hold out rows with a positive weight."
        )


def _logit(probability_N: Doubles) -> Doubles:
    clipped_N = np.clip(probability_N, CLIP, 1 - CLIP)
    return np.log(clipped_N) - np.log1p(-clipped_N)


def _newton(
    logit_N: Doubles, impressions_N: Doubles, clicks_N: Doubles, prior: float, slope: float | None
) -> tuple[float, float]:
    """The slope and offset of minimum loss; if the slope is given, the offset for it."""
    free = np.array([slope is None, True])
    point = np.array([1.0 if slope is None else slope, 0.0])

    def loss(params: Doubles) -> float:
        line_N = params[0] * logit_N + params[1]
        fit = np.sum(impressions_N * np.logaddexp(0.0, line_N)) - np.sum(clicks_N * line_N)
        return float(fit + prior / 2 * np.sum((params - [1.0, 0.0]) ** 2))

    for _ in range(100):
        rate_N = 0.5 * (1 + np.tanh(0.5 * (point[0] * logit_N + point[1])))  # the sigmoid, without overflow
        residual_N, curvature_N = impressions_N * rate_N - clicks_N, impressions_N * rate_N * (1 - rate_N)
        gradient = np.array([np.sum(residual_N * logit_N), residual_N.sum()]) + prior * (point - [1.0, 0.0])
        cross = np.sum(curvature_N * logit_N)
        hessian = np.array(
            [[np.sum(curvature_N * logit_N**2), cross], [cross, curvature_N.sum()]]
        ) + prior * np.eye(2)
        step = np.zeros(2)
        step[free] = np.linalg.solve(hessian[np.ix_(free, free)], gradient[free])
        before, size = loss(point), 1.0
        while loss(point - size * step) > before and size > 1e-9:
            size /= 2
        point = point - size * step
        if np.abs(size * step).max() < 1e-10:
            break
    return float(point[0]), float(point[1])


# ── kernels ────────────────────────────────────────────────────────────────────────────────────


@njit(cache=True, nogil=True)
def _pool_adjacent(impressions_G: Doubles, clicks_G: Doubles) -> NDArray[np.int64]:
    """Starts of the blocks of pooled neighbours, whose click rates increase."""
    starts_K = np.empty(impressions_G.size, dtype=np.int64)
    impressions_K, clicks_K = np.empty(impressions_G.size), np.empty(impressions_G.size)
    count = 0
    for g in range(impressions_G.size):
        start, impressions, clicks = g, impressions_G[g], clicks_G[g]
        while count > 0 and clicks_K[count - 1] * impressions >= clicks * impressions_K[count - 1]:
            count -= 1
            start = starts_K[count]
            impressions += impressions_K[count]
            clicks += clicks_K[count]
        starts_K[count], impressions_K[count], clicks_K[count] = start, impressions, clicks
        count += 1
    return starts_K[:count]
