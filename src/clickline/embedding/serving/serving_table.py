"""A version's sparse table: its base and its deltas, mapped and looked up as one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from clickline.embedding.jagged_ids import Bags
from clickline.embedding.raw_memory import address
from clickline.embedding.serving.delta_merge import Level, merge_deltas
from clickline.embedding.serving.file_format import MappedShard, shard_name
from clickline.embedding.serving.lookup_kernels import (
    SECTION_WORDS,
    GatherPlan,
    PartView,
    copy_rows,
    gather_slots,
    pool_slots,
    row_places,
)
from clickline.embedding.serving.packed_rows import PartShape, Precision, is_gone, row_bytes, row_type
from clickline.errors import ArtifactError

_NAME = re.compile(r"table-(\d{5})-of-(\d{5})\.bin")
_NOTHING = np.zeros(2, dtype=np.uint32)  # the directory of a shard that is not open: one bucket without rows
_COUNT_ROWS = 1 << 14


@dataclass(frozen=True)
class _Opened:
    """What kernels read. Whoever uses it holds it: memory that is read is never unmapped."""

    levels: tuple[Level, ...]  # newest first
    sections: NDArray[np.int64]  # part, level, shard, word
    views: tuple[PartView, ...]


class FrozenTables:
    """Mapped tables. Any thread may read them; the pages are shared with all processes that map the same files."""

    def __init__(self, base: Level, overlay: Level | None) -> None:
        like = next(iter(base.values()))
        self.parts: tuple[PartShape, ...] = like.parts
        self.precision: Precision = like.precision
        self.shards = like.shards
        self.open_shards = tuple(sorted(base))
        self._places = tuple(row_places(shape, self.precision) for shape in self.parts)
        self._row_bytes = tuple(row_bytes(shape, self.precision) for shape in self.parts)
        self._opened: _Opened | None = _view((base,) if overlay is None else (overlay, base))

    @classmethod
    def open(
        cls, folders: Sequence[Path], *, shards: Sequence[int] | None = None, work: Path | None = None
    ) -> FrozenTables:
        """Map a base and its deltas, in order; all shards, or the named ones. Two or more deltas are merged: into
        files in `work` that other processes find again, or without one into a nameless place."""
        if not folders:
            raise ValueError("no folder of a table was given: the base comes first, then its deltas")
        levels = [_open_folder(folder, shards) for folder in folders]
        like = next(iter(levels[0].values()))
        for folder, level in zip(folders, levels, strict=True):
            mine = next(iter(level.values()))
            if (mine.parts, mine.precision, mine.shards) != (like.parts, like.precision, like.shards):
                raise ArtifactError(
                    f"{folder} holds {_describe(mine)}, its base {_describe(like)}. Publish a new base."
                )
        base, deltas = levels[0], levels[1:]
        if len(deltas) > 1:
            return cls(base, merge_deltas(deltas, work))
        return cls(base, deltas[0] if deltas else None)

    # ── lookups ────────────────────────────────────────────────────────────────────────────────

    def gather(
        self,
        plan: GatherPlan,
        bags: Bags,
        rows: int,
        inputs_BI: NDArray[np.float32],
        wide_B: NDArray[np.float32],
        misses_S: NDArray[np.int64],
    ) -> None:
        """Pool the vectors of a batch into the slots' columns of `inputs_BI`, and set `wide_B` to the sums of wide
        weights. An id that is not there has its slot's default row, and counts in `misses_S`."""
        opened = self._held()
        _check_batch(plan, bags, rows, inputs_BI, wide_B, misses_S)
        wide_B[:] = 0
        for part, slots in plan.by_part:
            gather_slots(
                opened.views[part], self._places[part], slots, bags, rows, inputs_BI, wide_B, misses_S
            )

    def find(
        self,
        part: int,
        ids_N: NDArray[np.uint64],
        rows_NW: NDArray[np.uint8],
        found_N: NDArray[np.bool_],
    ) -> int:
        """Copy packed rows, without their ids, into the caller's buffer: `row_bytes` each, zeros where an id is not
        there. How many were found."""
        opened = self._held()
        count, width = ids_N.size, self.row_bytes(part)
        for array, kind, shape in (
            (ids_N, np.uint64, (count,)),
            (rows_NW, np.uint8, (count, width)),
            (found_N, np.bool_, (count,)),
        ):
            _check_array(array, kind, shape)
        return int(copy_rows(opened.views[part], address(ids_N), address(rows_NW), found_N))

    def row_bytes(self, part: int) -> int:
        """Bytes of a packed row of `find`."""
        return self._row_bytes[part]

    # ── what is there ──────────────────────────────────────────────────────────────────────────

    @property
    def levels(self) -> tuple[Level, ...]:
        """What is mapped, oldest first."""
        return self._held().levels[::-1]

    @property
    def rows(self) -> int:
        """How many ids have a row. With deltas, those of the overlay are looked up in the base to know."""
        opened = self._held()
        *above, base = opened.levels
        total = sum(section.rows for mapped in base.values() for section in mapped.sections)
        for part, view in enumerate(opened.views):
            below = view._replace(sections=view.sections + opened.sections.strides[1] * len(above), levels=1)
            rows_NW = np.empty((_COUNT_ROWS, self.row_bytes(part)), dtype=np.uint8)
            found_N = np.empty(_COUNT_ROWS, dtype=np.bool_)
            for mapped in (mapped for level in above for mapped in level.values()):
                packed_N = mapped.rows(part)
                for first in range(0, packed_N.size, _COUNT_ROWS):
                    piece_N = packed_N[first : first + _COUNT_ROWS]
                    ids_N = piece_N["id"].astype(np.uint64)
                    in_base = copy_rows(below, address(ids_N), address(rows_NW), found_N[: ids_N.size])
                    total += int((~is_gone(piece_N)).sum()) - int(in_base)
        return total

    def close(self) -> None:
        """Let the memory go, once no lookup uses it any more."""
        self._opened = None

    def __enter__(self) -> FrozenTables:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _held(self) -> _Opened:
        opened = self._opened
        if opened is None:
            raise ValueError("these tables were closed")
        return opened


