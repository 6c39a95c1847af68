"""A first pass over the training data for the statistics that minmax, zscore, robust and quantile buckets need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple, Protocol

from clickline.data.input_blocks import Inputs
from clickline.data.prepare.column_sketches import NumberSketch
from clickline.data.readers import Reader
from clickline.features import FeatureSpec, SlotField
from clickline.features.raw_columns import empty_column, to_float32
from clickline.progress import Progress
from clickline.records import Block


class BlockStatistics(NamedTuple):
    """Sketches of the columns of one block that need statistics."""

    rows: int
    size: int
    numbers: dict[str, NumberSketch]


class MeasureExecutor(Protocol):
    """Measures the blocks of the input."""

    def measure(self, inputs: Inputs, features: FeatureSpec, progress: Progress) -> Iterator[BlockStatistics]:
        """`measure_block` for every block, in input order, so that float sums are reproducible."""
        ...


def measure_block(reader: Reader, features: FeatureSpec, number: int, block: Block) -> BlockStatistics:
    """Measure one block, the `number`-th of the input."""
    raw = reader.parse(block)
    sketches = {}
    for column in features.measured_columns:
        values = raw.columns.get(
            column, empty_column(raw.rows)
        )  # absent if the logs have another format than the fields
        values_B, _ = to_float32(values, column, raw.rows, features.missing)
        sketches[column] = NumberSketch.of_block(values_B, number)
    return BlockStatistics(raw.rows, block.size, sketches)


def measure_fields(
    inputs: Inputs, features: FeatureSpec, executor: MeasureExecutor, progress: Progress
) -> FeatureSpec:
    """The features, with statistics of the training data for the fields that need them."""
    columns = features.measured_columns
    if not columns:
        return features
    totals = {column: NumberSketch() for column in columns}
    progress.begin("measure train", total_bytes=inputs.uncompressed_bytes(progress))
    for measured in executor.measure(
        replace(inputs, detect_time_unit=None), features, progress
    ):  # times are not measured
        for column in columns:
            totals[column].merge(measured.numbers[column])
        progress.advance(rows=measured.rows, size=measured.size)
    progress.end()
    statistics = {}
    _report_constants(totals, progress)
    for field in features.fields:
        if field.needs_statistics:
            buckets = field.buckets if isinstance(field, SlotField) else 0
            statistics[field.name] = totals[field.column].statistics(buckets)
            actual = len(statistics[field.name].edges) + 1
            if 0 < actual < buckets:
                progress.log(
                    f"{field.name}: {actual} of {buckets} buckets; its values repeat too often for more"
                )
    return features.with_statistics(statistics)


def _report_constants(totals: Mapping[str, NumberSketch], progress: Progress) -> None:
    """Report columns that do not distinguish rows; their scale is a guess for values that come later."""
    for column, sketches in totals.items():
        if not sketches.count:
            what = "has no values in the training rows"
        elif sketches.low == sketches.high:
            what = f"is {sketches.low:.6g} in all {sketches.count:,} rows with a value"
        else:
            continue
        progress.log(
            f"{column} {what}: a model learns nothing from it. Check data.fields, or remove the field"
        )
