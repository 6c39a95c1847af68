"""Learning-rate factors at steps where they can be computed by hand."""

from __future__ import annotations

import pytest

from clickline.embedding import Constant, Cosine, Schedule, StepDrop


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        (Constant(), {0: 1.0, 1000: 1.0}),
        (Constant(warmup=4), {0: 0.25, 1: 0.5, 3: 1.0, 50: 1.0}),
        (Cosine(100), {0: 1.0, 50: 0.5, 100: 0.0, 500: 0.0}),
        (Cosine(110, floor=0.2, warmup=10), {4: 0.5, 10: 1.0, 60: 0.6, 110: 0.2}),
        (StepDrop(10, 0.5), {0: 1.0, 9: 1.0, 10: 0.5, 25: 0.25}),
        (StepDrop(10, 0.5, warmup=2), {0: 0.5, 1: 1.0, 10: 0.5}),
    ],
)
def test_factors(schedule: Schedule, factors: dict[int, float]) -> None:
    assert {step: schedule.factor(step) for step in factors} == pytest.approx(factors)
