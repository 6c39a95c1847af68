"""Drift between training and evaluation rows: the population stability index.

PSI = sum over bins of (eval - train) * ln(eval / train), where `train` and `eval` are the bin's shares. The bins of a
slot are the most frequent values in train, all other values, and "missing"; those of a dense field are the deciles in
train, and 0, which also stands for a missing number. Half a value is added to every bin, so an empty one gives no
infinity. Two samples of n rows of the same data have a PSI of about 2 * bins / n. Below 0.1 there is little drift,
above 0.25 much.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from clickline.artifacts.dataset import concat_rows
from clickline.features import DenseField, FeatureSpec
from clickline.records import LabelledRows

TOP_VALUES = 50
"""Values of a slot that have their own bin."""

_DECILES = 10
_TOP_SHIFTS = 5  # bins with the largest shift that are reported

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class BinShift:
    """A bin, that is a value of a slot or a range of numbers, and its share in train and eval."""

    value: str
    train: float
    eval: float


@dataclass(frozen=True)
class FieldDrift:
    """The drift of one field and the bins that shifted most."""

    name: str
    kind: Literal["slot", "dense"]
    psi: float
    top: tuple[BinShift, ...]

    def to_json(self) -> dict[str, Any]:
        key = "value" if self.kind == "slot" else "range"
        top = [{key: one.value, "train": one.train, "eval": one.eval} for one in self.top]
        return {**asdict(replace(self, top=())), "top": top}


def drift(
    features: FeatureSpec,
    train: LabelledRows,
    eval: LabelledRows,
    names: Mapping[str, Mapping[int, str]],
) -> tuple[FieldDrift, ...]:
    """The drift of all fields, largest first; empty without rows to compare. `names` has the values of known ids by
    slot."""
    if not (train.rows and eval.rows):
        return ()
    fields = []
    for d, field in enumerate(features.dense):
        bin_names, counts_K2 = _dense_bins(field, train.encoded.dense_DB[d], eval.encoded.dense_DB[d])
        fields.append(_field_drift(field.name, "dense", bin_names, counts_K2))
    for s, slot in enumerate(features.slots):
        known = {slot.missing_id: "(missing)", **names.get(slot.name, {})}
        bin_names, counts_K2 = _slot_bins(
            slot.missing_id, known, train.encoded.slots[s].ids_N, eval.encoded.slots[s].ids_N
        )
        fields.append(_field_drift(slot.name, "slot", bin_names, counts_K2))
    return tuple(sorted(fields, key=lambda field: (-field.psi, field.name)))


def _slot_bins(
    missing: int, known: Mapping[int, str], train_N: NDArray[np.uint64], eval_N: NDArray[np.uint64]
) -> tuple[list[str], NDArray[np.int64]]:
    """Names of the bins of a slot, and their counts in train and eval."""
    ids_U, count_U = np.unique(train_N, return_counts=True)
    present = ids_U != np.uint64(missing)
    ids_U, count_U = ids_U[present], count_U[present]
    ids_K = ids_U[np.lexsort((ids_U, -count_U))[:TOP_VALUES]]  # ties are ordered by id
    ids_K = np.append(ids_K, np.uint64(missing))
    order_K = np.argsort(ids_K)
    sorted_K = ids_K[order_K]
    counts = []
    for ids_N in (train_N, eval_N):
        bin_N = np.minimum(np.searchsorted(sorted_K, ids_N), sorted_K.size - 1)
        found_N = sorted_K[bin_N] == ids_N
        counted_K = np.bincount(order_K[bin_N[found_N]], minlength=ids_K.size)
        counts.append([*counted_K.tolist(), int(ids_N.size - found_N.sum())])
    bin_names = [known.get(id, f"{id:016x}") for id in ids_K.tolist()]
    return [*bin_names, "(all others)"], np.array(counts, dtype=np.int64).T


def _dense_bins(field: DenseField, train_N: Floats, eval_N: Floats) -> tuple[list[str], NDArray[np.int64]]:
    """Names of the bins of a dense field, and their counts in train and eval."""
    nonzero_N = np.sort(train_N[train_N != 0])
    edges = (
        np.unique(nonzero_N[np.arange(1, _DECILES) * nonzero_N.size // _DECILES])
        if nonzero_N.size
        else nonzero_N
    )
    counts = []
    for values_N in (train_N, eval_N):
        bin_N = np.searchsorted(edges, values_N, side="right")
        bin_N[values_N == 0] = edges.size + 1
        counts.append(np.bincount(bin_N, minlength=edges.size + 2))
    return [*_ranges(_to_raw(field, edges)), _zero_bin_name(field)], np.array(counts, dtype=np.int64).T


def _ranges(edges: Sequence[float]) -> list[str]:
    if not edges:
        return ["any other"]
    between = [f"{low:.4g} to {high:.4g}" for low, high in pairwise(edges)]
    return [f"below {edges[0]:.4g}", *between, f"{edges[-1]:.4g} and more"]


def _to_raw(field: DenseField, values: Floats) -> list[float]:
    """Undo the field's transform: numbers as in the logs."""
    raw, known = values.astype(np.float64), field.statistics
    if field.transform == "log1p":
        raw = np.sign(raw) * np.expm1(np.abs(raw))
    elif known is not None and field.transform == "minmax":
        raw = known.low + raw * (known.high - known.low)
    elif known is not None and field.transform == "zscore":
        raw = known.mean + raw * known.deviation
    elif known is not None and field.transform == "robust":
        raw = known.median + np.sign(raw) * np.expm1(np.abs(raw)) * known.spread
    return [float(value) for value in raw]


