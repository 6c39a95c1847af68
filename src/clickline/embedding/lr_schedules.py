"""How the learning rate changes over the steps: a factor on the optimizer's own rate."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Constant:
    """1, after a linear rise over the first `warmup` steps."""

    warmup: int = 0

    def factor(self, step: int) -> float:
        """The factor of step 0, 1, 2, …"""
        return _rise(step, self.warmup)


@dataclass(frozen=True)
class Cosine:
    """From 1 down to `floor` along half a cosine that ends at step `steps`."""

    steps: int
    floor: float = 0.0
    warmup: int = 0

    def factor(self, step: int) -> float:
        past = max(0, step - self.warmup)
        share = min(1.0, past / max(1, self.steps - self.warmup))
        fall = self.floor + (1.0 - self.floor) * 0.5 * (1.0 + math.cos(math.pi * share))
        return _rise(step, self.warmup) * fall


@dataclass(frozen=True)
class StepDrop:
    """Multiplied by `drop` after every `every` steps."""

    every: int
    drop: float = 0.1
    warmup: int = 0

    def factor(self, step: int) -> float:
        return _rise(step, self.warmup) * self.drop ** (step // self.every)


@dataclass(frozen=True)
class Settle:
    """1, and over the last `share` of the `steps` steps in a line down to `floor`: late rows refine, they do not
    shift the level of all scores any more."""

    steps: int
    share: float = 0.1
    floor: float = 0.1
    warmup: int = 0

    def factor(self, step: int) -> float:
        tail = max(1.0, self.share * self.steps)
        past = min(1.0, max(0.0, (step - (self.steps - tail)) / tail))
        return _rise(step, self.warmup) * (1.0 - (1.0 - self.floor) * past)


Schedule = Constant | Cosine | Settle | StepDrop


def _rise(step: int, warmup: int) -> float:
    return min(1.0, (step + 1) / warmup) if warmup else 1.0
