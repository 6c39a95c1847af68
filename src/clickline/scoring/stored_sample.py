"""Rows that travel with a version, and the scores its files gave them when it was published."""

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
        """Kernels take it as it is, so it must be what they take."""
        found = arrays.get(name)
        if found is None or found.dtype != kind or found.ndim != dimensions:
            state = "absent" if found is None else f"{found.dtype} of shape {found.shape}"
            raise ArtifactError(
                f"{path}: {name} is {state}; {np.dtype(kind)} of {dimensions} dimension(s) is expected. Publish again."
            )
        return np.ascontiguousarray(found)

    probability_B = array("probability_B", np.float32)
    ids = tuple(
        SlotIds(
            array(f"ids_{s}", np.uint64),
            array(f"offsets_{s}", np.int64) if f"offsets_{s}" in arrays else None,
        )
        for s in range(slots)
    )
    return EncodedRows(probability_B.size, array("dense_DB", np.float32, 2), ids), probability_B
