"""A model that learns: one step for each batch, and all of its state."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from clickline.embedding import Lookup
from clickline.errors import ClicklineError
from clickline.learner.model import Model
from clickline.records import LabelledRows

__all__ = ["Diverged", "Learner", "Prepared", "Step"]


class Diverged(ClicklineError):
    """The loss is not a number any more. Nothing was learned from the batch."""

    def __init__(self, loss: float, rows: LabelledRows) -> None:
        super().__init__(
            f"the loss became {loss}: training has diverged. Lower train.learning_rate or "
            "train.embedding_learning_rate, or look for extreme values in the dense fields."
        )
        self.rows = rows


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
        torch.manual_seed(model.plan.seed)
        custom = model.custom
        weights = list(model.network.parameters())
        self._loss = custom.loss if custom is not None else None
        self._feed = custom.feed if custom is not None else None
        self.optimizer: torch.optim.Optimizer
        if custom is not None and custom.optimizer is not None:
            self.optimizer = custom.optimizer(weights)
        else:
            plan = model.plan
            self.optimizer = torch.optim.AdamW(
                weights, lr=plan.learning_rate, weight_decay=plan.weight_decay, fused=True
            )
        self._rates = [group["lr"] for group in self.optimizer.param_groups]
        self.step = 0

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
        rows, plan, network = batch.rows, self.model.plan, self.model.network
        network.train(rows.rows > 1)  # batch norm cannot learn from one row
        inputs_BI, wide_B = self.model.pool(batch.lookup, rows)
        inputs = torch.from_numpy(inputs_BI).requires_grad_()
        wide = torch.from_numpy(wide_B).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16) if plan.precision == "bf16" else nullcontext():
            logit_B = network(inputs, wide)
        logit_B = logit_B.float()
        loss, total = self._loss_of(rows, logit_B)
        if not torch.isfinite(loss):
            raise Diverged(float(loss.detach()), rows)
        factor = plan.schedule.factor(self.step)
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        # A row's optimizer sees the gradient of its own shows, not their share in the batch: what it has
        # learned must not depend on the batch size.
        self.model.tables.apply(
            batch.lookup,
            _gradient(inputs, inputs_BI, total),
            _gradient(wide, wide_B, total),
            plan.row_schedule.factor(self.step),
        )
        self.step += 1
        return Step(float(loss.detach()), self.model.probabilities(logit_B.detach()))

    def _loss_of(self, rows: LabelledRows, logit_B: torch.Tensor) -> tuple[torch.Tensor, float]:
        """The loss, and the number of rows, by weight, that it is a mean of."""
        plan, weights = self.model.plan, rows.weight_B
        if plan.click_weight != 1 or plan.no_click_weight != 1:
            weights = weights * (
                plan.no_click_weight + (plan.click_weight - plan.no_click_weight) * rows.label_B
            )
        label_B = torch.from_numpy(np.ascontiguousarray(rows.label_B))
        weight_B = torch.from_numpy(np.ascontiguousarray(weights))
        total = float(weights.sum())
        if self._loss is not None:
            return self._loss(label_B, logit_B, weight_B), total
        sum_B = nn.functional.binary_cross_entropy_with_logits(logit_B, label_B, weight_B, reduction="sum")
        return sum_B / (total or 1.0), total

    # ── state ──────────────────────────────────────────────────────────────────────────────────

    def dense_state(self) -> dict[str, NDArray[Any]]:
        """Network, optimizer and random state as plain arrays."""
        state = self.model.weights()
        for number, values in self.optimizer.state_dict()["state"].items():
            for name, value in values.items():
                if value is not None:
                    state[f"optimizer/{number}/{name}"] = torch.as_tensor(value).numpy().copy()
        state["random"] = torch.get_rng_state().numpy().copy()
        return state

    def load_dense_state(self, state: Mapping[str, NDArray[Any]], *, step: int) -> None:
        """Go on exactly where `dense_state` was taken."""
        self.model.load_weights(state)
        self.load_moments(state)
        torch.set_rng_state(torch.from_numpy(state["random"].copy()))
        self.step = step

    def load_moments(self, state: Mapping[str, NDArray[Any]]) -> None:
        """What the optimizer remembers of the gradients."""
        moments: dict[int, dict[str, torch.Tensor]] = {}
        for name, value in state.items():
            if name.startswith("optimizer/"):
                _, number, key = name.split("/")
                moments.setdefault(int(number), {})[key] = torch.from_numpy(value.copy())
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": moments})


def _gradient(variable: torch.Tensor, like: NDArray[np.float32], total: float) -> NDArray[np.float32]:
    """The gradient of the summed loss; zeros where the network does not use the input."""
    if variable.grad is None:
        return np.zeros_like(like)
    gradient: NDArray[np.float32] = variable.grad.mul_(total).numpy()
    return gradient
