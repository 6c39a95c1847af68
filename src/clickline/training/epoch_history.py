"""The metrics at the end of each epoch, in the run's history.json; early stopping is decided by them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from clickline.artifacts.manifest import as_json
from clickline.config.sections import EarlyStop
from clickline.storage.storage import Storage


class EpochHistory:
    """The epochs of a run so far."""

    def __init__(self, run: Path, rule: EarlyStop | None) -> None:
        self._path = run / "history.json"
        self._rule = rule
        self.epochs: list[dict[str, Any]] = []  # epoch, step, and its metrics, if there are eval rows

    def resume_from(self, step: int) -> None:
        """Load the history, without epochs after `step`, which will be trained again."""
        stored = json.loads(self._path.read_text()) if self._path.exists() else []
        self.epochs = [entry for entry in stored if entry["step"] <= step]

    def add(self, entry: dict[str, Any]) -> None:
        self.epochs.append(entry)
        Storage().put(str(self._path), as_json(self.epochs, indent=1))

    def __contains__(self, epoch: int) -> bool:
        return any(entry["epoch"] == epoch for entry in self.epochs)

    @property
    def best(self) -> dict[str, Any] | None:
        """The entry of the best epoch so far; None without metrics."""
        metric = self._rule.metric if self._rule else "logloss"
        evaluated = [entry for entry in self.epochs if entry.get(metric) is not None]
        if not evaluated:
            return None
        return min(evaluated, key=lambda entry: entry[metric] if metric == "logloss" else -entry[metric])

    @property
    def stopped_at(self) -> dict[str, Any] | None:
        """The entry of the best epoch if early stopping ended the run, since the last epochs were no better."""
        best = self.best
        if self._rule is None or best is None or len(self.epochs) - best["epoch"] < self._rule.patience:
            return None
        return best
