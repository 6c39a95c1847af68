"""Predicts how many ids the tables will hold: seen, admitted, candidates, and kept after eviction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from clickline.config.sections import AdmissionSection, EvictionSection, TrainSection
from clickline.data.input_blocks import map_in_order
from clickline.machine import cores
from clickline.models.from_config import expected_train_rows
from clickline.pipeline.planning.id_growth import Estimate, extrapolate, occurrences
from clickline.pipeline.planning.sampling import DataSample, sample_rows

Numbers = NDArray[np.float64]
IdFilter = Callable[[Numbers, Numbers], Numbers]
"""The probability that ids count, from their impressions and clicks."""


@dataclass(frozen=True)
class SlotIdCounts:
    """The predicted id counts of one slot."""

    name: str
    distinct: int
    low: int
    high: int
    admitted: int  # with an embedding at the end of training
    candidates: int  # peak number of ids that are counted, but not admitted
    kept: int  # admitted and not evicted: what checkpoints and versions contain
    kept_candidates: int


class IdCounter:
    """Predicts id counts for different training configs; reads a sample of the rows only if needed."""

    def __init__(self, sample: DataSample) -> None:
        self._sample = sample
        self._rows = 0  # in the sample, after it was read
        self._slots: list[list[tuple[Numbers, Numbers]]] = []  # its id counts

    def count(self, train: TrainSection) -> tuple[SlotIdCounts, ...]:
        """The predicted id counts of each slot."""
        sample = self._sample
        train_rows = expected_train_rows(train, sample.train_rows, sample.clicks)
        names = [slot.name for slot in sample.features.slots]
        plain = train.admission == AdmissionSection() and train.eviction is None
        if sample.distinct is not None and plain and train_rows == sample.train_rows:
            return tuple(
                SlotIdCounts(name, ids, ids, ids, ids, 0, ids, 0)
                for name, ids in zip(names, sample.distinct, strict=True)
            )
        self._read()
        filters = _filters(train)
        counts = []
        for slot, (name, occurred) in enumerate(zip(names, self._slots, strict=True)):
            curves = [[float(score(*both).sum()) for both in occurred] for score in filters]
            factor = 1.0
            if sample.distinct is not None:  # the sample gives the shares, the dataset the total
                extrapolated = extrapolate(curves[0], sample.train_rows / self._rows).expected
                factor = sample.distinct[slot] / max(1.0, extrapolated)
            scale = max(1, train_rows) / self._rows
            counts.append(_slot_counts(name, [extrapolate(values, scale) * factor for values in curves]))
        return tuple(counts)

    def _read(self) -> None:
        if not self._rows:
            rows = sample_rows(self._sample.dataset)
            slots = range(len(rows.encoded.slots))
            self._slots = [
                done for _, done in map_in_order(lambda _, slot: occurrences(rows, slot), slots, cores())
            ]
            self._rows = rows.rows


def _slot_counts(name: str, counts: Sequence[Estimate]) -> SlotIdCounts:
    seen, first, last, kept, counted = counts
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


def _filters(train: TrainSection) -> list[IdFilter]:
    """Filters for ids seen, admitted in the first epoch, admitted at the end, kept, and kept as candidates."""
    admission, eviction, epochs = train.admission, train.eviction, train.epochs

    def last(impressions: Numbers, clicks: Numbers) -> Numbers:
        return _admitted(admission, impressions * epochs)

    return [
        lambda impressions, clicks: np.ones_like(impressions),
        lambda impressions, clicks: _admitted(admission, impressions),
        last,
        lambda impressions, clicks: last(impressions, clicks) * _survives(eviction, impressions, clicks),
        lambda impressions, clicks: (
            (1.0 - last(impressions, clicks)) * _survives(eviction, impressions, clicks)
        ),
    ]


def _admitted(rule: AdmissionSection, impressions: Numbers) -> Numbers:
    """The probability that an id with this number of impressions was admitted."""
    trials = np.maximum(0.0, np.floor(impressions) - rule.min_impressions + 1)
    chance: Numbers = 1.0 - (1.0 - rule.probability) ** trials
    return chance


def _survives(rule: EvictionSection | None, impressions: Numbers, clicks: Numbers) -> Numbers:
    """Whether an id survives the eviction at the end of an epoch. Idle time is ignored."""
    if rule is None:
        return np.ones_like(impressions)
    score = rule.click_weight * clicks + rule.nonclick_weight * (impressions - clicks)
    survives: Numbers = (score * rule.decay >= rule.threshold).astype(np.float64)
    return survives
