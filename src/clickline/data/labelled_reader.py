"""Turns blocks of logs into labelled rows, and lists the rows that cannot be used."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from clickline.config import DataSection
from clickline.data.input_blocks import Inputs, map_in_order, open_inputs
from clickline.data.readers import Reader
from clickline.data.readers.reader import MAX_LISTED_BAD_ROWS, unlisted_rows
from clickline.data.schema import Schema
from clickline.data.targets import TargetFields, TimeBounds, read_targets
from clickline.errors import DataError, TooManyBadRows
from clickline.features import Encoder, FeatureSpec
from clickline.progress import Progress
from clickline.records import BadRow, Block, LabelledRows, RawRows, SourceFile
from clickline.storage.file_cache import FileCache
from clickline.storage.redaction import redacted
from clickline.storage.storage import Storage

_MAX_EXAMPLES = 20  # bad rows that a report lists


@dataclass(frozen=True)
class LabelledBlock:
    """The content of a block. A block that only carries errors has neither raw nor usable rows."""

    raw: RawRows | None
    rows: LabelledRows | None
    bad: list[BadRow]
    size: int  # bytes of input
    usable_B: NDArray[np.bool_] | None = None  # which of the raw rows are usable; None: all


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
        """The usable rows of one block, and its bad rows, the first thousand with details. Safe to call from several
        threads."""
        bad = list(block.bad)
        if block.payload is None:
            return LabelledBlock(None, None, bad, block.size)
        raw = self._reader.parse(block)
        bad += raw.bad
        encoded, errors = self._encoder.encode(raw)
        bounds = TimeBounds.for_file(source, block, self.reference_time)
        rows, target_errors = read_targets(raw, encoded, self._fields, self.features.missing, bounds)
        if not errors and not target_errors:
            return LabelledBlock(raw, rows, bad, block.size)
        file = redacted(source.uri)
        usable_B = np.ones(raw.rows, dtype=np.bool_)
        room = MAX_LISTED_BAD_ROWS
        for group in (*target_errors, *errors):  # a row is dropped once, for the first error found in it
            new_F = group.rows_F[usable_B[group.rows_F]]
            usable_B[new_F] = False
            lines_F = raw.lines_B[new_F].tolist()
            for row, line in zip(new_F[:room].tolist(), lines_F, strict=False):
                bad.append(BadRow(file, line, group.reason, group.describe(row)))
            if new_F.size > room:
                bad.append(unlisted_rows(file, lines_F[room], group.reason, new_F.size - room))
            room = max(0, room - new_F.size)
        return LabelledBlock(raw, rows.select(usable_B), bad, block.size, usable_B)


@dataclass
class LabelledLogs:
    """The rows of log files that are read without preparing them. Bad rows are left out and counted."""

    inputs: Inputs
    reader: LabelledReader
    max_bad_ratio: float
    rows: int = 0  # usable
    bad: Counter[str] = field(default_factory=Counter)  # by reason
    examples: list[BadRow] = field(default_factory=list)  # the first bad rows

    @classmethod
    def open(
        cls,
        data: DataSection,
        files: Sequence[SourceFile],
        schema: Schema,
        cache: FileCache,
        storage: Storage,
    ) -> LabelledLogs:
        """Open files as a config describes them."""
        inputs = open_inputs(data, files, schema, cache, storage)
        reader = LabelledReader(inputs.reader, schema.features, schema.targets, time.time())
        return cls(inputs, reader, data.max_bad_ratio)

    def read(self, threads: int, progress: Progress) -> Iterator[LabelledBlock]:
        """Every block, in order, read in parallel. At the end: DataError without rows, or TooManyBadRows."""

        def read(number: int, item: tuple[SourceFile, Block]) -> LabelledBlock:
            return self.reader.read(*item)

        blocks = ((self.inputs.files[number], block) for number, block, _ in self.inputs.blocks(progress))
        for _, labelled in map_in_order(read, blocks, threads):
            self.rows += 0 if labelled.rows is None else labelled.rows.rows
            for row in labelled.bad:
                self.bad[row.reason] += row.count
            self.examples += labelled.bad[: _MAX_EXAMPLES - len(self.examples)]
            yield labelled
        self._check_bad_ratio()

    def _check_bad_ratio(self) -> None:
        bad = self.bad.total()
        first = redacted(self.inputs.files[0].uri) + (" and others" if len(self.inputs.files) > 1 else "")
        if not self.rows and not bad:
            raise DataError(f"{first} has no rows. Name the files with the logs.")
        total = self.rows + bad
        if not self.rows or bad > self.max_bad_ratio * total:
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in self.bad.most_common())
            places = "; ".join(f"{row.file}:{row.line}: {row.detail}" for row in self.examples[:3])
            raise TooManyBadRows(
                f"{bad:,} of {total:,} rows of {first} are bad ({bad / total:.2%}; data.max_bad_ratio allows "
                f"{self.max_bad_ratio:.2%}): {reasons}. The first: {places}. "
                "Fix the data, check data.format, or raise data.max_bad_ratio."
            )
