"""Sample rows stored with a version, and the scores that its files gave them when it was published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clickline.artifacts.arrays import read_arrays
from clickline.errors import ArtifactError
from clickline.records import EncodedRows, SlotIds

SAMPLE = "sample.npz"


def write_sample(folder: Path, encoded: EncodedRows, probability_B: NDArray[np.float32]) -> None:
    arrays: dict[str, Any] = {"dense_DB": encoded.dense_DB, "probability_B": probability_B}
    for s, slot in enumerate(encoded.slots):
        arrays[f"ids_{s}"] = slot.ids_N
        if slot.offsets_B1 is not None:
            arrays[f"offsets_{s}"] = slot.offsets_B1
    np.savez(folder / SAMPLE, allow_pickle=False, **arrays)


def read_sample(folder: Path, slots: int) -> tuple[EncodedRows, NDArray[np.float32]]:
    path = folder / SAMPLE
    arrays = read_arrays(path)

    def array(name: str, kind: type[np.generic], dimensions: int = 1) -> NDArray[Any]:
        """An array with the type that kernels expect, since they do not check it."""
        stored = arrays.get(name)
        if stored is None or stored.dtype != kind or stored.ndim != dimensions:
            state = "missing" if stored is None else f"{stored.dtype} of shape {stored.shape}"
            raise ArtifactError(
                f"{path}: {name} is {state}; expected: {np.dtype(kind)} with {dimensions} dimension(s). Publish again."
            )
        return np.ascontiguousarray(stored)

    probability_B = array("probability_B", np.float32)
    ids = tuple(
        SlotIds(
            array(f"ids_{s}", np.uint64),
            array(f"offsets_{s}", np.int64) if f"offsets_{s}" in arrays else None,
        )
        for s in range(slots)
    )
    return EncodedRows(probability_B.size, array("dense_DB", np.float32, 2), ids), probability_B
