"""Sparse tables and a network as one model: built from a plan, learning batch by batch, scoring rows.

Training on one machine, training on a cluster and evaluation share it. Only `configured.py` sees config objects, to
make a plan of them; everything else takes plain values.
"""

from __future__ import annotations

from clickline.learner import hardware  # isort: skip  (before anything imports torch)
from clickline.learner.dense import Computed, Dense, Diverged
from clickline.learner.learner import Learner, Prepared, Step
from clickline.learner.model import Model, open_checkpoint
from clickline.learner.plan import ModelPlan

__all__ = [
    "Computed",
    "Dense",
    "Diverged",
    "Learner",
    "Model",
    "ModelPlan",
    "Prepared",
    "Step",
    "hardware",
    "open_checkpoint",
]
