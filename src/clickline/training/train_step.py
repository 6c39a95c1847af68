"""A model that learns: one step for each batch, and all of its state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from clickline.embedding import Lookup
from clickline.models.model import Model
from clickline.records import LabelledRows
from clickline.training.dense_optimizer import Dense, Diverged


@dataclass(frozen=True)
class Prepared:
    """A batch whose ids have been found and counted."""

    rows: LabelledRows
    lookup: Lookup


@dataclass(frozen=True)
class Step:
    """What one batch said before it was learned."""

    loss: float
    probability_B: NDArray[np.float32]


class Learner:
    """Learns batch by batch. Everything it does follows from its plan and its batches."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.dense = Dense(model.network, model.plan, model.custom)
        self._feed = model.custom.feed if model.custom is not None else None

    @property
    def step(self) -> int:
        """Batches that were learned."""
        return self.dense.step

    def prepare(self, rows: LabelledRows) -> Prepared:
        """Find a batch's ids and count its shows and clicks. May run in another thread while the batch before is
        being learned; batches must be prepared in the order in which they are learned."""
        if self._feed is not None:
            rows = self._feed(rows)
        lookup = self.model.tables.find(
            rows.encoded.slots,
            rows.rows,
            shows_B=rows.show_B,
            clicks_B=rows.click_B,
            hours_B=rows.event_hour_B,
            train=True,
        )
        return Prepared(rows, lookup)

    def learn(self, batch: Prepared) -> Step:
        """Learn one batch."""
        inputs_BI, wide_B = self.model.pool(batch.lookup, batch.rows)
        computed = self.dense.compute(batch.rows, inputs_BI, wide_B)
        if not computed.finite:
            raise Diverged(computed.mean, batch.rows)
        factor = self.model.plan.row_schedule.factor(self.step)
        self.dense.learn(None, computed.total)
        # A row's optimizer sees the gradient of its own shows, not their share in the batch: what it has
        # learned must not depend on the batch size.
        self.model.tables.apply(batch.lookup, computed.grad_inputs_BI, computed.grad_wide_B, factor)
        return Step(computed.mean, self.model.probabilities(torch.from_numpy(computed.logit_B)))

    # ── state ──────────────────────────────────────────────────────────────────────────────────

    def dense_state(self) -> dict[str, NDArray[Any]]:
        """Network, optimizer and random state as plain arrays."""
        return self.dense.state()

    def load_dense_state(self, state: Mapping[str, NDArray[Any]], *, step: int) -> None:
        """Go on exactly where `dense_state` was taken."""
        self.dense.load_state(state, step=step)

    def load_moments(self, state: Mapping[str, NDArray[Any]]) -> None:
        """What the optimizer remembers of the gradients."""
        self.dense.load_moments(state)
