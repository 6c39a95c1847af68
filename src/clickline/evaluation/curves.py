"""The curves that people look at, from counts by score: at most `POINTS` points each, and no shape lost.

Points are chosen evenly along a curve, so a steep part gets as many as a flat one of the same length, and what is
between two points is shorter than the eye can tell. Ties are one step, weights count as everywhere.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from clickline.evaluation.binary_metrics import ECE_BINS, calibration_bin
from clickline.evaluation.score_digest import Bins

Doubles = NDArray[np.float64]
Curves = dict[str, dict[str, list[float]] | None]
"""By curve, its columns; None where the rows do not give one."""

POINTS = 200
_SCORE_BINS = 50
_Z95 = 1.959963984540054


def curves(bins: Bins) -> Curves:
    """ROC, precision by recall, calibration, histogram of scores, gain. Those that compare clicks with non-clicks are
    None where there are not both; all are None without rows that have a weight."""
    found: Curves = dict.fromkeys(("roc", "precision_recall", "calibration", "scores", "gain"))
    clicks, others = float(bins.clicks_N.sum()), float(bins.others_N.sum())
    if clicks + others > 0:
        found["calibration"] = _calibration(bins)
        found["scores"] = _scores(bins)
    if clicks > 0 and others > 0:
        # Highest scores first; from here on, point n is what the n highest bins come to.
        clicks_N1, others_N1 = _summed(bins.clicks_N), _summed(bins.others_N)
        found["roc"] = _roc(clicks_N1, others_N1)
        found["precision_recall"] = _precision_recall(clicks_N1, others_N1)
        found["gain"] = _gain(clicks_N1, others_N1)
    return found


def _summed(values_N: Doubles) -> Doubles:
    return np.concatenate(([0.0], np.cumsum(values_N[::-1])))


def _roc(clicks_N1: Doubles, others_N1: Doubles) -> dict[str, list[float]]:
    false_N1, true_N1 = others_N1 / others_N1[-1], clicks_N1 / clicks_N1[-1]
    chosen = _evenly(POINTS, false_N1, true_N1)
    return {
        "false_positive_rate": false_N1[chosen].tolist(),
        "true_positive_rate": true_N1[chosen].tolist(),
    }


def _precision_recall(clicks_N1: Doubles, others_N1: Doubles) -> dict[str, list[float]]:
    """Nothing predicted has no precision, so the curve begins with the highest score, drawn back to recall 0."""
    recall_N, precision_N = clicks_N1[1:] / clicks_N1[-1], clicks_N1[1:] / (clicks_N1[1:] + others_N1[1:])
    # The precision of the first few rows jumps up and down a long way: half of the points are for all the others.
    half = (POINTS - 1) // 2
    chosen = np.union1d(_evenly(half, recall_N), _evenly(half, recall_N, precision_N))
    return {
        "recall": [0.0, *recall_N[chosen].tolist()],
        "precision": [float(precision_N[0]), *precision_N[chosen].tolist()],
    }


def _gain(clicks_N1: Doubles, others_N1: Doubles) -> dict[str, list[float]]:
    """How many of the clicks the highest scores have, and how many times the average that is."""
    shows_N1 = clicks_N1 + others_N1
    shows_N1, clicks_N1 = shows_N1 / shows_N1[-1], clicks_N1 / clicks_N1[-1]
    chosen = _evenly(POINTS - 1, shows_N1[1:], clicks_N1[1:]) + 1
    lift = (clicks_N1[chosen] / shows_N1[chosen]).tolist()
    return {
        "share_of_shows": [0.0, *shows_N1[chosen].tolist()],
        "share_of_clicks": [0.0, *clicks_N1[chosen].tolist()],
        "lift": [lift[0], *lift],
    }


def _calibration(bins: Bins) -> dict[str, list[float]]:
    """Observed by predicted rate, in the bins of the ECE, with Wilson's interval of the observed one.

    A row is one observation, however many shows it has, as for the other intervals."""
    place_N = calibration_bin(bins)
    shows, clicks, predicted, squares = (
        np.bincount(place_N, values_N, ECE_BINS)
        for values_N in (
            bins.shows_N,
            bins.clicks_N,
            bins.score_N * bins.shows_N,
            bins.clicks_squared_N + 2 * bins.clicks_others_N + bins.others_squared_N,
        )
    )
    some = shows > 0
    shows, clicks, predicted, squares = shows[some], clicks[some], predicted[some], squares[some]
    rate, rows = clicks / shows, shows**2 / squares
    middle = (rate + _Z95**2 / (2 * rows)) / (1 + _Z95**2 / rows)
    margin = _Z95 * np.sqrt(rate * (1 - rate) / rows + _Z95**2 / (4 * rows**2)) / (1 + _Z95**2 / rows)
    return {
        "predicted": (predicted / shows).tolist(),
        "observed": rate.tolist(),
        "low": np.clip(middle - margin, 0.0, rate).tolist(),
        "high": np.clip(middle + margin, rate, 1.0).tolist(),
        "shows": shows.tolist(),
    }


def _scores(bins: Bins) -> dict[str, list[float]]:
    """How often scores occur, in bins of equal width from the lowest to the highest."""
    low, high = float(bins.score_N[0]), float(bins.score_N[-1])
    if high - low < 1e-6:  # all the same: one bin around it
        edges = np.array([max(low - 5e-3, 0.0), min(high + 5e-3, 1.0)])
    else:
        edges = np.linspace(low, high, _SCORE_BINS + 1)
    clicks, others = (
        np.histogram(bins.score_N, edges, weights=values_N)[0] for values_N in (bins.clicks_N, bins.others_N)
    )
    return {"edges": edges.tolist(), "clicks": clicks.tolist(), "others": others.tolist()}


def _evenly(points: int, *axes_N: Doubles) -> NDArray[np.int64]:
    """At most so many places of a curve, the first and the last among them, with even ways between them."""
    if len(axes_N[0]) <= points:
        return np.arange(len(axes_N[0]))
    way_N = np.zeros(len(axes_N[0]))
    for axis_N in axes_N:
        way_N[1:] += np.abs(np.diff(axis_N))
    way_N = np.cumsum(way_N)
    nearest = np.searchsorted(way_N, np.linspace(0.0, way_N[-1], points - 1))
    return np.union1d(np.minimum(nearest, len(way_N) - 1), [0, len(way_N) - 1])