def pool(
    parts: Sequence[PartShape],
    precision: Precision,
    plan: GatherPlan,
    bags: Bags,
    rows: int,
    place_N: NDArray[np.int64],
    inputs_BI: NDArray[np.float32],
    wide_B: NDArray[np.float32],
    misses_S: NDArray[np.int64],
) -> None:
    """`FrozenTables.gather` for rows that a caller got elsewhere, as `find` packs them: `place_N` has the address of
    each id's row, 0 where there is none. The caller keeps the rows alive."""
    _check_batch(plan, bags, rows, inputs_BI, wide_B, misses_S)
    _check_array(place_N, np.int64, (bags.ids_N.size,))
    wide_B[:] = 0
    for part, slots in plan.by_part:
        places = row_places(parts[part], precision)
        pool_slots(places, slots, bags, 0, rows, place_N, inputs_BI, wide_B, misses_S)


def _view(levels: tuple[Level, ...]) -> _Opened:
    like = next(iter(levels[0].values()))
    sections = np.empty((len(like.parts), len(levels), like.shards, SECTION_WORDS), dtype=np.int64)
    sections[:] = address(_NOTHING), 1, 0, 0
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
        PartView(address(sections[part]), len(levels), like.shards, row_type(shape, like.precision).itemsize)
        for part, shape in enumerate(like.parts)
    )
    return _Opened(levels, sections, views)


def _open_folder(folder: Path, wanted: Sequence[int] | None) -> Level:
    """The shards of one version's own files."""
    counts = {int(match[2]) for path in folder.glob("table-*.bin") if (match := _NAME.fullmatch(path.name))}
    if len(counts) != 1:
        found = " and ".join(f"of {count} shards" for count in sorted(counts)) or "no table"
        raise ArtifactError(f"{folder} holds {found}; one table is expected. Fetch the version again.")
    (count,) = counts
    numbers = range(count) if wanted is None else sorted(set(wanted))
    if not numbers or not 0 <= numbers[0] <= numbers[-1] < count:
        raise ValueError(f"shards {list(numbers)} were asked for; {folder} has 0 … {count - 1}")
    level = {shard: MappedShard(folder / shard_name(shard, count)) for shard in numbers}
    like = level[numbers[0]]
    for shard, mapped in level.items():
        told = (mapped.shard, mapped.shards, mapped.parts, mapped.precision)
        if told != (shard, count, like.parts, like.precision):
            raise ArtifactError(
                f"{mapped.path} holds shard {mapped.shard} of {_describe(mapped)}; expected is shard {shard} of "
                f"{_describe(like)}. Fetch the version again."
            )
    return level


def _describe(mapped: MappedShard) -> str:
    dims = ", ".join(f"{part.dim}{' + wide' if part.wide else ''}" for part in mapped.parts)
    return f"{mapped.shards} in {mapped.precision}, dims {dims or 'none'}"


def _check_batch(
    plan: GatherPlan,
    bags: Bags,
    rows: int,
    inputs_BI: NDArray[np.float32],
    wide_B: NDArray[np.float32],
    misses_S: NDArray[np.int64],
) -> None:
    """Kernels trust their arrays, so these are checked here; `bags_of` checked the offsets."""
    if inputs_BI.ndim != 2 or inputs_BI.shape[1] < plan.width:
        raise ValueError(f"inputs have shape {inputs_BI.shape}; at least {plan.width} columns are needed")
    _check_array(inputs_BI, np.float32, (rows, inputs_BI.shape[1]))
    _check_array(wide_B, np.float32, (rows,))
    _check_array(misses_S, np.int64, (plan.slots,))
    if bags.offsets_at_S.size != plan.slots:
        raise ValueError(f"{bags.offsets_at_S.size} slots given, {plan.slots} planned")
    several = int((bags.offsets_at_S >= 0).sum())
    if bags.offsets.size != several * (rows + 1):
        raise ValueError(f"{bags.offsets.size} offsets given for {several} slots and {rows} rows")
    if several < plan.slots and ((np.diff(bags.starts_S1) != rows) & (bags.offsets_at_S < 0)).any():
        raise ValueError(f"slots of one id a row do not have {rows} ids: {np.diff(bags.starts_S1)}")


def _check_array(array: NDArray[np.generic], kind: type[np.generic], shape: tuple[int, ...]) -> None:
    if array.dtype != kind or array.shape != shape or not array.flags.c_contiguous:
        raise ValueError(
            f"an array of {array.dtype}, shape {array.shape}, was given; expected is a contiguous one of "
            f"{np.dtype(kind)}, shape {shape}"
        )
