"""The network with its optimizer: the dense part of a model, trained on one machine or by many workers.

`compute` runs a batch, or a worker's part of one, forward and backward; `update` takes an optimizer step. In between, a
group of workers all-reduces its flat `gradient` vectors; on one machine the gradients in the network are used directly.
Nothing in the network changes before `update`, so a batch whose all-reduce failed can be computed again.
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
from clickline.models.model import load_network, network_arrays
from clickline.models.model_plan import ModelPlan
from clickline.records import LabelledRows

BUFFER_ROWS, TOTAL_WEIGHT, LOSS, PAUSE_REQUESTED = -4, -3, -2, -1
"""Indices of the numbers at the end of a gradient vector: rows that the buffers have seen, weight of the rows, summed
loss, and whether a worker requests a pause. All-reduced with the gradients, they give each worker the sums of the whole
batch; the loss is not finite if it was not finite for one of them."""
_TAIL = 4


class Diverged(ClicklineError):
    """The loss is no longer finite. The batch changed nothing."""

    def __init__(self, loss: float, rows: LabelledRows) -> None:
        super().__init__(
            f"the loss became {loss}: training has diverged. Lower train.learning_rate or "
            "train.embedding.learning_rate, or check the dense fields for extreme values."
        )
        self.loss = loss
        self.rows = rows

    def __reduce__(self) -> tuple[Any, ...]:  # for pickling between processes
        return Diverged, (self.loss, self.rows)


@dataclass(frozen=True)
class BatchResult:
    """Loss and logits of a batch, and the gradients of its summed loss with respect to the network's inputs."""

    mean_loss: float  # per row, weighted
    total_weight: float  # of the rows
    logit_B: NDArray[np.float32]
    grad_inputs_BI: NDArray[np.float32]
    grad_wide_B: NDArray[np.float32]

    @property
    def finite(self) -> bool:
        """Whether the loss is finite; if not, the gradients are zeros."""
        return bool(np.isfinite(self.mean_loss))


