"""A reference implementation of the tables with a dict and loops: slow, obvious, in the same float32 arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from clickline.embedding import AdaGrad, Adam, Admission, Ftrl, RowOptimizer, RowWiseAdaGrad, Sgd, SlotShape
from clickline.embedding.admission import draw
from clickline.records import SlotIds

F = np.float32


class NaiveRow:
    """One id: counters, and weights once it is admitted."""

    def __init__(self) -> None:
        self.impressions = self.clicks = 0.0
        self.hour = -1
        self.vector: np.ndarray | None = None
        self.vector_state: dict[str, np.ndarray] = {}
        self.wide = np.zeros(1, F)
        self.wide_state: dict[str, np.ndarray] = {}


def first_state(rule: RowOptimizer, weights: np.ndarray) -> dict[str, np.ndarray]:
    dim = weights.size
    if isinstance(rule, AdaGrad):
        return {"n": np.full(dim, rule.initial_accumulator, F)}
    if isinstance(rule, RowWiseAdaGrad):
        return {"n": np.full(1, rule.initial_accumulator, F)}
    if isinstance(rule, Adam):
        return {"m": np.zeros(dim, F), "v": np.zeros(dim, F), "t": np.zeros(1)}
    if isinstance(rule, Ftrl):
        z = -(weights * (F(rule.beta) / F(rule.alpha) + F(rule.l2)) + np.sign(weights) * F(rule.l1))
        return {"z": z.astype(F), "n": np.zeros(dim, F)}
    return {}


def step(
    rule: RowOptimizer, w: np.ndarray, state: dict[str, np.ndarray], g: np.ndarray, factor: float
) -> None:
    """One textbook step of the optimizer, in place."""
    if isinstance(rule, Sgd):
        w -= F(rule.learning_rate) * F(factor) * g
    elif isinstance(rule, AdaGrad):
        state["n"] += g * g
        w -= F(rule.learning_rate) * F(factor) * g / (np.sqrt(state["n"]) + F(rule.epsilon))
    elif isinstance(rule, RowWiseAdaGrad):
        state["n"] += np.mean(g * g)
        w -= F(rule.learning_rate) * F(factor) * g / (np.sqrt(state["n"]) + F(rule.epsilon))
    elif isinstance(rule, Adam):
        state["t"] += 1
        state["m"][:] = F(rule.beta1) * state["m"] + (1 - F(rule.beta1)) * g
        state["v"][:] = F(rule.beta2) * state["v"] + (1 - F(rule.beta2)) * g * g
        m = state["m"] / F(1 - rule.beta1 ** state["t"][0])
        v = state["v"] / F(1 - rule.beta2 ** state["t"][0])
        w -= F(rule.learning_rate) * F(factor) * m / (np.sqrt(v) + F(rule.epsilon))
    elif isinstance(rule, Ftrl):
        before = np.sqrt(state["n"])
        state["n"] += g * g
        after = np.sqrt(state["n"])
        state["z"] += F(factor) * g - (after - before) / F(rule.alpha) * w
        z = state["z"]
        shrunk = -(z - np.sign(z) * F(rule.l1)) / ((F(rule.beta) + after) / F(rule.alpha) + F(rule.l2))
        w[:] = np.where(np.abs(z) <= F(rule.l1), 0, shrunk)


class NaiveTables:
    def __init__(
        self,
        slots: Sequence[SlotShape],
        embedding: RowOptimizer,
        wide: RowOptimizer | None,
        *,
        seed: int,
        init_scale: float,
        l2: float = 0.0,
        admission: Admission | None = None,
    ) -> None:
        self.slots, self.embedding, self.wide = slots, embedding, wide
        self.seed, self.init_scale, self.l2 = seed, init_scale, l2
        self.min_impressions = admission.min_impressions if admission else 1
        self.rows: dict[tuple[int, int], NaiveRow] = {}  # by (dim, id)
        self.defaults = [NaiveRow() for _ in slots]
        for slot, row in zip(slots, self.defaults, strict=True):
            self.admit(row, np.zeros(slot.dim, F))

    def admit(self, row: NaiveRow, vector: np.ndarray) -> None:
        row.vector = vector
        row.vector_state = first_state(self.embedding, vector)
        if self.wide is not None:
            row.wide_state = first_state(self.wide, row.wide)

    def ids_in_row(self, ids: SlotIds, b: int) -> list[int]:
        if ids.offsets_B1 is None:
            return [int(ids.ids_N[b])]
        return [int(i) for i in ids.ids_N[ids.offsets_B1[b] : ids.offsets_B1[b + 1]]]

    def count(
        self, batch: Sequence[SlotIds], impressions_B: np.ndarray, clicks_B: np.ndarray, hours_B: np.ndarray
    ) -> None:
        for slot, ids in zip(self.slots, batch, strict=True):
            for b in range(impressions_B.size):
                for id in set(self.ids_in_row(ids, b)):
                    row = self.rows.setdefault((slot.dim, id), NaiveRow())
                    row.impressions += float(impressions_B[b])
                    row.clicks += float(clicks_B[b])
                    row.hour = max(row.hour, int(hours_B[b]))
        for (dim, id), row in self.rows.items():
            if row.vector is None and row.impressions >= self.min_impressions:
                bound = F(self.init_scale / np.sqrt(dim))
                draws = [draw(np.uint64(self.seed), np.uint64(id), j + 1) for j in range(dim)]
                self.admit(row, np.array([F(2.0 * u - 1.0) * bound for u in draws], F))

    def row(self, s: int, id: int) -> NaiveRow:
        row = self.rows.get((self.slots[s].dim, id))
        return row if row is not None and row.vector is not None else self.defaults[s]

    def pool(self, batch: Sequence[SlotIds], rows: int) -> tuple[np.ndarray, np.ndarray]:
        inputs = np.zeros((rows, sum(slot.dim for slot in self.slots)), F)
        wide = np.zeros(rows, F)
        for b in range(rows):
            column = 0
            for s, slot in enumerate(self.slots):
                rows_found = [self.row(s, id) for id in self.ids_in_row(batch[s], b)]
                if rows_found:
                    vectors = np.array([row.vector for row in rows_found])
                    pooled = {
                        "sum": vectors.sum(0),
                        "mean": vectors.sum(0) / F(len(rows_found)),
                        "max": vectors.max(0),
                    }
                    inputs[b, column : column + slot.dim] = pooled[slot.pooling]
                    wide[b] += sum(row.wide[0] for row in rows_found)
                column += slot.dim
        return inputs, wide

    def apply(self, batch: Sequence[SlotIds], grad: np.ndarray, grad_wide: np.ndarray, factor: float) -> None:
        sums: dict[int, tuple[NaiveRow, np.ndarray, np.ndarray]] = {}
        column = 0
        for s, slot in enumerate(self.slots):
            for b in range(grad_wide.size):
                rows_found = [self.row(s, id) for id in self.ids_in_row(batch[s], b)]
                g = grad[b, column : column + slot.dim]
                argmax = np.argmax([row.vector for row in rows_found], axis=0) if rows_found else None
                for position, row in enumerate(rows_found):
                    _, total, total_wide = sums.setdefault(
                        id(row), (row, np.zeros(slot.dim, F), np.zeros(1, F))
                    )
                    if slot.pooling == "max":
                        total += np.where(argmax == position, g, F(0))
                    else:
                        total += g / F(len(rows_found)) if slot.pooling == "mean" else g
                    total_wide += grad_wide[b]
            column += slot.dim
        for row, total, total_wide in sums.values():
            assert row.vector is not None
            step(self.embedding, row.vector, row.vector_state, total + F(self.l2) * row.vector, factor)
            if self.wide is not None:
                step(self.wide, row.wide, row.wide_state, total_wide, factor)
