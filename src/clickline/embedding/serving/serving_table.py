"""A version's serving table: its base and its deltas, mapped and looked up as one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from clickline.embedding.raw_memory import address
from clickline.embedding.serving.delta_merge import Level, merge_deltas
from clickline.embedding.serving.file_format import MappedShard, shard_name
from clickline.embedding.serving.lookup_kernels import (
    SECTION_WORDS,
    GatherBatch,
    PartView,
    copy_rows,
    gather_slots,
    packed_layout,
    pool_slots,
)
from clickline.embedding.serving.packed_rows import is_tombstone, row_bytes, row_type
from clickline.errors import ArtifactError
from clickline.records import PartShape, Precision

_NAME = re.compile(r"table-(\d{5})-of-(\d{5})\.bin")
_EMPTY_DIRECTORY = np.zeros(2, dtype=np.uint32)  # for a shard that is not open: one bucket without rows
_COUNT_ROWS = 1 << 14


@dataclass(frozen=True)
class _MappedTable:
    """The mapped memory that kernels read. Every user holds a reference, so memory in use is never unmapped."""

    levels: tuple[Level, ...]  # newest first
    sections: NDArray[np.int64]  # part, level, shard, word
    views: tuple[PartView, ...]


class ServingTable:
    """A mapped, read-only table. Thread-safe; pages are shared by all processes that map the same files."""

    def __init__(self, base: Level, overlay: Level | None) -> None:
        reference = next(iter(base.values()))
        self.parts: tuple[PartShape, ...] = reference.parts
        self.precision: Precision = reference.precision
        self.shards = reference.shards
        self.open_shards = tuple(sorted(base))
        self._layouts = tuple(packed_layout(shape, self.precision) for shape in self.parts)
        self._row_bytes = tuple(row_bytes(shape, self.precision) for shape in self.parts)
        self._mapped: _MappedTable | None = _view((base,) if overlay is None else (overlay, base))

    @classmethod
    def open(
        cls, folders: Sequence[Path], *, shards: Sequence[int] | None = None, work: Path | None = None
    ) -> ServingTable:
        """Map a base and its deltas, in order; all shards, or the given ones. Two or more deltas are merged into
        files in `work`, which other processes reuse, or without it into temporary files."""
        if not folders:
            raise ValueError("no table folder given: pass the base first, then its deltas")
        levels = [_open_folder(folder, shards) for folder in folders]
        reference = next(iter(levels[0].values()))
        for folder, level in zip(folders, levels, strict=True):
            first = next(iter(level.values()))
            if (first.parts, first.precision, first.shards) != (
                reference.parts,
                reference.precision,
                reference.shards,
            ):
                raise ArtifactError(
                    f"{folder} has {_describe(first)}, its base {_describe(reference)}. Publish a new base."
                )
        base, deltas = levels[0], levels[1:]
        if len(deltas) > 1:
            return cls(base, merge_deltas(deltas, work))
        return cls(base, deltas[0] if deltas else None)

    # ── lookups ────────────────────────────────────────────────────────────────────────────────

    def gather(self, batch: GatherBatch) -> None:
        """Find the rows of a batch, and pool them."""
        mapped_table = self._require_open()
        _check_batch(batch)
        batch.wide_B[:] = 0
        rows = batch.wide_B.size
        for part, slots in batch.plan.by_part:
            view, layout = mapped_table.views[part], self._layouts[part]
            gather_slots(view, layout, slots, batch.jagged, rows, *batch[2:])

    def find(
        self,
        part: int,
        ids_N: NDArray[np.uint64],
        rows_NW: NDArray[np.uint8],
        found_N: NDArray[np.bool_],
    ) -> int:
        """Copy packed rows, without their ids, into the caller's buffer: `row_bytes` each, zeros for unknown ids.
        Returns how many were found."""
        mapped_table = self._require_open()
        count, width = ids_N.size, self.row_bytes(part)
        for array, kind, shape in (
            (ids_N, np.uint64, (count,)),
            (rows_NW, np.uint8, (count, width)),
            (found_N, np.bool_, (count,)),
        ):
            _check_array(array, kind, shape)
        return int(copy_rows(mapped_table.views[part], address(ids_N), address(rows_NW), found_N))

    def row_bytes(self, part: int) -> int:
        """Bytes of a packed row as returned by `find`."""
        return self._row_bytes[part]

    # ── content ────────────────────────────────────────────────────────────────────────────────

    @property
    def levels(self) -> tuple[Level, ...]:
        """The mapped levels, oldest first."""
        return self._require_open().levels[::-1]

    @property
    def rows(self) -> int:
        """The number of ids with a row. With deltas, the ids of the overlay are looked up in the base."""
        mapped_table = self._require_open()
        *above, base = mapped_table.levels
        total = sum(section.rows for mapped in base.values() for section in mapped.sections)
        for part, view in enumerate(mapped_table.views):
            below = view._replace(
                sections=view.sections + mapped_table.sections.strides[1] * len(above), levels=1
            )
            rows_NW = np.empty((_COUNT_ROWS, self.row_bytes(part)), dtype=np.uint8)
            found_N = np.empty(_COUNT_ROWS, dtype=np.bool_)
            for mapped in (mapped for level in above for mapped in level.values()):
                packed_N = mapped.rows(part)
                for first in range(0, packed_N.size, _COUNT_ROWS):
                    piece_N = packed_N[first : first + _COUNT_ROWS]
                    ids_N = piece_N["id"].astype(np.uint64)
                    in_base = copy_rows(below, address(ids_N), address(rows_NW), found_N[: ids_N.size])
                    total += int((~is_tombstone(piece_N)).sum()) - int(in_base)
        return total

    def close(self) -> None:
        """Release the memory once no lookup uses it any more."""
        self._mapped = None

    def __enter__(self) -> ServingTable:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _require_open(self) -> _MappedTable:
        mapped_table = self._mapped
        if mapped_table is None:
            raise ValueError("this table is closed")
        return mapped_table


def pool(
    parts: Sequence[PartShape], precision: Precision, batch: GatherBatch, address_N: NDArray[np.int64]
) -> None:
    """`ServingTable.gather` for rows that a caller fetched elsewhere, packed as by `find`: `address_N` has the address
    of each id's row, 0 if it has none. The caller keeps the rows alive."""
    _check_batch(batch)
    _check_array(address_N, np.int64, (batch.jagged.ids_N.size,))
    batch.wide_B[:] = 0
    for part, slots in batch.plan.by_part:
        layout = packed_layout(parts[part], precision)
        pool_slots(layout, slots, batch.jagged, 0, batch.wide_B.size, address_N, *batch[2:])


