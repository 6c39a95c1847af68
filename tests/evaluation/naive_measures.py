"""Metrics computed naively from their definitions: every click against every non-click."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def expanded(labels, weights, scores):
    """Single impressions: (clicked, score) for each."""
    for label, weight, score in zip(labels, weights, scores, strict=True):
        clicks = round(label * weight)
        yield from [(1, score)] * clicks + [(0, score)] * (round(weight) - clicks)


def auc_by_pairs(labels: Sequence[float], weights: Sequence[float], scores: Sequence[float]) -> float | None:
    won = pairs = 0.0
    for label, weight, score in zip(labels, weights, scores, strict=True):
        for other_label, other_weight, other_score in zip(labels, weights, scores, strict=True):
            mass = label * weight * (1 - other_label) * other_weight
            pairs += mass
            won += mass * (1.0 if score > other_score else 0.5 if score == other_score else 0.0)
    return won / pairs if pairs else None


def auc_by_sorting(labels: np.ndarray, weights: np.ndarray, scores: np.ndarray) -> float:
    _, place = np.unique(scores, return_inverse=True)
    clicks = np.bincount(place, labels.astype(np.float64) * weights)
    others = np.bincount(place, (1 - labels.astype(np.float64)) * weights)
    return float((clicks * (np.cumsum(others) - others / 2)).sum() / (clicks.sum() * others.sum()))


def logloss_by_rows(labels, weights, scores, clip=1e-7) -> float:
    total = 0.0
    for label, weight, score in zip(labels, weights, scores, strict=True):
        p = min(max(float(score), clip), 1 - clip)
        total -= weight * (label * math.log(p) + (1 - label) * math.log(1 - p))
    return total / sum(weights)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def columns(labels, weights, scores):
    """The three columns of a batch as Counts takes them."""
    return tuple(np.array(values, dtype=np.float32) for values in (labels, weights, scores))


def clicks_of(rng: np.random.Generator, rows: int, mean=-1.5, spread=1.2):
    """Plain rows whose predictions are right: label, weight, probability."""
    probability = sigmoid(rng.normal(mean, spread, rows)).astype(np.float32)
    label = (rng.random(rows) < probability).astype(np.float32)
    return label, np.ones(rows, dtype=np.float32), probability
