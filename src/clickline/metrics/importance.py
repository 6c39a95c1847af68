"""Which slots the model leans on: the AUC that is lost when a slot's values are shuffled over the rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["SlotImportance", "importance"]


@dataclass(frozen=True)
class SlotImportance:
    """One slot; about 0 or below: the model would do as well without it."""

    slot: str
    auc: float  # with the slot shuffled, mean over the shuffles
    lost: float  # base AUC - auc
    lowest_lost: float
    highest_lost: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def importance(base_auc: float, shuffled: Mapping[str, Sequence[float]]) -> tuple[SlotImportance, ...]:
    """What each slot is worth, most important first; `shuffled` holds one AUC for each shuffle of a slot."""
    rows = []
    for slot, aucs in shuffled.items():
        auc = sum(aucs) / len(aucs)
        rows.append(SlotImportance(slot, auc, base_auc - auc, base_auc - max(aucs), base_auc - min(aucs)))
    return tuple(sorted(rows, key=lambda row: (-row.lost, row.slot)))
