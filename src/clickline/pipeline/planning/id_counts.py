"""How many ids the tables will hold: seen, admitted, only counted, and kept once eviction was there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from clickline.config.sections import AdmissionSection, EvictionSection, TrainSection
from clickline.data.input_blocks import in_order
from clickline.machine import cores
from clickline.models.from_config import learned_rows
from clickline.pipeline.planning.id_growth import Estimate, extrapolate, occurrences
from clickline.pipeline.planning.sampling import Looked, sample_of

Numbers = NDArray[np.float64]
Worth = Callable[[Numbers, Numbers], Numbers]  # of shows and clicks of ids: 1, 0, or a chance that they count


@dataclass(frozen=True)
class SlotIdCounts:
    """The ids of one slot."""

    name: str
    distinct: int
    low: int
    high: int
    admitted: int  # that have a vector when training ends
    candidates: int  # that are only counted, at their most
    kept: int  # admitted, and not evicted at the end: what checkpoints and versions hold
    kept_candidates: int


class IdCounter:
    """Counts ids under one setting of training or another; reads a sample of the rows only if it must."""

    def __init__(self, looked: Looked) -> None:
        self._looked = looked
        self._rows = 0  # of the sample, once it was read
        self._slots: list[list[tuple[Numbers, Numbers]]] = []  # what was counted in it

    def count(self, train: TrainSection) -> tuple[SlotIdCounts, ...]:
        """The ids that training holds, slot by slot."""
        looked = self._looked
        learned = learned_rows(train, looked.train_rows, looked.clicks)
        names = [slot.name for slot in looked.features.slots]
        plain = train.admission == AdmissionSection() and train.eviction is None
        if looked.distinct is not None and plain and learned == looked.train_rows:
            return tuple(
                SlotIdCounts(name, ids, ids, ids, ids, 0, ids, 0)
                for name, ids in zip(names, looked.distinct, strict=True)
            )
        self._read()
        worths = _worths(train)
        found = []
        for slot, (name, occurred) in enumerate(zip(names, self._slots, strict=True)):
            curves = [[float(worth(*both).sum()) for both in occurred] for worth in worths]
            factor = 1.0
            if looked.distinct is not None:  # the sample tells the shares, the dataset the number
                whole = extrapolate(curves[0], looked.train_rows / self._rows).expected
                factor = looked.distinct[slot] / max(1.0, whole)
            scale = max(1, learned) / self._rows
            found.append(_counts(name, [extrapolate(values, scale) * factor for values in curves]))
        return tuple(found)

    def _read(self) -> None:
        if not self._rows:
            rows = sample_of(self._looked.dataset)
            slots = range(len(rows.encoded.slots))
            self._slots = [
                done for _, done in in_order(lambda _, slot: occurrences(rows, slot), slots, cores())
            ]
            self._rows = rows.rows


def _counts(name: str, found: Sequence[Estimate]) -> SlotIdCounts:
    seen, first, last, kept, counted = found
    distinct = max(1, round(seen.expected))
    return SlotIdCounts(
        name,
        distinct,
        round(seen.low),
        round(seen.high),
        admitted=min(distinct, round(last.expected)),
        candidates=max(0, distinct - round(first.expected)),
        kept=min(distinct, round(kept.expected)),
        kept_candidates=min(distinct, round(counted.expected)),
    )


def _worths(train: TrainSection) -> list[Worth]:
    """Seen; admitted in the first epoch; admitted in the end; those that stay; candidates that stay."""
    admission, eviction, epochs = train.admission, train.eviction, train.epochs

    def last(shows: Numbers, clicks: Numbers) -> Numbers:
        return _admitted(admission, shows * epochs)

    return [
        lambda shows, clicks: np.ones_like(shows),
        lambda shows, clicks: _admitted(admission, shows),
        last,
        lambda shows, clicks: last(shows, clicks) * _stays(eviction, shows, clicks),
        lambda shows, clicks: (1.0 - last(shows, clicks)) * _stays(eviction, shows, clicks),
    ]


def _admitted(rule: AdmissionSection, shows: Numbers) -> Numbers:
    """The chance that an id with so many shows was admitted."""
    trials = np.maximum(0.0, np.floor(shows) - rule.shows + 1)
    chance: Numbers = 1.0 - (1.0 - rule.probability) ** trials
    return chance


def _stays(rule: EvictionSection | None, shows: Numbers, clicks: Numbers) -> Numbers:
    """Whether an id outlives the end of an epoch. When it was seen last is not looked at."""
    if rule is None:
        return np.ones_like(shows)
    worth = rule.click_weight * clicks + rule.nonclick_weight * (shows - clicks)
    stays: Numbers = (worth * rule.decay >= rule.threshold).astype(np.float64)
    return stays