def _zero_bin_name(field: DenseField) -> str:
    """Name of the bin of 0, which also stands for missing."""
    (raw,) = _to_raw(field, np.zeros(1, dtype=np.float32))
    return f"{raw:.4g} or missing"


def _field_drift(
    name: str, kind: Literal["slot", "dense"], bin_names: list[str], counts_K2: NDArray[np.int64]
) -> FieldDrift:
    nonempty_K = counts_K2.sum(axis=1) > 0
    bin_names = [one for one, nonempty in zip(bin_names, nonempty_K, strict=True) if nonempty]
    counts_K2 = counts_K2[nonempty_K]
    share_K2 = (counts_K2 + 0.5) / (counts_K2 + 0.5).sum(axis=0)
    term_K = (share_K2[:, 1] - share_K2[:, 0]) * np.log(share_K2[:, 1] / share_K2[:, 0])
    observed_K2 = counts_K2 / np.maximum(counts_K2.sum(axis=0), 1)
    top = tuple(
        BinShift(bin_names[k], float(observed_K2[k, 0]), float(observed_K2[k, 1]))
        for k in np.argsort(-term_K, kind="stable")[:_TOP_SHIFTS]
    )
    return FieldDrift(name, kind, float(term_K.sum()), top)


class RowSample:
    """A sample of at most `limit` rows of a stream of unknown length: every row at first, then every second, fourth, …

    The sample does not depend on how the rows are split into parts."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._stride = 1
        self._rows_seen = self._rows_kept = 0
        self._parts: list[LabelledRows] = []

    def add(self, rows: LabelledRows) -> None:
        self._keep(rows.take(np.arange(-self._rows_seen % self._stride, rows.rows, self._stride)))
        self._rows_seen += rows.rows
        while self._rows_kept > self._limit:
            kept = concat_rows(self._parts)
            self._stride *= 2
            self._parts, self._rows_kept = [], 0
            self._keep(kept.take(np.arange(0, kept.rows, 2)))

    def rows(self) -> LabelledRows | None:
        """The sample; None if there were no rows."""
        return concat_rows(self._parts) if self._parts else None

    def _keep(self, rows: LabelledRows) -> None:
        if rows.rows:
            self._parts.append(rows)
            self._rows_kept += rows.rows
