"""How far the rows that were measured differ from those that were learned: the population stability index.

PSI = sum over bins of (eval - train) * ln(eval / train), where `train` and `eval` are the bin's shares. A slot's bins
are train's heaviest values, all other values together, and "no value"; a dense field's are train's tenths, and 0, which
is also what a missing number becomes. Half a value is added to every bin, so an empty one gives no infinity. On n rows
of each, data that are alike come to about 2 * bins / n. Below 0.1 little has changed, above 0.25 much has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from clickline.artifacts.dataset import concat
from clickline.features import DenseField, FeatureSpec
from clickline.records import LabelledRows

HEAVIEST = 50
"""Values of a slot that are compared one by one."""

_TENTHS = 10
_TOLD = 5  # bins that moved most

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Moved:
    """One bin: a value of a slot or a range of numbers, and its share of the values."""

    value: str
    train: float
    eval: float


@dataclass(frozen=True)
class FieldDrift:
    """How much one field changed, and where most."""

    name: str
    kind: Literal["slot", "dense"]
    psi: float
    top: tuple[Moved, ...]

    def to_json(self) -> dict[str, Any]:
        shown = "value" if self.kind == "slot" else "range"
        top = [{shown: one.value, "train": one.train, "eval": one.eval} for one in self.top]
        return {**asdict(replace(self, top=())), "top": top}


def drift(
    features: FeatureSpec,
    train: LabelledRows,
    eval: LabelledRows,
    names: Mapping[str, Mapping[int, str]],
) -> tuple[FieldDrift, ...]:
    """Every field, the one that changed most first. `names` tells by slot what an id stands for, where that is known.
    None without rows to compare."""
    if not (train.rows and eval.rows):
        return ()
    fields = []
    for d, field in enumerate(features.dense):
        told, counts_K2 = _numbers(field, train.encoded.dense_DB[d], eval.encoded.dense_DB[d])
        fields.append(_moved(field.name, "dense", told, counts_K2))
    for s, slot in enumerate(features.slots):
        known = {slot.missing_id: "(missing)", **names.get(slot.name, {})}
        told, counts_K2 = _values(
            slot.missing_id, known, train.encoded.slots[s].ids_N, eval.encoded.slots[s].ids_N
        )
        fields.append(_moved(slot.name, "slot", told, counts_K2))
    return tuple(sorted(fields, key=lambda field: (-field.psi, field.name)))


def _values(
    missing: int, known: Mapping[int, str], train_N: NDArray[np.uint64], eval_N: NDArray[np.uint64]
) -> tuple[list[str], NDArray[np.int64]]:
    """Names of a slot's bins, and how many values each has in train and eval."""
    ids_U, count_U = np.unique(train_N, return_counts=True)
    heavy = ids_U != np.uint64(missing)
    ids_U, count_U = ids_U[heavy], count_U[heavy]
    ids_K = ids_U[np.lexsort((ids_U, -count_U))[:HEAVIEST]]  # equally heavy ones by their id
    ids_K = np.append(ids_K, np.uint64(missing))
    order_K = np.argsort(ids_K)
    rising_K = ids_K[order_K]
    counts = []
    for ids_N in (train_N, eval_N):
        place_N = np.minimum(np.searchsorted(rising_K, ids_N), rising_K.size - 1)
        found_N = rising_K[place_N] == ids_N
        counted_K = np.bincount(order_K[place_N[found_N]], minlength=ids_K.size)
        counts.append([*counted_K.tolist(), int(ids_N.size - found_N.sum())])
    told = [known.get(id, f"{id:016x}") for id in ids_K.tolist()]
    return [*told, "(all others)"], np.array(counts, dtype=np.int64).T


def _numbers(field: DenseField, train_N: Floats, eval_N: Floats) -> tuple[list[str], NDArray[np.int64]]:
    """Names of a dense field's bins, and how many values each has in train and eval."""
    some_N = np.sort(train_N[train_N != 0])
    edges = np.unique(some_N[np.arange(1, _TENTHS) * some_N.size // _TENTHS]) if some_N.size else some_N
    counts = []
    for values_N in (train_N, eval_N):
        place_N = np.searchsorted(edges, values_N, side="right")
        place_N[values_N == 0] = edges.size + 1
        counts.append(np.bincount(place_N, minlength=edges.size + 2))
    return [*_ranges(_raw(field, edges)), _zero(field)], np.array(counts, dtype=np.int64).T


def _ranges(edges: Sequence[float]) -> list[str]:
    if not edges:
        return ["any other"]
    between = [f"{low:.4g} to {high:.4g}" for low, high in pairwise(edges)]
    return [f"below {edges[0]:.4g}", *between, f"{edges[-1]:.4g} and more"]


def _raw(field: DenseField, values: Floats) -> list[float]:
    """Numbers as they stand in the logs."""
    wide, known = values.astype(np.float64), field.statistics
    if field.transform == "log1p":
        wide = np.sign(wide) * np.expm1(np.abs(wide))
    elif known is not None and field.transform == "minmax":
        wide = known.low + wide * (known.high - known.low)
    elif known is not None and field.transform == "zscore":
        wide = known.mean + wide * known.deviation
    elif known is not None and field.transform == "robust":
        wide = known.median + np.sign(wide) * np.expm1(np.abs(wide)) * known.spread
    return [float(value) for value in wide]


def _zero(field: DenseField) -> str:
    """What the 0 of the network stands for, beside a missing number."""
    (raw,) = _raw(field, np.zeros(1, dtype=np.float32))
    return f"{raw:.4g} or missing"


def _moved(
    name: str, kind: Literal["slot", "dense"], told: list[str], counts_K2: NDArray[np.int64]
) -> FieldDrift:
    there_K = counts_K2.sum(axis=1) > 0
    told = [one for one, there in zip(told, there_K, strict=True) if there]
    counts_K2 = counts_K2[there_K]
    share_K2 = (counts_K2 + 0.5) / (counts_K2 + 0.5).sum(axis=0)
    part_K = (share_K2[:, 1] - share_K2[:, 0]) * np.log(share_K2[:, 1] / share_K2[:, 0])
    plain_K2 = counts_K2 / np.maximum(counts_K2.sum(axis=0), 1)
    top = tuple(
        Moved(told[k], float(plain_K2[k, 0]), float(plain_K2[k, 1]))
        for k in np.argsort(-part_K, kind="stable")[:_TOLD]
    )
    return FieldDrift(name, kind, float(part_K.sum()), top)


class RowSample:
    """At most `most` rows of a stream of unknown length: every row at first, then every second, every fourth …

    Which ones does not depend on the pieces the rows come in."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._stride = 1
        self._seen = self._kept = 0
        self._parts: list[LabelledRows] = []

    def add(self, rows: LabelledRows) -> None:
        self._keep(rows.take(np.arange(-self._seen % self._stride, rows.rows, self._stride)))
        self._seen += rows.rows
        while self._kept > self._most:
            whole = concat(self._parts)
            self._stride *= 2
            self._parts, self._kept = [], 0
            self._keep(whole.take(np.arange(0, whole.rows, 2)))

    def rows(self) -> LabelledRows | None:
        """What was kept; None if nothing came."""
        return concat(self._parts) if self._parts else None

    def _keep(self, rows: LabelledRows) -> None:
        if rows.rows:
            self._parts.append(rows)
            self._kept += rows.rows
