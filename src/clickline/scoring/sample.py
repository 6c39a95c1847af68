"""Rows that travel with a version, and the scores its files gave them when it was published."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clickline.errors import ArtifactError
from clickline.records import EncodedRows, SlotIds

__all__ = ["SAMPLE", "read_sample", "write_sample"]

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
    try:
        with np.load(path, allow_pickle=False) as arrays:
            dense_DB, probability_B = arrays["dense_DB"], arrays["probability_B"]
            ids = tuple(SlotIds(arrays[f"ids_{s}"], arrays.get(f"offsets_{s}")) for s in range(slots))
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise ArtifactError(f"{path} cannot be read: {error}. Publish again.") from error
    return EncodedRows(probability_B.size, dense_DB, ids), probability_B
