"""The features of a model: the fields, how each becomes ids or a float, and the statistics this needs.

A `FeatureSpec` is self-contained: it is stored in the manifests of the dataset, the checkpoint and the version,
and any process that has it encodes a row exactly as training did.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from clickline.errors import ArtifactError, DataError
from clickline.features import encoder_kernels
from clickline.validation import validate

ENCODER_FORMAT = 2
"""Increased whenever the same raw row would get other ids or floats. Never reuse a number."""

MAX_SPREADS = 22025.0
"""`robust` clips a number to this many spreads from the median, so that the result is at most 10."""

Transform = Literal["none", "log1p", "minmax", "zscore", "robust"]
SlotSource = Literal["text", "feasign", "log2", "quantiles"]


@dataclass(frozen=True)
class FieldStatistics:
    """Statistics of one number field over the training rows, without missing values."""

    count: int
    low: float
    high: float
    mean: float
    deviation: float
    edges: tuple[float, ...] = ()  # ascending bucket edges, for quantile buckets
    median: float = 0.0
    # The interquartile range; if that is 0, the median distance of other values from the median.
    spread: float = 0.0


@dataclass(frozen=True)
class DenseField:
    """A number that the network takes as a float."""

    name: str
    column: str
    transform: Transform
    statistics: FieldStatistics | None = None

    @property
    def needs_statistics(self) -> bool:
        return self.transform in ("minmax", "zscore", "robust")

    @property
    def kernel(self) -> int:
        """How `encoder_kernels.transform` computes the float."""
        kernels = {"log1p": encoder_kernels.LOG1P, "robust": encoder_kernels.SCALE_LOG1P}
        return kernels.get(self.transform, encoder_kernels.SCALE)

    @property
    def scaling(self) -> tuple[float, float, float, float]:
        """Shift, factor and bounds for `encoder_kernels.transform`."""
        if not self.needs_statistics:
            return 0.0, 1.0, -np.inf, np.inf
        statistics = self.statistics
        if statistics is None:
            raise DataError(
                f"{self.name}: transform {self.transform} needs statistics of the training data, which are missing"
            )
        if self.transform == "minmax":
            return statistics.low, _inverse(statistics.high - statistics.low), 0.0, 1.0
        if self.transform == "robust":
            return statistics.median, _inverse(statistics.spread), -MAX_SPREADS, MAX_SPREADS
        return statistics.mean, _inverse(statistics.deviation), -np.inf, np.inf


def _inverse(span: float) -> float:
    """1 / span; 0 if all values are the same."""
    return 1.0 / span if span > 0 else 0.0


@dataclass(frozen=True)
class SlotField:
    """A categorical field (sparse feature); its values become 64-bit ids."""

    name: str
    column: str
    number: int  # mixed into every id
    source: SlotSource = "text"
    multi: bool = False
    separator: str | None = None
    buckets: int = 0  # the requested number of quantile buckets
    statistics: FieldStatistics | None = None

    @property
    def needs_statistics(self) -> bool:
        return self.source == "quantiles"

    @property
    def edges_E(self) -> NDArray[np.float32]:
        """The edges of quantile buckets; other slots have none."""
        if not self.needs_statistics:
            return np.zeros(0, dtype=np.float32)
        if self.statistics is None:
            raise DataError(
                f"{self.name}: quantile buckets need statistics of the training data, which are missing"
            )
        return np.array(self.statistics.edges, dtype=np.float32)

    @cached_property
    def salt(self) -> np.uint64:
        return np.uint64(encoder_kernels.slot_salt(np.uint64(self.number)))

    @cached_property
    def missing_id(self) -> int:
        """The id of a missing value in this slot."""
        return int(encoder_kernels.fmix64(np.uint64(encoder_kernels.MISSING_FEATURE_ID) ^ self.salt))


@dataclass(frozen=True)
class FeatureSpec:
    """All fields of the model, in the order of the dataset's columns."""

    dense: tuple[DenseField, ...]
    slots: tuple[SlotField, ...]
    missing: tuple[str, ...] = ()  # texts that mean a missing value, besides the empty one

    @property
    def fields(self) -> tuple[DenseField | SlotField, ...]:
        return (*self.dense, *self.slots)

    @property
    def columns(self) -> tuple[str, ...]:
        """The source columns that are needed, each once."""
        return tuple(dict.fromkeys(f.column for f in self.fields))

    @property
    def measured_columns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(f.column for f in self.fields if f.needs_statistics))

    def subset(self, columns: AbstractSet[str]) -> FeatureSpec:
        """The fields that come from these columns."""
        return replace(
            self,
            dense=tuple(f for f in self.dense if f.column in columns),
            slots=tuple(f for f in self.slots if f.column in columns),
        )

    def with_statistics(self, by_name: Mapping[str, FieldStatistics]) -> FeatureSpec:
        """The same fields with these statistics, by field name."""
        return replace(
            self,
            dense=tuple(replace(f, statistics=by_name.get(f.name, f.statistics)) for f in self.dense),
            slots=tuple(replace(f, statistics=by_name.get(f.name, f.statistics)) for f in self.slots),
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "encoder_format": ENCODER_FORMAT,
            "missing": list(self.missing),
            "dense": [asdict(f) for f in self.dense],
            "slots": [asdict(f) for f in self.slots],
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> FeatureSpec:
        found = document.get("encoder_format") if isinstance(document, Mapping) else None
        if found != ENCODER_FORMAT:
            raise ArtifactError(
                f"the features were encoded in format {found!r}; this release of Clickline encodes in "
                f"format {ENCODER_FORMAT}, which gives some values other ids. Prepare and train again with this "
                "release, or use the release that wrote it."
            )
        spec = validate(cls, document, "the list of features")
        for slot in spec.slots:
            if not 0 <= slot.number < 2**64 or slot.separator == "":
                raise ArtifactError(
                    f"the features have slot {slot.name!r} with the number {slot.number} and the separator "
                    f"{slot.separator!r}; a 64-bit number and a separator of at least one character are allowed. "
                    "Prepare the data again."
                )
        return spec


def slot_number(name: str) -> int:
    """The default number of a slot: its name if that is a number, else the hash of its name."""
    if name.isascii() and name.isdigit() and int(name) < 2**64:
        return int(name)
    text = np.frombuffer(name.encode(), dtype=np.uint8)
    return int(encoder_kernels.xxh64(text, 0, text.size))