class DenseOptimizer:
    """Trains a network. It is deterministic: the result follows from its plan, its batches and their order."""

    def __init__(self, network: nn.Module, plan: ModelPlan, custom: CustomModel | None = None) -> None:
        torch.manual_seed(plan.seed)
        self.network = network
        self.plan = plan
        self.step = 0
        self._loss = custom.loss if custom is not None else None
        self._weights = list(network.parameters())
        self._buffers = list(network.buffers())
        self._trainable = [weight for weight in self._weights if weight.requires_grad]
        self._new_buffers: list[torch.Tensor] | None = None  # the buffers after the pending batch
        self._tail = np.zeros(_TAIL, dtype=np.float32)  # of the pending batch
        self.optimizer: torch.optim.Optimizer
        if custom is not None and custom.optimizer is not None:
            self.optimizer = custom.optimizer(self._weights)
        else:
            self.optimizer = torch.optim.AdamW(
                self._weights, lr=plan.learning_rate, weight_decay=plan.weight_decay, fused=True
            )
        self._base_lrs = [group["lr"] for group in self.optimizer.param_groups]

    # ── training ───────────────────────────────────────────────────────────────────────────────

    def compute(
        self,
        rows: LabelledRows,
        inputs_BI: NDArray[np.float32],
        wide_B: NDArray[np.float32],
        *,
        rank: int | None = None,
    ) -> BatchResult:
        """Forward and backward. Leaves the gradients of the mean loss in the network, or none if the loss is not
        finite. With `rank`, randomness depends only on (seed, step, rank)."""
        self.optimizer.zero_grad()
        self._new_buffers = None
        self._tail[:] = 0
        if rows.rows == 0:  # a worker's empty part of a small batch
            return BatchResult(
                0.0, 0.0, np.empty(0, np.float32), np.zeros_like(inputs_BI), np.zeros_like(wide_B)
            )
        if rank is not None:
            seed = np.random.SeedSequence([self.plan.seed, self.step, rank]).generate_state(1, np.uint64)[0]
            torch.default_generator.manual_seed(int(seed))
        before = [buffer.clone() for buffer in self._buffers]
        self.network.train(rows.rows > 1)  # batch norm cannot train on one row
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
        if before:  # restored only now: backward needs them as forward left them
            self._new_buffers = [buffer.clone() for buffer in self._buffers]
            self._set_buffers(before)
        self._tail[:] = rows.rows if rows.rows > 1 else 0, total, mean * total if finite else mean, 0
        return BatchResult(
            mean,
            total,
            logit_B,
            _input_gradient(inputs, inputs_BI, total),
            _input_gradient(wide, wide_B, total),
        )

    def gradient(self) -> NDArray[np.float32]:
        """The gradient of the summed loss of the last batch as one vector: all weights, then the new buffers times the
        rows they have seen, then four numbers about the batch. The next call, and `update`, reuse the same memory."""
        buffer_rows, total, *_ = self._tail.tolist()
        views, flat = self._views
        buffers = self._new_buffers or self._buffers
        values: list[torch.Tensor | None] = [*(weight.grad for weight in self._trainable), *buffers]
        for number, (view, value) in enumerate(zip(views, values, strict=True)):
            if value is None:
                view.zero_()
            else:
                torch.mul(value, total if number < len(self._trainable) else buffer_rows, out=view)
        flat[-_TAIL:] = self._tail
        return flat

    def update(self, gradient: NDArray[np.float32] | None, total: float, lr_factor: float = 1.0) -> None:
        """One step of the optimizer, with the gradients in the network (None) or with a vector from `gradient`, summed
        over all workers, whose rows have the total weight `total`."""
        if gradient is None:
            if self._new_buffers is not None:
                self._set_buffers(self._new_buffers)
        else:
            self._load_gradient(gradient, total)
        self._new_buffers = None
        factor = self.plan.schedule.factor(self.step) * lr_factor
        for group, base_lr in zip(self.optimizer.param_groups, self._base_lrs, strict=True):
            group["lr"] = base_lr * factor
        self.optimizer.step()
        self.step += 1

    def _load_gradient(self, gradient: NDArray[np.float32], total: float) -> None:
        """Load the mean of a summed gradient into the parameters' `grad`, and the mean buffers into the network."""
        views, flat = self._views
        buffer_rows = float(gradient[BUFFER_ROWS])
        weights = sum(weight.numel() for weight in self._trainable)
        np.divide(gradient[:weights], total or 1.0, out=flat[:weights])
        np.divide(gradient[weights:-_TAIL], buffer_rows or 1.0, out=flat[weights:-_TAIL])
        for weight, view in zip(self._trainable, views, strict=False):
            weight.grad = view.to(weight.dtype)
        if buffer_rows:
            self._set_buffers(views[len(self._trainable) :])

    def _set_buffers(self, values: list[torch.Tensor]) -> None:
        for buffer, value in zip(self._buffers, values, strict=True):
            # An integer count that went through a mean of floats is rounded back.
            counts = value.is_floating_point() and not buffer.is_floating_point()
            buffer.copy_(value.round() if counts else value)

    @cached_property
    def _views(self) -> tuple[list[torch.Tensor], NDArray[np.float32]]:
        """One flat vector, and views of weights and buffers in it. Lazy: one machine needs none."""
        parts = [*self._trainable, *self._buffers]
        flat = np.zeros(sum(part.numel() for part in parts) + _TAIL, dtype=np.float32)
        return _split(flat, parts), flat

    def _loss_of(self, rows: LabelledRows, logit: torch.Tensor) -> tuple[torch.Tensor, float]:
        """The mean loss, and the total weight of its rows."""
        labels, weights = _labels_and_weights(rows, self.plan)
        label_B = torch.from_numpy(np.ascontiguousarray(labels))
        weight_B = torch.from_numpy(np.ascontiguousarray(weights))
        total = float(weights.sum())
        if self._loss is not None:
            return self._loss(label_B, logit, weight_B), total
        summed = nn.functional.binary_cross_entropy_with_logits(logit, label_B, weight_B, reduction="sum")
        return summed / (total or 1.0), total

    # ── weights for other processes ────────────────────────────────────────────────────────────

    def weights(self) -> NDArray[np.float32]:
        """A copy of all weights and buffers as one vector."""
        parts = [*self._weights, *self._buffers]
        flat = np.empty(sum(part.numel() for part in parts), dtype=np.float32)
        for view, part in zip(_split(flat, parts), parts, strict=True):
            view.copy_(part.detach())
        return flat

    def load_weights(self, flat: NDArray[np.float32]) -> None:
        """Load a vector from `weights`."""
        parts = [*self._weights, *self._buffers]
        # A copy: arrays from Ray are read-only, which PyTorch does not support.
        writable = np.array(flat, dtype=np.float32)
        with torch.no_grad():
            for view, part in zip(_split(writable, parts), parts, strict=True):
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
        """Restore a state from `state` exactly."""
        load_network(self.network, state)
        self.load_moments(state)
        torch.set_rng_state(torch.from_numpy(state["random"].copy()))
        self.step = step

    def load_moments(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Restore only the optimizer's moments."""
        moments: dict[int, dict[str, torch.Tensor]] = {}
        for name, value in state.items():
            if name.startswith("optimizer/"):
                _, number, key = name.split("/")
                moments.setdefault(int(number), {})[key] = torch.from_numpy(value.copy())
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": moments})


def _labels_and_weights(
    rows: LabelledRows, plan: ModelPlan
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Labels and weights that weight every impression by its own class, however many a row represents.

    A row of n impressions with k clicks is the k clicks and the n - k others as rows of their own. Sampling drops whole
    rows without a click; the others of a row with one, which are always there, count by the share that is kept instead.
    """
    if plan.click_weight == plan.no_click_weight == plan.negative_sampling == 1:
        return rows.label_B, rows.weight_B
    kept_B = np.where(rows.click_B > 0, plan.negative_sampling, 1.0)
    clicks_B = rows.label_B * plan.click_weight
    factor_B = clicks_B + (1 - rows.label_B) * kept_B * plan.no_click_weight
    return (clicks_B / factor_B).astype(np.float32), (rows.weight_B * factor_B).astype(np.float32)


def _split(flat: NDArray[np.float32], parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Views into a flat vector for tensors that are stored in it one after the other."""
    sizes = [part.numel() for part in parts]
    pieces = torch.from_numpy(flat)[: sum(sizes)].split(sizes)  # type: ignore[no-untyped-call]
    return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]


def _input_gradient(variable: torch.Tensor, like: NDArray[np.float32], total: float) -> NDArray[np.float32]:
    """The gradient of the summed loss; zeros if the network does not use the input."""
    if variable.grad is None:
        return np.zeros_like(like)
    gradient: NDArray[np.float32] = variable.grad.mul_(total).numpy()
    return gradient
