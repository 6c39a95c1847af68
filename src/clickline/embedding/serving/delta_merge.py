"""Many deltas as one: rows of several files merged in order, the newest row of an id wins.

A lookup asks two levels, however long the chain is: the base, and above it one table that holds what all deltas say.
That table is an ordinary one, tombstones included. In a `work` folder it is named after the content of the deltas:
processes that open the same chain make it once and share its pages.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numba import njit
from numpy.typing import NDArray

from clickline.embedding.index import mix
from clickline.embedding.raw_memory import Whole, address, i64_at, u32_at, u64_at
from clickline.embedding.serving.file_format import FORMAT, MappedShard, Piece, write_packed
from clickline.embedding.serving.packed_rows import ID_BYTES, row_type
from clickline.errors import ArtifactError
from clickline.storage.atomic import hidden_name, sync

Level = Mapping[int, MappedShard]
"""The shards of one version's table that are open, by number."""

_PIECE_ROWS = 1 << 14
_KEPT = 4  # overlays in a work folder; one that is mapped stays so when its name is gone


def merge_deltas(deltas: Sequence[Level], work: Path | None) -> Level:
    """Deltas, oldest first, as one level. Without a work folder it has no name and goes with the process."""
    if work is None:
        with tempfile.TemporaryDirectory(prefix="clickline-") as folder:
            _write(deltas, Path(folder))
            return _open(Path(folder), deltas[0])
    named = hashlib.sha256(f"{FORMAT}".encode())
    for level in deltas:
        for shard, mapped in sorted(level.items()):
            named.update(f" {shard}/{mapped.shards}:{mapped.content}".encode())
    target = work / f"overlay-{named.hexdigest()[:32]}"
    with _alone_in(work):
        if target.is_dir():
            target.touch()
            try:
                return _open(target, deltas[0])
            except ArtifactError:  # damaged since: it can always be made again
                shutil.rmtree(target)
        for left in work.glob(".overlay-*"):  # by a process that was killed: we are alone here
            shutil.rmtree(left, ignore_errors=True)
        hidden = work / hidden_name(target.name)
        hidden.mkdir()
        try:
            _write(deltas, hidden)
            for path in (*hidden.iterdir(), hidden):  # or a power cut might leave a good name on bad bytes
                sync(path)
            hidden.rename(target)
        finally:
            shutil.rmtree(hidden, ignore_errors=True)
        # Never the one just made, which is not the newest where the clock went back.
        others = [path for path in work.glob("overlay-*") if path != target]
        for old in sorted(others, key=lambda path: path.stat().st_mtime_ns)[: 1 - _KEPT]:
            shutil.rmtree(old, ignore_errors=True)
        return _open(target, deltas[0])


def merge(levels: Sequence[Level], *, keep_gone: bool) -> Iterator[Piece]:
    """The rows of several levels, oldest first, each id once: part after part, shard after shard. A piece is good
    until the next is asked for."""
    first = next(iter(levels[0].values()))
    for part, shape in enumerate(first.parts):
        kind = row_type(shape, first.precision)
        room_N = np.empty(_PIECE_ROWS, dtype=kind)
        for shard in sorted(levels[0]):
            rows = [level[shard].rows(part) for level in levels]
            sources_K = np.array([address(packed_N) for packed_N in rows], dtype=np.int64)
            ends_K = np.array([packed_N.size for packed_N in rows], dtype=np.int64)
            at_K = np.zeros(len(rows), dtype=np.int64)
            while count := _merge_rows(
                sources_K, at_K, ends_K, kind.itemsize, keep_gone, address(room_N), _PIECE_ROWS
            ):
                yield Piece(part, shard, room_N[:count])


def _write(deltas: Sequence[Level], folder: Path) -> None:
    like = next(iter(deltas[0].values()))
    pieces = merge(deltas, keep_gone=True)
    write_packed(folder, like.parts, like.precision, like.shards, sorted(deltas[0]), pieces)


def _open(folder: Path, like: Level) -> Level:
    return {shard: MappedShard(folder / mapped.path.name) for shard, mapped in like.items()}


@contextmanager
def _alone_in(work: Path) -> Iterator[None]:
    work.mkdir(parents=True, exist_ok=True)
    with (work / ".lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # goes with the process, however it ends
        yield


@njit(cache=True, nogil=True)
def _merge_rows(
    sources_K: NDArray[np.int64],
    at_K: NDArray[np.int64],
    ends_K: NDArray[np.int64],
    stride: Whole,
    keep_gone: bool,
    target: Whole,
    room: Whole,
) -> Whole:
    """Copy rows in order, of each id the one of the last source that has it; how many. Goes on from `at_K`."""
    written = 0
    while written < room:
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
        if keep_gone or u32_at(row + ID_BYTES)[0] != np.uint32(0xFFFFFFFF):
            for word in range(stride // 8):
                i64_at(target + written * stride)[word] = i64_at(row)[word]
            written += 1
    return written
