"""Turns blocks of logs into labelled rows, and lists the rows that cannot be used."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from clickline.data.input_blocks import Inputs, map_in_order
from clickline.data.readers import Reader
from clickline.data.readers.reader import MAX_LISTED_BAD_ROWS, unlisted_rows
from clickline.data.targets import TargetFields, TimeBounds, read_targets
from clickline.features import Encoder, FeatureSpec
from clickline.progress import Progress
from clickline.records import BadRow, Block, LabelledRows, RawRows, SourceFile
from clickline.storage.redaction import redacted


@dataclass(frozen=True)
class LabelledBlock:
    """The content of a block. A block that only carries errors has neither raw nor usable rows."""

    raw: RawRows | None
    rows: LabelledRows | None
    bad: list[BadRow]


class LabelledReader:
    """Reads logs by a `FeatureSpec`: the same spec always gives the same ids and floats."""

    def __init__(
        self, reader: Reader, features: FeatureSpec, fields: TargetFields, reference_time: float
    ) -> None:
        """`reference_time` (unix seconds): rows from long after it have a wrong time."""
        self.features = features
        self._reader = reader
        self._encoder = Encoder(features)
        self._fields = fields
        self.reference_time = reference_time

    def read(self, source: SourceFile, block: Block) -> LabelledBlock:
        """The usable rows of one block, and its bad rows. Safe to call from several threads."""
        bad = list(block.bad)
        if block.payload is None:
            return LabelledBlock(None, None, bad)
        raw = self._reader.parse(block)
        return LabelledBlock(raw, self._usable_rows(raw, source, block, bad), bad)

    def rows(self, inputs: Inputs, threads: int, progress: Progress) -> Iterator[LabelledBlock]:
        """Every block of the files, in order, read in parallel."""

        def read(number: int, item: tuple[SourceFile, Block]) -> LabelledBlock:
            return self.read(*item)

        blocks = ((inputs.files[number], block) for number, block, _ in inputs.blocks(progress))
        for (_, block), labelled in map_in_order(read, blocks, threads):
            good = 0 if labelled.rows is None else labelled.rows.rows
            progress.advance(rows=good + sum(row.count for row in labelled.bad), size=block.size)
            yield labelled

    def _usable_rows(self, raw: RawRows, source: SourceFile, block: Block, bad: list[BadRow]) -> LabelledRows:
        """The usable rows; the others are added to `bad`, the first thousand of a block with details."""
        encoded, errors = self._encoder.encode(raw)
        row_targets, target_errors = read_targets(
            raw, self._fields, self.features.missing, TimeBounds.for_file(source, block, self.reference_time)
        )
        rows = row_targets.with_features(encoded)
        bad += raw.bad
        if not errors and not target_errors:
            return rows
        file = redacted(source.uri)
        dropped_B = np.zeros(raw.rows, dtype=np.bool_)
        room = MAX_LISTED_BAD_ROWS
        for group in (*target_errors, *errors):  # a row is dropped once, for the first error found in it
            new_F = group.rows_F[~dropped_B[group.rows_F]]
            dropped_B[new_F] = True
            lines_F = raw.lines_B[new_F].tolist()
            for row, line in zip(new_F[:room].tolist(), lines_F, strict=False):
                bad.append(BadRow(file, line, group.reason, group.describe(row)))
            if new_F.size > room:
                bad.append(unlisted_rows(file, lines_F[room], group.reason, new_F.size - room))
            room = max(0, room - new_F.size)
        return rows.select(~dropped_B)
