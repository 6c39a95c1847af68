"""What the features are: the fields, how each becomes ids or a float, and the numbers that takes.

A `FeatureSpec` is complete: it travels in the dataset's manifest to the checkpoint and the version,
and whoever has it encodes a row as training did.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from clickline.errors import ArtifactError
from clickline.features import encoder_kernels
from clickline.validation import checked

ENCODER_FORMAT = 2
"""Counts up whenever the same raw row would get other ids or floats. Never reuse a number."""

MOST_SPREADS = 22025.0
"""`robust` takes a number to be no farther from the median than so many spreads: it becomes 10 at most."""

Transform = Literal["none", "log1p", "minmax", "zscore", "robust"]
SlotSource = Literal["text", "feasign", "log2", "quantiles"]


@dataclass(frozen=True)
class FieldStatistics:
    """What the training rows say of one number field; missing values are left out."""

    count: int
    low: float
    high: float
    mean: float
    deviation: float
    edges: tuple[float, ...] = ()  # rising bucket edges, for quantile buckets
    median: float = 0.0
    # From quartile to quartile; where they are the same, the usual distance from the median.
    spread: float = 0.0


@dataclass(frozen=True)
class DenseField:
    """A number that the network sees as a float."""

    name: str
    column: str
    transform: Transform
    statistics: FieldStatistics | None = None

    @property
    def needs_statistics(self) -> bool:
        return self.transform in ("minmax", "zscore", "robust")


@dataclass(frozen=True)
class SlotField:
    """A named categorical field; its values become 64-bit ids."""

    name: str
    column: str
    number: int  # mixed into every id
    source: SlotSource = "text"
    multi: bool = False
    separator: str | None = None
    buckets: int = 0  # how many quantile buckets were asked for
    statistics: FieldStatistics | None = None

    @property
    def needs_statistics(self) -> bool:
        return self.source == "quantiles"

    @cached_property
    def salt(self) -> np.uint64:
        return np.uint64(encoder_kernels.slot_salt(np.uint64(self.number)))

    @cached_property
    def missing_id(self) -> int:
        """The id of "no value" in this slot."""
        return int(encoder_kernels.fmix64(np.uint64(encoder_kernels.MISSING_FEASIGN) ^ self.salt))


@dataclass(frozen=True)
class FeatureSpec:
    """Every field that the model sees, in the order of the dataset's columns."""

    dense: tuple[DenseField, ...]
    slots: tuple[SlotField, ...]
    missing: tuple[str, ...] = ()  # texts that stand for "no value", beside the empty one

    @property
    def fields(self) -> tuple[DenseField | SlotField, ...]:
        return (*self.dense, *self.slots)

    @property
    def columns(self) -> tuple[str, ...]:
        """The source's columns that are needed, each once."""
        return tuple(dict.fromkeys(f.column for f in self.fields))

    @property
    def columns_needing_statistics(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(f.column for f in self.fields if f.needs_statistics))

    def with_statistics(self, by_name: Mapping[str, FieldStatistics]) -> FeatureSpec:
        """The same fields with the statistics of the training data filled in, by field name."""
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
                f"format {ENCODER_FORMAT}, where some values have other ids. Prepare and train again with this "
                "release, or use the release that made it."
            )
        spec = checked(cls, document, "the list of features")
        for slot in spec.slots:
            if not 0 <= slot.number < 2**64 or slot.separator == "":
                raise ArtifactError(
                    f"the features have slot {slot.name!r} with the number {slot.number} and the separator "
                    f"{slot.separator!r}; a number of 64 bits is allowed, and a separator of one sign or more. "
                    "Prepare the data again."
                )
        return spec


def slot_number(name: str) -> int:
    """A slot's number when the user gives none: the number it is named by, else the hash of its name."""
    if name.isascii() and name.isdigit() and int(name) < 2**64:
        return int(name)
    text = np.frombuffer(name.encode(), dtype=np.uint8)
    return int(encoder_kernels.xxh64(text, 0, text.size))
