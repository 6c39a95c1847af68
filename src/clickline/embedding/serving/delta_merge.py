"""Merges several deltas into one overlay: rows are merged in order, the newest row of an id wins.

A lookup searches two levels, however long the chain is: the base, and an overlay with the rows of all deltas. The
overlay is an ordinary table with tombstones. In a `work` folder it is named by a hash of the deltas: processes that
open the same chain build it once and share its pages.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from clickline.embedding.index import mix
from clickline.embedding.raw_memory import address
from clickline.embedding.serving.file_format import FORMAT, MappedShard, PackedPiece, write_packed
from clickline.embedding.serving.packed_rows import ID_BYTES, row_type
from clickline.errors import ArtifactError
from clickline.kernel_intrinsics import Int, i64_at, u32_at, u64_at
from clickline.numba_cache import njit
from clickline.storage.atomic import fsync, temporary_name
from clickline.storage.file_lock import locked

Level = Mapping[int, MappedShard]
"""The open shards of one version's table, by number."""

_PIECE_ROWS = 1 << 14
_KEPT_OVERLAYS = 4  # overlays kept in a work folder; a mapped one stays mapped after its file is deleted


def merge_deltas(deltas: Sequence[Level], work: Path | None) -> Level:
    """Merge deltas, oldest first, into one level. Without a work folder its files are deleted once mapped."""
    if work is None:
        with tempfile.TemporaryDirectory(prefix="clickline-") as folder:
            _write(deltas, Path(folder))
            return _open(Path(folder), deltas[0])
    digest = hashlib.sha256(f"{FORMAT}".encode())
    for level in deltas:
        for shard, mapped in sorted(level.items()):
            digest.update(f" {shard}/{mapped.shards}:{mapped.content}".encode())
    target = work / f"overlay-{digest.hexdigest()[:32]}"
    with locked(work / ".lock"):
        if target.is_dir():
            target.touch()
            try:
                return _open(target, deltas[0])
            except ArtifactError:  # damaged since: rebuild it
                shutil.rmtree(target)
        for stale in work.glob(".overlay-*"):  # left by a killed process: we hold the lock
            shutil.rmtree(stale, ignore_errors=True)
        hidden = work / temporary_name(target.name)
        hidden.mkdir()
        try:
            _write(deltas, hidden)
            for path in (*hidden.iterdir(), hidden):  # or a power cut could leave the final name on bad bytes
                fsync(path)
            hidden.rename(target)
        finally:
            shutil.rmtree(hidden, ignore_errors=True)
        # Never the one just built, which is not the newest if the clock went back.
        others = [path for path in work.glob("overlay-*") if path != target]
        for old in sorted(others, key=lambda path: path.stat().st_mtime_ns)[: 1 - _KEPT_OVERLAYS]:
            shutil.rmtree(old, ignore_errors=True)
        return _open(target, deltas[0])


def merge(levels: Sequence[Level], *, keep_tombstones: bool) -> Iterator[PackedPiece]:
    """The rows of several levels, oldest first, each id once: part after part, shard after shard. A piece is valid
    until the next one is requested."""
    first = next(iter(levels[0].values()))
    for part, shape in enumerate(first.parts):
        kind = row_type(shape, first.precision)
        buffer_N = np.empty(_PIECE_ROWS, dtype=kind)
        for shard in sorted(levels[0]):
            rows = [level[shard].rows(part) for level in levels]
            sources_K = np.array([address(packed_N) for packed_N in rows], dtype=np.int64)
            ends_K = np.array([packed_N.size for packed_N in rows], dtype=np.int64)
            at_K = np.zeros(len(rows), dtype=np.int64)
            while count := _merge_rows(
                sources_K, at_K, ends_K, kind.itemsize, keep_tombstones, address(buffer_N), _PIECE_ROWS
            ):
                yield PackedPiece(part, shard, buffer_N[:count])


def _write(deltas: Sequence[Level], folder: Path) -> None:
    reference = next(iter(deltas[0].values()))
    pieces = merge(deltas, keep_tombstones=True)
    write_packed(folder, reference.parts, reference.precision, reference.shards, sorted(deltas[0]), pieces)


def _open(folder: Path, reference: Level) -> Level:
    return {shard: MappedShard(folder / mapped.path.name) for shard, mapped in reference.items()}


@njit(cache=True, nogil=True)
def _merge_rows(
    sources_K: NDArray[np.int64],
    at_K: NDArray[np.int64],
    ends_K: NDArray[np.int64],
    stride: Int,
    keep_tombstones: bool,
    target: Int,
    capacity: Int,
) -> Int:
    """Copy rows in order, for each id from the last source that has it; continues from `at_K`. Returns the count."""
    written = 0
    while written < capacity:
        winner = -1
        lowest = np.uint64(0)
        for k in range(sources_K.size):
            if at_K[k] < ends_K[k]:
                mixed = mix(u64_at(sources_K[k] + at_K[k] * stride)[0])
                if winner < 0 or mixed <= lowest:
                    winner, lowest = k, mixed
        if winner < 0:
            break
        row = sources_K[winner] + at_K[winner] * stride
        for k in range(winner + 1):
            if at_K[k] < ends_K[k] and mix(u64_at(sources_K[k] + at_K[k] * stride)[0]) == lowest:
                at_K[k] += 1
        if keep_tombstones or u32_at(row + ID_BYTES)[0] != np.uint32(0xFFFFFFFF):
            for word in range(stride // 8):
                i64_at(target + written * stride)[word] = i64_at(row)[word]
            written += 1
    return written
