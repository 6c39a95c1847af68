"""The packed rows of a serving table.

    id 8 │ wide f32, if the part has one · scale f32, with int8 · vector · zeros up to a multiple of 8

Rows are sorted by `mix(id)`, as in a snapshot. Each shard holds one range of it: shard i of n has the ids whose
`mix(id) · n >> 64` is i.

A tombstone is a row whose bytes after the id are all 0xFF: NaN in place of a weight, and no weight is NaN. Packing
unpacked rows gives the same bytes, so a chain of deltas can be compacted into a new base without changing a score:
that is why the scale of int8 has only 16 significant bits, so that 127 · scale is exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from clickline.embedding.index import GOLDEN
from clickline.errors import ArtifactError
from clickline.records import PartShape, Precision

PRECISIONS: tuple[Precision, ...] = get_args(Precision)

ID_BYTES = 8
_LARGEST_HALF = 65504.0
_LARGEST_INT8 = np.float32(127)
_ALL_ZERO = np.float32(1e-30)  # smaller int8 rows become zeros: a scale must not lose bits
_LARGEST = np.float32(1e38)


@dataclass(frozen=True)
class RowBlock:
    """Some rows of one part, ascending in `mix(id)`. The weights of tombstones have no meaning."""

    part: int
    ids_N: NDArray[np.uint64]
    wide_N: NDArray[np.float32] | None  # None if the part has no wide weights
    vector_ND: NDArray[np.float32]
    tombstone_N: NDArray[np.bool_]

    def select(self, keep_N: NDArray[np.bool_]) -> RowBlock:
        """The rows with `keep_N` set."""
        wide_N = None if self.wide_N is None else self.wide_N[keep_N]
        return RowBlock(
            self.part, self.ids_N[keep_N], wide_N, self.vector_ND[keep_N], self.tombstone_N[keep_N]
        )


def mix_ids(ids_N: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The sort key of rows: `index.mix` for an array of ids."""
    return ids_N * GOLDEN


def shard_bounds(shards: int) -> NDArray[np.uint64]:
    """The smallest `mix(id)` of each shard but the first."""
    return np.array([-(-(shard << 64) // shards) for shard in range(1, shards)], dtype=np.uint64)


def row_type(shape: PartShape, precision: Precision) -> np.dtype[Any]:
    """A packed row as a NumPy record."""
    fields: list[tuple[str, Any]] = [("id", np.dtype("<u8"))]
    if shape.wide:
        fields.append(("wide", np.dtype("<f4")))
    if precision == "int8":
        fields.append(("scale", np.dtype("<f4")))
    element = {"fp32": "<f4", "fp16": "<f2", "int8": "i1"}[precision]
    fields.append(("vector", np.dtype((element, (shape.dim,)))))
    sizes = [kind.itemsize for _, kind in fields]
    return np.dtype(
        {
            "names": [name for name, _ in fields],
            "formats": [kind for _, kind in fields],
            "offsets": [sum(sizes[:n]) for n in range(len(sizes))],
            "itemsize": -(-sum(sizes) // 8) * 8,
        }
    )


def row_bytes(shape: PartShape, precision: Precision) -> int:
    """Bytes of a packed row without its id, as sent by lookup servers."""
    return row_type(shape, precision).itemsize - ID_BYTES


def pack(block: RowBlock, shape: PartShape, precision: Precision) -> NDArray[np.void]:
    """The block as records of `row_type`."""
    _check(block, shape)
    packed_N = np.zeros(block.ids_N.size, dtype=row_type(shape, precision))
    packed_N["id"] = block.ids_N
    if block.wide_N is not None:
        packed_N["wide"] = block.wide_N
    vector_ND = block.vector_ND
    if block.tombstone_N.any():
        vector_ND = np.where(block.tombstone_N[:, None], np.float32(0), vector_ND)
    if precision == "int8":
        scale_N = _scales(vector_ND)
        divisor_N = np.where(scale_N > 0, scale_N, np.float32(np.inf))
        packed_N["scale"] = scale_N
        levels_ND = np.rint(vector_ND / divisor_N[:, None])
        packed_N["vector"] = np.clip(levels_ND, -_LARGEST_INT8, _LARGEST_INT8)
    elif precision == "fp16":
        packed_N["vector"] = np.clip(vector_ND, -_LARGEST_HALF, _LARGEST_HALF)
    else:
        packed_N["vector"] = vector_ND
    _payload(packed_N)[block.tombstone_N] = 0xFF
    return packed_N


def is_tombstone(packed_N: NDArray[np.void]) -> NDArray[np.bool_]:
    """Which records are tombstones."""
    head_N4 = _payload(packed_N)[:, :4]
    return np.asarray((head_N4 == 0xFF).all(axis=1))


def unpack(part: int, packed_N: NDArray[np.void]) -> RowBlock:
    """Records as a block; the weights of tombstones are 0."""
    names = packed_N.dtype.names or ()
    tombstone_N = is_tombstone(packed_N)
    with np.errstate(invalid="ignore"):  # the NaN of tombstones
        vector_ND = packed_N["vector"].astype(np.float32)
        if "scale" in names:
            vector_ND *= packed_N["scale"][:, None]
    vector_ND[tombstone_N] = 0
    wide_N = None
    if "wide" in names:
        wide_N = packed_N["wide"].astype(np.float32)
        wide_N[tombstone_N] = 0
    return RowBlock(part, packed_N["id"].astype(np.uint64), wide_N, vector_ND, tombstone_N)


def _payload(packed_N: NDArray[np.void]) -> NDArray[np.uint8]:
    """The bytes of each record after its id."""
    return packed_N.view(np.uint8).reshape(packed_N.size, packed_N.dtype.itemsize)[:, ID_BYTES:]


def _scales(vector_ND: NDArray[np.float32]) -> NDArray[np.float32]:
    largest_N = np.minimum(np.abs(vector_ND).max(axis=1), _LARGEST)
    scale_N = (largest_N / _LARGEST_INT8).astype(np.float32)
    bits_N = (scale_N.view(np.uint32) + np.uint32(0xFF)) & np.uint32(
        0xFFFFFF00
    )  # rounded up: none beyond ±127
    return np.where(largest_N < _ALL_ZERO, np.float32(0), bits_N.view(np.float32))


def _check(block: RowBlock, shape: PartShape) -> None:
    rows = block.ids_N.size
    fits = block.vector_ND.shape == (rows, shape.dim) and block.tombstone_N.shape == (rows,)
    wide_fits = block.wide_N.shape == (rows,) if block.wide_N is not None else not shape.wide
    if not (fits and wide_fits and (shape.wide or block.wide_N is None)):
        raise ValueError(f"rows of part {block.part} do not match the shape {shape}: {block}")
    finite_N = np.isfinite(block.vector_ND).all(axis=1)
    if block.wide_N is not None:
        finite_N &= np.isfinite(block.wide_N)
    finite_N |= block.tombstone_N
    if not finite_N.all():
        raise ArtifactError(
            f"the row of id {block.ids_N[~finite_N][0]} has a weight that is not finite. "
            "The model has diverged: train it again with a lower learning rate."
        )
