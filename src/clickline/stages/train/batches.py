"""The batches of a dataset live in `learner/`, where `plan` finds them too."""

from __future__ import annotations

from clickline.learner.batches import Batches, Position

__all__ = ["Batches", "Position"]
