"""AUC and log loss over the last rows, for whoever watches a training run."""

from __future__ import annotations

import numpy as np

from clickline.evaluation.binary_metrics import Counts, Floats
from clickline.models.calibration import Probabilities


class Window:
    """The last `rows` rows, as they were predicted before they were learned. Measured only when asked."""

    def __init__(self, rows: int = 1 << 16) -> None:
        self.rows = rows
        self._ring_3R = np.empty((3, rows), dtype=np.float32)
        self._seen = 0

    def add(self, label_B: Floats, weight_B: Floats, probability_B: Probabilities) -> None:
        for start in range(0, len(label_B), self.rows):
            part = slice(start, start + self.rows)
            places = np.arange(self._seen, self._seen + len(label_B[part])) % self.rows
            for line, column_B in zip(self._ring_3R, (label_B, weight_B, probability_B), strict=True):
                line[places] = column_B[part]
            self._seen += len(places)

    def measure(self) -> tuple[float | None, float | None]:
        """AUC and log loss, exact for these rows; None where they do not give one."""
        counts = Counts(limit=self.rows)
        counts.add(*self._ring_3R[:, : min(self._seen, self.rows)])
        metrics = counts.metrics()
        return metrics.auc, metrics.logloss
