"""Blocks of logs become labelled rows; what cannot be used is named, row by row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from clickline.data.input_blocks import Inputs, in_order
from clickline.data.readers import Reader
from clickline.data.readers.reader import SHOWN_BAD_ROWS
from clickline.data.targets import FileTimes, TargetFields, targets
from clickline.features import Encoder, FeatureSpec
from clickline.progress import Progress
from clickline.records import BadRow, Block, LabelledRows, RawRows, SourceFile
from clickline.storage.redaction import shown


@dataclass(frozen=True)
class Labelled:
    """What a block held. A block that is all fault has neither raw nor usable rows."""

    raw: RawRows | None
    rows: LabelledRows | None
    bad: list[BadRow]


class LabelledReader:
    """Reads logs as one `FeatureSpec` says: ids and floats are those of whoever has the same spec."""

    def __init__(self, reader: Reader, features: FeatureSpec, fields: TargetFields, clock: float) -> None:
        """`clock`: rows that happened long after it have a wrong time."""
        self.features = features
        self._reader = reader
        self._encoder = Encoder(features)
        self._fields = fields
        self.clock = clock

    def read(self, source: SourceFile, block: Block) -> Labelled:
        """The rows of one block that can be used, and the others; safe to call from several threads."""
        bad = list(block.faults)
        if block.payload is None:
            return Labelled(None, None, bad)
        raw = self._reader.parse(block)
        return Labelled(raw, self._usable(raw, source, block, bad), bad)

    def rows(self, inputs: Inputs, threads: int, progress: Progress) -> Iterator[Labelled]:
        """Every block of the files, in order, read on all cores."""

        def read(number: int, item: tuple[SourceFile, Block]) -> Labelled:
            return self.read(*item)

        blocks = ((inputs.files[number], block) for number, block, _ in inputs.blocks(progress))
        for (_, block), labelled in in_order(read, blocks, threads):
            good = 0 if labelled.rows is None else labelled.rows.rows
            progress.advance(rows=good + sum(row.count for row in labelled.bad), size=block.size)
            yield labelled

    def _usable(self, raw: RawRows, source: SourceFile, block: Block, bad: list[BadRow]) -> LabelledRows:
        """The rows that can be used; the others go to `bad`, the first thousand of a block with their words."""
        encoded, faults = self._encoder.encode(raw)
        happened, more = targets(
            raw, self._fields, self.features.missing, FileTimes.of(source, block, self.clock)
        )
        rows = happened.with_features(encoded)
        bad += raw.bad
        if not faults and not more:
            return rows
        file = shown(source.uri)
        left_out_B = np.zeros(raw.rows, dtype=np.bool_)
        room = SHOWN_BAD_ROWS
        for group in (*more, *faults):  # a row is left out once, for the first thing found wrong with it
            new_F = group.rows_F[~left_out_B[group.rows_F]]
            left_out_B[new_F] = True
            lines_F = raw.lines_B[new_F].tolist()
            for row, line in zip(new_F[:room].tolist(), lines_F, strict=False):
                bad.append(BadRow(file, line, group.reason, group.describe(row)))
            if new_F.size > room:
                rest = new_F.size - room
                detail = f"{rest:,} more rows of this kind in this part of the file, not shown"
                bad.append(BadRow(file, lines_F[room], group.reason, detail, count=rest))
            room = max(0, room - new_F.size)
        return rows.select(~left_out_B)
