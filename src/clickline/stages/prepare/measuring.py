"""A first pass over the training data for the statistics that minmax, zscore and quantile buckets need."""

from __future__ import annotations

from clickline.features import FeatureSpec, SlotField
from clickline.features.columns import nothing, numbers, without
from clickline.intake.inputs import Inputs, in_order
from clickline.progress import Progress
from clickline.records import Block
from clickline.stages.prepare.statistics import Numbers

__all__ = ["measure"]


def measure(inputs: Inputs, features: FeatureSpec, threads: int, progress: Progress) -> FeatureSpec:
    """The features with the statistics of the training data, where any field needs them."""
    columns = features.columns_needing_statistics
    if not columns:
        return features
    totals = {column: Numbers() for column in columns}

    def look(number: int, block: Block) -> tuple[int, dict[str, Numbers]]:
        raw = inputs.reader.parse(block)
        found = {}
        for column in columns:
            there = raw.columns.get(
                column, nothing(raw.rows)
            )  # logs of another format than the fields are for
            values_B, _ = numbers(without(there, features.missing), column, raw.rows)
            found[column] = Numbers.of(values_B, number)
        return raw.rows, found

    progress.begin("measure train", total_bytes=inputs.text_bytes(progress))
    blocks = (block for _, block, _ in inputs.blocks(progress) if block.payload is not None)
    for block, (rows, found) in in_order(look, blocks, threads):
        for column in columns:
            totals[column].merge(found[column])
        progress.advance(rows=rows, size=block.size)
    progress.end()
    known = {}
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
