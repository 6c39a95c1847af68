"""The plan of a config's model is made in `learner/`, where `clickline plan` finds it too."""

from __future__ import annotations

from clickline.learner.configured import batch_size_of, plan_of

__all__ = ["batch_size_of", "plan_of"]
