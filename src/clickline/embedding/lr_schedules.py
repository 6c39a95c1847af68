"""Learning-rate schedules: a factor on the optimizer's learning rate for each step."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Constant:
    """A factor of 1, after a linear warmup over the first `warmup` steps."""

    warmup: int = 0

    def factor(self, step: int) -> float:
        """The factor of step 0, 1, 2, …"""
        return _warmup_factor(step, self.warmup)


@dataclass(frozen=True)
class Cosine:
    """Half a cosine from 1 down to `floor`, reached at step `steps`."""

    steps: int
    floor: float = 0.0
    warmup: int = 0

    def factor(self, step: int) -> float:
        past = max(0, step - self.warmup)
        share = min(1.0, past / max(1, self.steps - self.warmup))
        fall = self.floor + (1.0 - self.floor) * 0.5 * (1.0 + math.cos(math.pi * share))
        return _warmup_factor(step, self.warmup) * fall


@dataclass(frozen=True)
class StepDrop:
    """The factor is multiplied by `drop` every `every` steps."""

    every: int
    drop: float = 0.1
    warmup: int = 0

    def factor(self, step: int) -> float:
        return _warmup_factor(step, self.warmup) * self.drop ** (step // self.every)


@dataclass(frozen=True)
class LinearTail:
    """A factor of 1 that falls linearly to `floor` over the last `share` of the steps: late rows then refine the
    model without shifting the level of all scores."""

    steps: int
    share: float = 0.1
    floor: float = 0.1
    warmup: int = 0

    def factor(self, step: int) -> float:
        tail = max(1.0, self.share * self.steps)
        past = min(1.0, max(0.0, (step - (self.steps - tail)) / tail))
        return _warmup_factor(step, self.warmup) * (1.0 - (1.0 - self.floor) * past)


Schedule = Constant | Cosine | LinearTail | StepDrop


def _warmup_factor(step: int, warmup: int) -> float:
    return min(1.0, (step + 1) / warmup) if warmup else 1.0
