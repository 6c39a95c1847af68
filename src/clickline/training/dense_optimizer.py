"""The network with its optimizer: the part of a model that is computed densely, on one machine or by many workers.

`compute` runs a batch, or a worker's part of one, forward and backward; `learn` takes a step. Between the two a group
of workers sums its flat `gradient` vectors; on one machine what waits in the network is learned as it is. Nothing
of the network has moved until `learn`, so a batch whose sum failed can be computed again.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from clickline.errors import ClicklineError
from clickline.models.custom_network import CustomModel
from clickline.models.model_plan import ModelPlan
from clickline.models.weights import load_network, network_arrays
from clickline.records import LabelledRows

SEEN, TOTAL, LOSS, ASKED = -4, -3, -2, -1
"""Numbers at the end of a gradient vector: rows that buffers have seen, weight of the rows, summed loss, and a place
for what a worker asks the others for. Summed with the rest, they tell each worker of a group about the whole batch;
the loss is not finite if it was not for one of them."""
_TAIL = 4


class Diverged(ClicklineError):
    """The loss is not a number any more. Nothing was learned from the batch."""

    def __init__(self, loss: float, rows: LabelledRows) -> None:
        super().__init__(
            f"the loss became {loss}: training has diverged. Lower train.learning_rate or "
            "train.embedding.learning_rate, or look for extreme values in the dense fields."
        )
        self.loss = loss
        self.rows = rows

    def __reduce__(self) -> tuple[Any, ...]:  # so that it can come from another process
        return Diverged, (self.loss, self.rows)


@dataclass(frozen=True)
class Computed:
    """What a batch said, and the gradients of its summed loss by the network's inputs."""

    mean: float  # the loss of a row, by weight
    total: float  # the weight of the rows
    logit_B: NDArray[np.float32]
    grad_inputs_BI: NDArray[np.float32]
    grad_wide_B: NDArray[np.float32]

    @property
    def loss(self) -> float:
        """Summed over the rows, by weight."""
        return self.mean * self.total if self.finite else self.mean

    @property
    def finite(self) -> bool:
        """Whether anything can be learned from it; if not, its gradients are zeros."""
        return bool(np.isfinite(self.mean))


