"""Calibration: a monotonic function that corrects a model's probabilities without changing their order.

Fitted after training (evaluation/calibration_fit.py) and stored with the model as JSON. A row's result does not
depend on the batch it is in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from clickline.errors import ArtifactError
from clickline.numba_cache import njit

Probabilities = NDArray[np.float32] | NDArray[np.float64]
Doubles = NDArray[np.float64]
P = TypeVar("P", NDArray[np.float32], NDArray[np.float64])

CLIP = 1e-7
"""Probabilities are clipped to [CLIP, 1 - CLIP]: the largest log loss of one row is then 16.1."""


@dataclass(frozen=True)
class Isotonic:
    """A piecewise linear function through ascending points, the first at score 0, the last at 1."""

    scores: tuple[float, ...]
    values: tuple[float, ...]

    def apply(self, probability_B: P) -> P:
        scores_K, values_K = self._points
        return _interpolate(probability_B, scores_K, values_K).astype(probability_B.dtype)

    @cached_property
    def _points(self) -> tuple[Doubles, Doubles]:
        return np.array(self.scores), np.array(self.values)

    def to_json(self) -> dict[str, Any]:
        return {"kind": "isotonic", "scores": list(self.scores), "values": list(self.values)}


@dataclass(frozen=True)
class Platt:
    """sigmoid(slope * logit + offset) with a positive slope."""

    slope: float
    offset: float

    def apply(self, probability_B: P) -> P:
        return _platt(probability_B, self.slope, self.offset).astype(probability_B.dtype)

    def to_json(self) -> dict[str, Any]:
        return {"kind": "platt", "slope": self.slope, "offset": self.offset}


Calibration = Isotonic | Platt


def calibration_from_json(document: Mapping[str, Any]) -> Calibration:
    """A calibration as `to_json` wrote it."""
    kind = document.get("kind")
    try:
        if kind == "isotonic":
            scores, values = ([float(x) for x in document[part]] for part in ("scores", "values"))
            ascending = all(a < b for a, b in pairwise(scores)) and all(a <= b for a, b in pairwise(values))
            in_range = all(0 <= value <= 1 for value in values)
            if len(scores) == len(values) and ascending and in_range and scores[:1] + scores[-1:] == [0, 1]:
                return Isotonic(tuple(scores), tuple(values))
        elif kind == "platt":
            slope, offset = float(document["slope"]), float(document["offset"])
            if math.isfinite(slope) and math.isfinite(offset) and slope > 0:
                return Platt(slope, offset)
        else:
            raise ArtifactError(
                f"unknown calibration kind {kind!r}; expected isotonic or platt. Train again."
            )
    except (KeyError, TypeError, ValueError) as error:
        raise ArtifactError(f"the {kind} calibration is invalid: {error}. Train again.") from error
    raise ArtifactError(f"the {kind} calibration is not increasing. Train again.")


# ── kernels ────────────────────────────────────────────────────────────────────────────────────


@njit(cache=True, nogil=True)
def _interpolate(probability_B: Probabilities, scores_K: Doubles, values_K: Doubles) -> NDArray[np.float64]:
    """Linear interpolation that never decreases, not even by rounding."""
    out_B = np.empty(probability_B.size)
    for b in range(probability_B.size):
        x = min(max(np.float64(probability_B[b]), 0.0), 1.0)
        k = np.searchsorted(scores_K, x, side="right") - 1
        if k >= scores_K.size - 1:
            out_B[b] = values_K[-1]
        else:
            slope = (values_K[k + 1] - values_K[k]) / (scores_K[k + 1] - scores_K[k])
            out_B[b] = min(values_K[k] + (x - scores_K[k]) * slope, values_K[k + 1])
    return out_B


@njit(cache=True, nogil=True)
def _platt(probability_B: Probabilities, slope: float, offset: float) -> NDArray[np.float64]:
    out_B = np.empty(probability_B.size)
    for b in range(probability_B.size):
        x = min(max(np.float64(probability_B[b]), CLIP), 1 - CLIP)
        out_B[b] = 1 / (1 + math.exp(-(slope * (math.log(x) - math.log1p(-x)) + offset)))
    return out_B
