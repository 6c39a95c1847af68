"""How far a run has trained: what a checkpoint records besides the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from clickline.artifacts.arrays import with_prefix
from clickline.artifacts.checkpoint import Checkpoint, Position
from clickline.evaluation.progressive_validation import ProgressiveValidation


@dataclass
class TrainingState:
    """The position in the data and the counts of a run."""

    # Predictions of each row before it was trained on; None: not in time order.
    hours: ProgressiveValidation | None
    position: Position = field(default_factory=Position)
    units: Mapping[str, Any] | None = None  # asynchronous training: the progress within the epoch
    newest_hour: int = -1
    evicted: dict[str, int] = field(default_factory=dict)  # ids, by slot
    trained_rows: int = 0  # each row once per epoch

    @classmethod
    def begin(cls, *, time_ordered: bool) -> TrainingState:
        return cls(ProgressiveValidation() if time_ordered else None)

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, *, time_ordered: bool) -> TrainingState:
        progress = checkpoint.manifest.run
        assert progress is not None  # checked by `TrainingRun.resume`
        hours = None
        if time_ordered:
            hours = ProgressiveValidation.from_arrays(with_prefix("hours/", checkpoint.dense()))
        return cls(
            hours,
            progress.position,
            progress.units,
            checkpoint.manifest.newest_hour,
            dict(progress.evicted),
            progress.trained_rows,
        )

    @property
    def at_epoch_end(self) -> bool:
        return (
            self.position.epoch > 0 and self.position == Position(self.position.epoch) and self.units is None
        )

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The arrays of a checkpoint."""
        if self.hours is None:
            return {}
        return {f"hours/{name}": array for name, array in self.hours.to_arrays().items()}
