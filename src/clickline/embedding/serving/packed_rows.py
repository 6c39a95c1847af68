"""One row of a frozen table: what it holds, and how it is packed.

    id 8 │ wide f32, if the part has one · scale f32, with int8 · vector · zeros up to a multiple of 8

Rows stand in the order of `mix(id)`, as in a snapshot. Each shard holds one range of it: shard i of n has
the ids whose `mix(id) · n >> 64` is i.

A tombstone is a row whose bytes after the id are all 0xFF: NaN where a weight would stand, and no weight is
NaN. Packing what was unpacked gives the same bytes, so a chain of deltas can be made into a new base without
changing a score: that is why the scale of int8 has 16 significant bits, so that 127 · scale is exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from clickline.embedding.index import GOLDEN
from clickline.errors import ArtifactError

Precision = Literal["fp32", "fp16", "int8"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)

ID_BYTES = 8
_LARGEST_HALF = 65504.0
_LARGEST_INT8 = np.float32(127)
_ALL_ZERO = np.float32(1e-30)  # int8 rows below it become zeros: a scale must not lose bits
_LARGEST = np.float32(1e38)


@dataclass(frozen=True)
class PartShape:
    """The rows of all slots of one dim."""

    dim: int
    wide: bool


@dataclass(frozen=True)
class RowBlock:
    """Some rows of one part, rising in `mix(id)`. A row that is `gone` is a tombstone: its weights say nothing."""

    part: int
    ids_N: NDArray[np.uint64]
    wide_N: NDArray[np.float32] | None  # None where the part has no wide weights
    vector_ND: NDArray[np.float32]
    gone_N: NDArray[np.bool_]

    def select(self, keep_N: NDArray[np.bool_]) -> RowBlock:
        """The rows that are marked."""
        wide_N = None if self.wide_N is None else self.wide_N[keep_N]
        return RowBlock(self.part, self.ids_N[keep_N], wide_N, self.vector_ND[keep_N], self.gone_N[keep_N])


def mixed(ids_N: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """What rows are ordered by."""
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
    """Bytes of a packed row without its id: what a lookup server sends."""
    return row_type(shape, precision).itemsize - ID_BYTES


def pack(block: RowBlock, shape: PartShape, precision: Precision) -> NDArray[np.void]:
    """The block as records of `row_type`."""
    _check(block, shape)
    packed_N = np.zeros(block.ids_N.size, dtype=row_type(shape, precision))
    packed_N["id"] = block.ids_N
    if block.wide_N is not None:
        packed_N["wide"] = block.wide_N
    vector_ND = block.vector_ND
    if block.gone_N.any():
        vector_ND = np.where(block.gone_N[:, None], np.float32(0), vector_ND)
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
    _payload(packed_N)[block.gone_N] = 0xFF
    return packed_N


def is_gone(packed_N: NDArray[np.void]) -> NDArray[np.bool_]:
    """Which records are tombstones."""
    marks_N4 = _payload(packed_N)[:, :4]
    return np.asarray((marks_N4 == 0xFF).all(axis=1))


def unpack(part: int, packed_N: NDArray[np.void]) -> RowBlock:
    """Records as a block; the weights of tombstones are 0."""
    names = packed_N.dtype.names or ()
    gone_N = is_gone(packed_N)
    with np.errstate(invalid="ignore"):  # the NaN of tombstones
        vector_ND = packed_N["vector"].astype(np.float32)
        if "scale" in names:
            vector_ND *= packed_N["scale"][:, None]
    vector_ND[gone_N] = 0
    wide_N = None
    if "wide" in names:
        wide_N = packed_N["wide"].astype(np.float32)
        wide_N[gone_N] = 0
    return RowBlock(part, packed_N["id"].astype(np.uint64), wide_N, vector_ND, gone_N)


def _payload(packed_N: NDArray[np.void]) -> NDArray[np.uint8]:
    """The bytes of each record after its id."""
    return packed_N.view(np.uint8).reshape(packed_N.size, packed_N.dtype.itemsize)[:, ID_BYTES:]


def _scales(vector_ND: NDArray[np.float32]) -> NDArray[np.float32]:
    largest_N = np.minimum(np.abs(vector_ND).max(axis=1), _LARGEST)
    scale_N = (largest_N / _LARGEST_INT8).astype(np.float32)
    bits_N = (scale_N.view(np.uint32) + np.uint32(0xFF)) & np.uint32(0xFFFFFF00)  # up: none beyond ±127
    return np.where(largest_N < _ALL_ZERO, np.float32(0), bits_N.view(np.float32))


def _check(block: RowBlock, shape: PartShape) -> None:
    rows = block.ids_N.size
    fits = block.vector_ND.shape == (rows, shape.dim) and block.gone_N.shape == (rows,)
    wide_fits = block.wide_N.shape == (rows,) if block.wide_N is not None else not shape.wide
    if not (fits and wide_fits and (shape.wide or block.wide_N is None)):
        raise ValueError(f"rows of part {block.part} do not have the shape {shape}: {block}")
    finite_N = np.isfinite(block.vector_ND).all(axis=1)
    if block.wide_N is not None:
        finite_N &= np.isfinite(block.wide_N)
    finite_N |= block.gone_N
    if not finite_N.all():
        raise ArtifactError(
            f"the row of id {block.ids_N[~finite_N][0]} holds a weight that is not a finite number. "
            "The model has diverged: train it again, with a lower learning rate."
        )