def _view(levels: tuple[Level, ...]) -> _MappedTable:
    reference = next(iter(levels[0].values()))
    sections = np.empty((len(reference.parts), len(levels), reference.shards, SECTION_WORDS), dtype=np.int64)
    sections[:] = address(_EMPTY_DIRECTORY), 1, 0, 0
    for n, level in enumerate(levels):
        for shard, mapped in level.items():
            for part, section in enumerate(mapped.sections):
                sections[part, n, shard] = (
                    mapped.address + section.directory_at,
                    section.buckets,
                    mapped.address + section.rows_at,
                    section.entries,
                )
    views = tuple(
        PartView(
            address(sections[part]),
            len(levels),
            reference.shards,
            row_type(shape, reference.precision).itemsize,
        )
        for part, shape in enumerate(reference.parts)
    )
    return _MappedTable(levels, sections, views)


def _open_folder(folder: Path, wanted: Sequence[int] | None) -> Level:
    """Map the shards of one version's own files."""
    counts = {int(match[2]) for path in folder.glob("table-*.bin") if (match := _NAME.fullmatch(path.name))}
    if len(counts) != 1:
        found = " and ".join(f"of {count} shards" for count in sorted(counts)) or "no table"
        raise ArtifactError(f"{folder} has {found}; one table is expected. Fetch the version again.")
    (count,) = counts
    numbers = range(count) if wanted is None else sorted(set(wanted))
    if not numbers or not 0 <= numbers[0] <= numbers[-1] < count:
        raise ValueError(f"shards {list(numbers)} were requested; {folder} has 0 … {count - 1}")
    level = {shard: MappedShard(folder / shard_name(shard, count)) for shard in numbers}
    reference = level[numbers[0]]
    for shard, mapped in level.items():
        header = (mapped.shard, mapped.shards, mapped.parts, mapped.precision)
        if header != (shard, count, reference.parts, reference.precision):
            raise ArtifactError(
                f"{mapped.path} has shard {mapped.shard} of {_describe(mapped)}, expected shard {shard} of "
                f"{_describe(reference)}. Fetch the version again."
            )
    return level


def _describe(mapped: MappedShard) -> str:
    dims = ", ".join(f"{part.dim}{' + wide' if part.wide else ''}" for part in mapped.parts)
    return f"{mapped.shards} in {mapped.precision}, dims {dims or 'none'}"


def _check_batch(batch: GatherBatch) -> None:
    """Check the arrays here, because kernels do not; `to_jagged` checked the offsets."""
    plan, jagged, inputs_BI, wide_B, misses_S = batch
    rows = wide_B.size
    if inputs_BI.ndim != 2 or inputs_BI.shape[1] < plan.width:
        raise ValueError(f"inputs have shape {inputs_BI.shape}; at least {plan.width} columns are required")
    _check_array(inputs_BI, np.float32, (rows, inputs_BI.shape[1]))
    _check_array(wide_B, np.float32, (rows,))
    _check_array(misses_S, np.int64, (plan.slots,))
    if jagged.offsets_at_S.size != plan.slots:
        raise ValueError(f"got {jagged.offsets_at_S.size} slots, but the plan has {plan.slots}")
    multi_slots = int((jagged.offsets_at_S >= 0).sum())
    if jagged.offsets.size != multi_slots * (rows + 1):
        raise ValueError(f"got {jagged.offsets.size} offsets for {multi_slots} slots and {rows} rows")
    if multi_slots < plan.slots and ((np.diff(jagged.starts_S1) != rows) & (jagged.offsets_at_S < 0)).any():
        raise ValueError(f"slots with one id per row do not have {rows} ids: {np.diff(jagged.starts_S1)}")


def _check_array(array: NDArray[np.generic], kind: type[np.generic], shape: tuple[int, ...]) -> None:
    if array.dtype != kind or array.shape != shape or not array.flags.c_contiguous:
        raise ValueError(
            f"got an array of {array.dtype}, shape {array.shape}; expected a contiguous one of "
            f"{np.dtype(kind)}, shape {shape}"
        )
