"""A first pass over the training data for the statistics that minmax, zscore, robust and quantile buckets need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple, Protocol

from clickline.data.input_blocks import Inputs
from clickline.data.prepare.column_sketches import Numbers
from clickline.data.readers import Reader
from clickline.features import FeatureSpec, SlotField
from clickline.features.raw_columns import nothing, numbers
from clickline.progress import Progress
from clickline.records import Block


class Seen(NamedTuple):
    """What one block holds of the columns that need statistics."""

    rows: int
    size: int
    numbers: dict[str, Numbers]


class Looks(Protocol):
    """Who looks at the blocks."""

    def look(self, inputs: Inputs, features: FeatureSpec, progress: Progress) -> Iterator[Seen]:
        """`look` at every block, in their order: so sums come out the same."""
        ...


def look(reader: Reader, features: FeatureSpec, number: int, block: Block) -> Seen:
    """Measure one block, the `number`-th of the input."""
    raw = reader.parse(block)
    found = {}
    for column in features.columns_needing_statistics:
        there = raw.columns.get(column, nothing(raw.rows))  # logs of another format than the fields are for
        values_B, _ = numbers(there, column, raw.rows, features.missing)
        found[column] = Numbers.of(values_B, number)
    return Seen(raw.rows, block.size, found)


def measure(inputs: Inputs, features: FeatureSpec, crew: Looks, progress: Progress) -> FeatureSpec:
    """The features with the statistics of the training data, where any field needs them."""
    columns = features.columns_needing_statistics
    if not columns:
        return features
    totals = {column: Numbers() for column in columns}
    progress.begin("measure train", total_bytes=inputs.text_bytes(progress))
    for seen in crew.look(replace(inputs, find_unit=None), features, progress):  # times are not measured
        for column in columns:
            totals[column].merge(seen.numbers[column])
        progress.advance(rows=seen.rows, size=seen.size)
    progress.end()
    known = {}
    _tell_of_constants(totals, progress)
    for field in features.fields:
        if field.needs_statistics:
            buckets = field.buckets if isinstance(field, SlotField) else 0
            known[field.name] = totals[field.column].statistics(buckets)
            made = len(known[field.name].edges) + 1
            if 0 < made < buckets:
                progress.say(
                    f"{field.name}: {made} of {buckets} buckets, its values repeat too often for more"
                )
    return features.with_statistics(known)


def _tell_of_constants(totals: Mapping[str, Numbers], progress: Progress) -> None:
    """Columns that tell no row from another now, and whose scale is a guess for values that come later."""
    for column, found in totals.items():
        if not found.count:
            what = "has no values in the rows it was measured on"
        elif found.low == found.high:
            what = f"is {found.low:.6g} in all {found.count:,} rows with a value"
        else:
            continue
        progress.say(f"{column} {what}: nothing can be learned from it. Check data.fields, or leave it out")
