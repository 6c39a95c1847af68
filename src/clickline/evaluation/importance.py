"""Permutation importance: the AUC that is lost when a field's values are shuffled over the rows.

A field is shuffled within blocks of rows, so memory does not grow with them. The permutation depends only on the seed,
the field's name and the block's number.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from clickline.evaluation.binary_metrics import MetricCounts, Metrics
from clickline.features import DenseField, FeatureSpec, SlotField
from clickline.records import LabelledRows

ScoreFn = Callable[[LabelledRows], NDArray[np.float32]]
"""Click probabilities of rows."""

_LIMIT = 1 << 14  # distinct scores kept per field: 1.3 MB, and an AUC to about 6e-5


@dataclass(frozen=True)
class FieldImportance:
    """The importance of one slot or dense field; if `lost` is about 0 or negative, the model does not need it."""

    name: str
    kind: Literal["slot", "dense"]
    auc: float  # with the field shuffled
    lost: float  # AUC without shuffling - auc
    error: float  # bound of the approximation error of `lost`; 0: exact

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class ImportanceCounts:
    """Scores each block of rows once per field (or per field among the `first` ones) with that field shuffled."""

    def __init__(self, features: FeatureSpec, seed: int = 0, first: int | None = None) -> None:
        self._seed = seed
        fields = features.fields[:first]
        self._dense = [field.name for field in fields if isinstance(field, DenseField)]
        self._slots = [field.name for field in fields if isinstance(field, SlotField)]
        self._counts = {name: MetricCounts(_LIMIT) for name in (*self._dense, *self._slots)}
        self._blocks = 0

    def add(self, score: ScoreFn, rows: LabelledRows) -> None:
        """Add one block of rows."""
        for name, shuffled in self._shuffled(rows):
            self._counts[name].add(rows.label_B, rows.weight_B, score(shuffled))
        self._blocks += 1

    def result(self, total: Metrics) -> tuple[FieldImportance, ...]:
        """The importance of each field, highest first; empty if `total`, the metrics without shuffling, has no AUC."""
        fields = []
        dense = set(self._dense)
        for name, counts in self._counts.items():
            metrics = counts.metrics()
            if total.auc is not None and metrics.auc is not None:
                kind: Literal["slot", "dense"] = "dense" if name in dense else "slot"
                error = (total.auc_error or 0.0) + (metrics.auc_error or 0.0)
                fields.append(FieldImportance(name, kind, metrics.auc, total.auc - metrics.auc, error))
        return tuple(sorted(fields, key=lambda field: (-field.lost, field.name)))

    def _shuffled(self, rows: LabelledRows) -> Iterator[tuple[str, LabelledRows]]:
        encoded = rows.encoded
        for d, name in enumerate(self._dense):
            dense_DB = encoded.dense_DB.copy()
            dense_DB[d] = dense_DB[d, self._order(name, rows.rows)]
            yield name, replace(rows, encoded=replace(encoded, dense_DB=dense_DB))
        for s, name in enumerate(self._slots):
            slots = list(encoded.slots)
            slots[s] = slots[s].take(self._order(name, rows.rows))
            yield name, replace(rows, encoded=replace(encoded, slots=tuple(slots)))

    def _order(self, name: str, rows: int) -> NDArray[np.int64]:
        seed = [self._seed, zlib.crc32(name.encode()), self._blocks]
        return np.random.default_rng(seed).permutation(rows)
