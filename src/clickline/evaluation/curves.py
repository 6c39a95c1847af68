"""Evaluation curves from counts by score, thinned to at most `POINTS` points without losing their shape.

Points are spaced evenly along a curve, so steep and flat parts of the same length get the same number, and the gaps
are too small to see. Ties are one step; weights count as everywhere.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from clickline.evaluation.binary_metrics import ECE_BINS, calibration_bin
from clickline.evaluation.score_digest import Bins

Doubles = NDArray[np.float64]
Curves = dict[str, dict[str, list[float]] | None]
"""The columns of each curve; None if the rows do not give one."""

POINTS = 200
_SCORE_BINS = 50
_Z95 = 1.959963984540054


def curves(bins: Bins) -> Curves:
    """ROC, precision-recall, calibration, score histogram and gain curves. ROC, precision-recall and gain are None
    unless there are both clicks and non-clicks; all are None without rows of positive weight."""
    found: Curves = dict.fromkeys(("roc", "precision_recall", "calibration", "scores", "gain"))
    clicks, others = float(bins.clicks_N.sum()), float(bins.others_N.sum())
    if clicks + others > 0:
        found["calibration"] = _calibration(bins)
        found["scores"] = _scores(bins)
    if clicks > 0 and others > 0:
        # Highest scores first; point n is the sum over the n highest bins.
        clicks_N1, others_N1 = _cumulative(bins.clicks_N), _cumulative(bins.others_N)
        found["roc"] = _roc(clicks_N1, others_N1)
        found["precision_recall"] = _precision_recall(clicks_N1, others_N1)
        found["gain"] = _gain(clicks_N1, others_N1)
    return found


def _cumulative(values_N: Doubles) -> Doubles:
    return np.concatenate(([0.0], np.cumsum(values_N[::-1])))


def _roc(clicks_N1: Doubles, others_N1: Doubles) -> dict[str, list[float]]:
    false_N1, true_N1 = others_N1 / others_N1[-1], clicks_N1 / clicks_N1[-1]
    chosen = _thin(POINTS, false_N1, true_N1)
    return {
        "false_positive_rate": false_N1[chosen].tolist(),
        "true_positive_rate": true_N1[chosen].tolist(),
    }


def _precision_recall(clicks_N1: Doubles, others_N1: Doubles) -> dict[str, list[float]]:
    """Precision is undefined at recall 0, so the curve starts with the precision of the highest score."""
    recall_N, precision_N = clicks_N1[1:] / clicks_N1[-1], clicks_N1[1:] / (clicks_N1[1:] + others_N1[1:])
    # The precision of the first few rows jumps widely, so half of the points are spaced by recall alone.
    half = (POINTS - 1) // 2
    chosen = np.union1d(_thin(half, recall_N), _thin(half, recall_N, precision_N))
    return {
        "recall": [0.0, *recall_N[chosen].tolist()],
        "precision": [float(precision_N[0]), *precision_N[chosen].tolist()],
    }


def _gain(clicks_N1: Doubles, others_N1: Doubles) -> dict[str, list[float]]:
    """The share of clicks among the highest scores, and the lift over the average."""
    impressions_N1 = clicks_N1 + others_N1
    impressions_N1, clicks_N1 = impressions_N1 / impressions_N1[-1], clicks_N1 / clicks_N1[-1]
    chosen = _thin(POINTS - 1, impressions_N1[1:], clicks_N1[1:]) + 1
    lift = (clicks_N1[chosen] / impressions_N1[chosen]).tolist()
    return {
        "share_of_impressions": [0.0, *impressions_N1[chosen].tolist()],
        "share_of_clicks": [0.0, *clicks_N1[chosen].tolist()],
        "lift": [lift[0], *lift],
    }


def _calibration(bins: Bins) -> dict[str, list[float]]:
    """Observed against predicted rate in the bins of the ECE, with the Wilson interval of the observed rate.

    A row is one observation, however many impressions it has, as for the other intervals."""
    bin_N = calibration_bin(bins)
    impressions, clicks, predicted, squares = (
        np.bincount(bin_N, values_N, ECE_BINS)
        for values_N in (
            bins.impressions_N,
            bins.clicks_N,
            bins.score_N * bins.impressions_N,
            bins.clicks_squared_N + 2 * bins.clicks_others_N + bins.others_squared_N,
        )
    )
    nonempty = impressions > 0
    impressions, clicks, predicted, squares = (
        impressions[nonempty],
        clicks[nonempty],
        predicted[nonempty],
        squares[nonempty],
    )
    rate, rows = clicks / impressions, impressions**2 / squares
    middle = (rate + _Z95**2 / (2 * rows)) / (1 + _Z95**2 / rows)
    margin = _Z95 * np.sqrt(rate * (1 - rate) / rows + _Z95**2 / (4 * rows**2)) / (1 + _Z95**2 / rows)
    return {
        "predicted": (predicted / impressions).tolist(),
        "observed": rate.tolist(),
        "low": np.clip(middle - margin, 0.0, rate).tolist(),
        "high": np.clip(middle + margin, rate, 1.0).tolist(),
        "impressions": impressions.tolist(),
    }


def _scores(bins: Bins) -> dict[str, list[float]]:
    """Histogram of scores, in bins of equal width from the lowest to the highest."""
    low, high = float(bins.score_N[0]), float(bins.score_N[-1])
    if high - low < 1e-6:  # all equal: one bin around them
        edges = np.array([max(low - 5e-3, 0.0), min(high + 5e-3, 1.0)])
    else:
        edges = np.linspace(low, high, _SCORE_BINS + 1)
    clicks, others = (
        np.histogram(bins.score_N, edges, weights=values_N)[0] for values_N in (bins.clicks_N, bins.others_N)
    )
    return {"edges": edges.tolist(), "clicks": clicks.tolist(), "others": others.tolist()}


def _thin(points: int, *axes_N: Doubles) -> NDArray[np.int64]:
    """Indices of at most `points` points of a curve, evenly spaced along it, including the first and the last."""
    if len(axes_N[0]) <= points:
        return np.arange(len(axes_N[0]))
    length_N = np.zeros(len(axes_N[0]))
    for axis_N in axes_N:
        length_N[1:] += np.abs(np.diff(axis_N))
    length_N = np.cumsum(length_N)
    nearest = np.searchsorted(length_N, np.linspace(0.0, length_N[-1], points - 1))
    return np.union1d(np.minimum(nearest, len(length_N) - 1), [0, len(length_N) - 1])
