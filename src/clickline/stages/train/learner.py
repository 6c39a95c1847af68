"""Tables and network, learning together: one step, one score, and all of their state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from clickline.embedding import AdaGrad, Ftrl, SlotShape, Tables
from clickline.errors import ClicklineError
from clickline.features import FeatureSpec
from clickline.models import NetworkSpec, build
from clickline.records import LabelledRows

__all__ = ["Learner", "Step"]


@dataclass(frozen=True)
class Step:
    """What one batch said before it was learned."""

    loss: float
    probability_B: NDArray[np.float32]


class Learner:
    """A model that learns batch by batch. Everything it does follows from its seed and its batches."""

    def __init__(
        self,
        features: FeatureSpec,
        *,
        network: str,
        dim: int,
        hidden: tuple[int, ...],
        learning_rate: float,
        embedding_learning_rate: float,
        seed: int,
        threads: int,
    ) -> None:
        torch.set_num_threads(threads)
        torch.manual_seed(seed)
        slots = [SlotShape(slot.name, dim) for slot in features.slots]
        self.spec = NetworkSpec(tuple(slot.dim for slot in slots), len(features.dense), hidden)
        self.network: nn.Module = build(network, self.spec, seed)
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=learning_rate)
        self.tables = Tables(
            slots,
            embedding_optimizer=AdaGrad(embedding_learning_rate),
            wide_optimizer=Ftrl(),
            seed=seed,
            threads=threads,
        )

    def learn(self, rows: LabelledRows) -> Step:
        """Learn one batch."""
        self.network.train()
        inputs_BI, wide_B = self._buffers(rows)
        lookup = self.tables.gather(
            rows.encoded.slots,
            inputs_BI,
            wide_B,
            shows_B=rows.show_B,
            clicks_B=rows.click_B,
            hours_B=rows.event_hour_B,
            train=True,
        )
        inputs = torch.from_numpy(inputs_BI).requires_grad_()
        wide = torch.from_numpy(wide_B).requires_grad_()
        label_B, weight_B = torch.from_numpy(rows.label_B.copy()), torch.from_numpy(rows.weight_B.copy())
        logit_B = self.network(inputs, wide)
        losses_B = nn.functional.binary_cross_entropy_with_logits(logit_B, label_B, weight_B, reduction="sum")
        total = float(rows.weight_B.sum())
        loss = losses_B / total
        if not torch.isfinite(loss):
            raise ClicklineError(
                f"the loss became {float(loss.detach())}: training has diverged. Lower train.learning_rate or "
                "train.embedding_learning_rate, or look for extreme values in the dense fields."
            )
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        # A row's optimizer sees the gradient of its own shows, not their share in the batch: what it has
        # learned must not depend on the batch size.
        grad_wide = wide.grad if wide.grad is not None else torch.zeros_like(wide)
        assert inputs.grad is not None
        self.tables.apply(lookup, (inputs.grad * total).numpy(), (grad_wide * total).numpy())
        return Step(float(loss.detach()), torch.sigmoid(logit_B.detach()).numpy())

    def score(self, rows: LabelledRows) -> NDArray[np.float32]:
        """Probabilities of rows, without learning anything."""
        self.network.eval()
        inputs_BI, wide_B = self._buffers(rows)
        self.tables.gather(rows.encoded.slots, inputs_BI, wide_B, train=False)
        with torch.no_grad():
            logit_B = self.network(torch.from_numpy(inputs_BI), torch.from_numpy(wide_B))
            scores: NDArray[np.float32] = torch.sigmoid(logit_B).numpy()
        return scores

    def _buffers(self, rows: LabelledRows) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        inputs_BI = np.empty((rows.rows, self.spec.width), dtype=np.float32)
        inputs_BI[:, self.tables.width :] = rows.encoded.dense_DB.T
        return inputs_BI, np.empty(rows.rows, dtype=np.float32)

    # ── state ──────────────────────────────────────────────────────────────────────────────────

    def dense_state(self) -> dict[str, NDArray[Any]]:
        """Network, optimizer and random state as plain arrays."""
        state = {f"network/{name}": value.numpy().copy() for name, value in self.network.state_dict().items()}
        for number, values in self.optimizer.state_dict()["state"].items():
            for name, value in values.items():
                state[f"optimizer/{number}/{name}"] = torch.as_tensor(value).numpy().copy()
        state["random"] = torch.get_rng_state().numpy().copy()
        return state

    def load_dense_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        weights = {
            name.removeprefix("network/"): torch.from_numpy(value.copy())
            for name, value in state.items()
            if name.startswith("network/")
        }
        self.network.load_state_dict(weights)
        moments: dict[int, dict[str, torch.Tensor]] = {}
        for name, value in state.items():
            if name.startswith("optimizer/"):
                _, number, key = name.split("/")
                moments.setdefault(int(number), {})[key] = torch.from_numpy(value.copy())
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": moments})
        torch.set_rng_state(torch.from_numpy(state["random"].copy()))
