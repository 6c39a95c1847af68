"""Which ids get a vector of their own.

An id that is not admitted yet is a candidate: a small row counts its impressions, its clicks and its last hour.
Its vector and wide weight are those of the slot's default row, which is trained on all candidates of the slot.
Both rules depend only on the id and its number of impressions, so replaying the data admits the same ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from clickline.embedding.optimizers import power
from clickline.features.encoder_kernels import fmix64
from clickline.kernel_intrinsics import Int
from clickline.numba_cache import njit

_COMPONENT = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Admission:
    """Admit an id from impression number `min_impressions` on, with `probability` at each. The default admits all."""

    min_impressions: int = 1
    probability: float = 1.0

    def __post_init__(self) -> None:
        if self.min_impressions < 1:
            raise ValueError(
                f"admission after {self.min_impressions} impressions: at least 1 is required; 1 admits at once"
            )
        if not 0.0 < self.probability <= 1.0:
            raise ValueError(
                f"admission with probability {self.probability}: it must be above 0 and at most 1"
            )

    @property
    def admits_all(self) -> bool:
        return self.min_impressions == 1 and self.probability == 1.0


@njit(cache=True, nogil=True)
def draw(seed: np.uint64, id: np.uint64, component: Int) -> Any:
    """A pseudo-random number in [0, 1) that depends only on the arguments."""
    stream = fmix64(id + fmix64(seed + _COMPONENT))
    bits = fmix64(stream + np.uint64(component) * _COMPONENT)
    return np.float64(bits >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@njit(cache=True, nogil=True)
def is_admitted(
    seed: np.uint64, id: np.uint64, n_impressions: Any, min_impressions: Int, probability: float
) -> bool:
    """Whether an id with `n_impressions` has a vector: k trials admit it with probability 1 - (1 - p)^k."""
    if n_impressions < min_impressions:
        return False
    if probability >= 1.0:
        return True
    trials = np.int64(n_impressions) - min_impressions + 1
    return bool(draw(seed, id, 0) >= power(1.0 - probability, trials))