class Dense:
    """A network that learns. Everything it does follows from its plan, its batches and their order."""

    def __init__(self, network: nn.Module, plan: ModelPlan, custom: CustomModel | None = None) -> None:
        torch.manual_seed(plan.seed)
        self.network = network
        self.plan = plan
        self.step = 0
        self._loss = custom.loss if custom is not None else None
        self._weights = list(network.parameters())
        self._buffers = list(network.buffers())
        self._learned = [weight for weight in self._weights if weight.requires_grad]
        self._moved: list[torch.Tensor] | None = None  # the buffers behind the batch that waits to be learned
        self._tail = np.zeros(_TAIL, dtype=np.float32)  # of the batch that waits
        self.optimizer: torch.optim.Optimizer
        if custom is not None and custom.optimizer is not None:
            self.optimizer = custom.optimizer(self._weights)
        else:
            self.optimizer = torch.optim.AdamW(
                self._weights, lr=plan.learning_rate, weight_decay=plan.weight_decay, fused=True
            )
        self._rates = [group["lr"] for group in self.optimizer.param_groups]

    # ── learning ───────────────────────────────────────────────────────────────────────────────

    def compute(
        self,
        rows: LabelledRows,
        inputs_BI: NDArray[np.float32],
        wide_B: NDArray[np.float32],
        *,
        rank: int | None = None,
    ) -> Computed:
        """Forward and backward. The gradients of the mean loss wait in the network, to be learned; a loss that is
        not finite leaves nothing there. With `rank`, what is random follows from (seed, step, rank) alone."""
        self.optimizer.zero_grad()
        self._moved = None
        self._tail[:] = 0
        if rows.rows == 0:  # a worker's part of a small batch
            return Computed(
                0.0, 0.0, np.empty(0, np.float32), np.zeros_like(inputs_BI), np.zeros_like(wide_B)
            )
        if rank is not None:
            seed = np.random.SeedSequence([self.plan.seed, self.step, rank]).generate_state(1, np.uint64)[0]
            torch.default_generator.manual_seed(int(seed))
        before = [buffer.clone() for buffer in self._buffers]
        self.network.train(rows.rows > 1)  # batch norm cannot learn from one row
        inputs = torch.from_numpy(inputs_BI).requires_grad_()
        wide = torch.from_numpy(wide_B).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16) if self.plan.precision == "bf16" else nullcontext():
            logit = self.network(inputs, wide)
        logit = logit.float()
        loss, total = self._loss_of(rows, logit)
        mean = float(loss.detach())
        logit_B: NDArray[np.float32] = logit.detach().numpy()
        finite = bool(np.isfinite(mean))
        if finite:
            loss.backward()  # type: ignore[no-untyped-call]
        if before:  # backward wants them as forward left them
            self._moved = [buffer.clone() for buffer in self._buffers]
            self._set_buffers(before)
        self._tail[:] = rows.rows if rows.rows > 1 else 0, total, mean * total if finite else mean, 0
        return Computed(
            mean, total, logit_B, _gradient(inputs, inputs_BI, total), _gradient(wide, wide_B, total)
        )

    def gradient(self) -> NDArray[np.float32]:
        """Of the summed loss of the batch that was computed last, all weights in one vector; behind them the moved
        buffers times the rows they have seen, and four numbers about the batch. The next call, and `learn`, write into
        the same memory."""
        seen, total, *_ = self._tail.tolist()
        views, flat = self._views
        moved = self._moved or self._buffers
        values: list[torch.Tensor | None] = [*(weight.grad for weight in self._learned), *moved]
        for number, (view, value) in enumerate(zip(views, values, strict=True)):
            if value is None:
                view.zero_()
            else:
                torch.mul(value, total if number < len(self._learned) else seen, out=view)
        flat[-_TAIL:] = self._tail
        return flat

    def learn(self, gradient: NDArray[np.float32] | None, total: float, factor_extra: float = 1.0) -> None:
        """One step of the optimizer, with the gradient that waits in the network (None), or with a vector as
        `gradient` gives it, summed over all workers, whose rows weigh `total`."""
        if gradient is None:
            if self._moved is not None:
                self._set_buffers(self._moved)
        else:
            self._take(gradient, total)
        self._moved = None
        factor = self.plan.schedule.factor(self.step) * factor_extra
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor
        self.optimizer.step()
        self.step += 1

    def _take(self, gradient: NDArray[np.float32], total: float) -> None:
        """Put the mean of a summed gradient where the optimizer looks for it, and the buffers' means in place."""
        views, flat = self._views
        seen = float(gradient[SEEN])
        weights = sum(weight.numel() for weight in self._learned)
        np.divide(gradient[:weights], total or 1.0, out=flat[:weights])
        np.divide(gradient[weights:-_TAIL], seen or 1.0, out=flat[weights:-_TAIL])
        for weight, view in zip(self._learned, views, strict=False):
            weight.grad = view.to(weight.dtype)
        if seen:
            self._set_buffers(views[len(self._learned) :])

    def _set_buffers(self, values: list[torch.Tensor]) -> None:
        for buffer, value in zip(self._buffers, values, strict=True):
            # A count that went through a mean of floats is whole again.
            counts = value.is_floating_point() and not buffer.is_floating_point()
            buffer.copy_(value.round() if counts else value)

    @cached_property
    def _views(self) -> tuple[list[torch.Tensor], NDArray[np.float32]]:
        """One vector, and the places of weights and buffers in it. Made when asked for: one machine needs none."""
        parts = [*self._learned, *self._buffers]
        flat = np.zeros(sum(part.numel() for part in parts) + _TAIL, dtype=np.float32)
        return _cut(flat, parts), flat

    def _loss_of(self, rows: LabelledRows, logit: torch.Tensor) -> tuple[torch.Tensor, float]:
        """The loss, and the number of rows, by weight, that it is a mean of."""
        labels, weights = _weighted(rows, self.plan)
        label_B = torch.from_numpy(np.ascontiguousarray(labels))
        weight_B = torch.from_numpy(np.ascontiguousarray(weights))
        total = float(weights.sum())
        if self._loss is not None:
            return self._loss(label_B, logit, weight_B), total
        summed = nn.functional.binary_cross_entropy_with_logits(logit, label_B, weight_B, reduction="sum")
        return summed / (total or 1.0), total

    # ── what another process wants to know ─────────────────────────────────────────────────────

    def weights(self) -> NDArray[np.float32]:
        """All weights and buffers in one vector of its own."""
        parts = [*self._weights, *self._buffers]
        flat = np.empty(sum(part.numel() for part in parts), dtype=np.float32)
        for view, part in zip(_cut(flat, parts), parts, strict=True):
            view.copy_(part.detach())
        return flat

    def load_weights(self, flat: NDArray[np.float32]) -> None:
        """Take over a vector that `weights` gave."""
        parts = [*self._weights, *self._buffers]
        own = np.array(flat, dtype=np.float32)  # what came by Ray is read-only: PyTorch knows no such thing
        with torch.no_grad():
            for view, part in zip(_cut(own, parts), parts, strict=True):
                part.copy_(view)

    # ── state ──────────────────────────────────────────────────────────────────────────────────

    def state(self) -> dict[str, NDArray[Any]]:
        """Network, optimizer and random state as plain arrays."""
        state = network_arrays(self.network)
        for number, values in self.optimizer.state_dict()["state"].items():
            for name, value in values.items():
                if value is not None:
                    state[f"optimizer/{number}/{name}"] = torch.as_tensor(value).numpy().copy()
        state["random"] = torch.get_rng_state().numpy().copy()
        return state

    def load_state(self, state: Mapping[str, NDArray[Any]], *, step: int) -> None:
        """Go on exactly where `state` was taken."""
        load_network(self.network, state)
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


def _weighted(rows: LabelledRows, plan: ModelPlan) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Labels and weights that let every impression count by its own class, however many a row stands for.

    A row of n impressions with k clicks is the k clicks and the n - k others as rows of their own. Sampling drops whole
    rows without a click; the others of a row with one, which are always there, count by the share that is kept instead.
    """
    if plan.click_weight == plan.no_click_weight == plan.negative_sampling == 1:
        return rows.label_B, rows.weight_B
    kept_B = np.where(rows.click_B > 0, plan.negative_sampling, 1.0)
    clicks_B = rows.label_B * plan.click_weight
    factor_B = clicks_B + (1 - rows.label_B) * kept_B * plan.no_click_weight
    return (clicks_B / factor_B).astype(np.float32), (rows.weight_B * factor_B).astype(np.float32)


def _cut(flat: NDArray[np.float32], parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """The places in a vector that belong to tensors which stand in it side by side."""
    sizes = [part.numel() for part in parts]
    pieces = torch.from_numpy(flat)[: sum(sizes)].split(sizes)  # type: ignore[no-untyped-call]
    return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]


def _gradient(variable: torch.Tensor, like: NDArray[np.float32], total: float) -> NDArray[np.float32]:
    """The gradient of the summed loss; zeros where the network does not use the input."""
    if variable.grad is None:
        return np.zeros_like(like)
    gradient: NDArray[np.float32] = variable.grad.mul_(total).numpy()
    return gradient
