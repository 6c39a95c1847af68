"""Which ids deserve a vector of their own.

Below admission an id is a candidate: its shows, clicks and last hour are counted in a small row, and
for vector and wide weight it uses its slot's default row, which learns from all candidates of the slot.
Both rules ask only for the id and how often it was shown, so replaying the data admits the same ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit

from clickline.embedding.raw_memory import Whole
from clickline.features.encoder_kernels import fmix64

_COMPONENT = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Admission:
    """Admit after `shows` shows, and from then on with `probability` at each show. The default admits all."""

    shows: int = 1
    probability: float = 1.0

    def __post_init__(self) -> None:
        if self.shows < 1:
            raise ValueError(f"admission after {self.shows} shows: at least 1 is needed; 1 admits at once")
        if not 0.0 < self.probability <= 1.0:
            raise ValueError(f"admission with probability {self.probability}: above 0 and up to 1 is allowed")

    @property
    def admits_all(self) -> bool:
        return self.shows == 1 and self.probability == 1.0


@njit(cache=True, nogil=True)
def draw(seed: np.uint64, id: np.uint64, component: Whole) -> Any:
    """A number in [0, 1) that depends on nothing else than what is given."""
    stream = fmix64(id + fmix64(seed + _COMPONENT))
    bits = fmix64(stream + np.uint64(component) * _COMPONENT)
    return np.float64(bits >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@njit(cache=True, nogil=True)
def is_admitted(seed: np.uint64, id: np.uint64, show: Any, shows: Whole, probability: float) -> bool:
    """Whether an id with so many shows has a vector: k trials let it in with 1 - (1 - probability)^k."""
    if show < shows:
        return False
    if probability >= 1.0:
        return True
    trials = np.int64(show) - shows + 1
    still_out = 1.0
    power = 1.0 - probability
    while trials > 0:
        if trials & 1:
            still_out *= power
        power *= power
        trials >>= 1
    return bool(draw(seed, id, 0) >= still_out)
