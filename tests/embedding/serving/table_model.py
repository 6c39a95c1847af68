"""Serving tables as plain dicts, to compare files, chains and lookups with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from clickline.embedding.serving import PartShape, RowBlock, ServingTable, write_shards
from clickline.embedding.serving.packed_rows import mix_ids

Weights = tuple[float, tuple[float, ...]]  # wide and vector
Part = dict[int, Weights | None]  # None: a tombstone


def blocks_of(
    parts: Sequence[PartShape], content: Sequence[Mapping[int, Weights | None]], size: int = 7
) -> Iterator[RowBlock]:
    """The content in a table's order, in small blocks."""
    for part, (shape, rows) in enumerate(zip(parts, content, strict=True)):
        ids = np.array(list(rows), dtype=np.uint64)
        ids = ids[np.argsort(mix_ids(ids))]
        for first in range(0, ids.size, size):
            piece = ids[first : first + size]
            weights_N = [rows[int(id)] for id in piece]
            wide = np.array([0 if weights is None else weights[0] for weights in weights_N], dtype=np.float32)
            vector = np.array(
                [(0.0,) * shape.dim if weights is None else weights[1] for weights in weights_N],
                dtype=np.float32,
            ).reshape(piece.size, shape.dim)
            tombstone_N = np.array([weights is None for weights in weights_N])
            yield RowBlock(part, piece, wide if shape.wide else None, vector, tombstone_N)


def content_of(parts: Sequence[PartShape], blocks: Iterator[RowBlock]) -> list[Part]:
    """Blocks as dicts, with their order checked."""
    content: list[Part] = [{} for _ in parts]
    last = (-1, -1)
    for block in blocks:
        for n, id in enumerate(block.ids_N.tolist()):
            key = (block.part, int(mix_ids(block.ids_N[n : n + 1])[0]))
            assert key > last
            last = key
            wide = 0.0 if block.wide_N is None else float(block.wide_N[n])
            content[block.part][id] = (
                None if block.tombstone_N[n] else (wide, tuple(block.vector_ND[n].tolist()))
            )
    return content


def random_weights(rng: np.random.Generator, shape: PartShape) -> Weights:
    wide = float(np.float32(rng.normal())) if shape.wide else 0.0
    return wide, tuple(rng.normal(size=shape.dim).astype(np.float32).tolist())


def random_content(rng: np.random.Generator, parts: Sequence[PartShape], rows: int) -> list[Part]:
    return [
        {int(id): random_weights(rng, shape) for id in rng.integers(0, 2**64, rows, dtype=np.uint64)}
        for shape in parts
    ]


def packed_rows(tables: ServingTable, part: int, ids: Sequence[int]) -> list[bytes | None]:
    """The packed row that `find` returns for each id."""
    ids_N = np.array(ids, dtype=np.uint64)
    rows_NW = np.full((ids_N.size, tables.row_bytes(part)), 0xAA, dtype=np.uint8)
    found_N = np.empty(ids_N.size, dtype=np.bool_)
    count = tables.find(part, ids_N, rows_NW, found_N)
    assert count == found_N.sum()
    assert not rows_NW[~found_N].any()
    return [rows_NW[n].tobytes() if found_N[n] else None for n in range(ids_N.size)]


def fp32_row(shape: PartShape, weights: Weights) -> bytes:
    values = [weights[0], *weights[1]] if shape.wide else list(weights[1])
    payload = np.array(values, dtype="<f4").tobytes()
    return payload + bytes(-len(payload) % 8)


def write_content(
    folder: Path,
    parts: Sequence[PartShape],
    content: Sequence[Mapping[int, Weights | None]],
    shards: int = 1,
    precision: str = "fp32",
) -> Path:
    folder.mkdir(parents=True)
    write_shards(folder, parts, precision, shards, blocks_of(parts, content))  # type: ignore[arg-type]
    return folder
