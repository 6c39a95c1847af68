"""AUC and log loss over the last rows of a training run, for its progress output."""

from __future__ import annotations

import numpy as np

from clickline.evaluation.binary_metrics import Floats, MetricCounts
from clickline.models.calibration import Probabilities


class RollingMetrics:
    """Keeps the last `rows` rows with their predictions before they were trained on; metrics are computed on demand."""

    def __init__(self, rows: int = 1 << 16) -> None:
        self.rows = rows
        self._ring_3R = np.empty((3, rows), dtype=np.float32)
        self._total = 0

    def add(self, label_B: Floats, weight_B: Floats, probability_B: Probabilities) -> None:
        for start in range(0, len(label_B), self.rows):
            part = slice(start, start + self.rows)
            places = np.arange(self._total, self._total + len(label_B[part])) % self.rows
            for buffer_R, column_B in zip(self._ring_3R, (label_B, weight_B, probability_B), strict=True):
                buffer_R[places] = column_B[part]
            self._total += len(places)

    def measure(self) -> tuple[float | None, float | None]:
        """AUC and log loss, exact for these rows; None if they do not give one."""
        counts = MetricCounts(limit=self.rows)
        counts.add(*self._ring_3R[:, : min(self._total, self.rows)])
        metrics = counts.metrics()
        return metrics.auc, metrics.logloss
