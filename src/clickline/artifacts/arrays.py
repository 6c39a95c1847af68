"""Reads the plain arrays of an .npz file that we wrote: uncompressed, and without Python objects."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from clickline.errors import ArtifactError


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """All arrays by name. Their declared sizes must fit in the file, so memory is bounded by its size."""
    try:
        with zipfile.ZipFile(path) as members:
            _check_sizes(members, path.stat().st_size)
        with np.load(path, allow_pickle=False) as arrays:
            return dict(arrays)
    except (OSError, ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile) as error:
        raise ArtifactError(f"{path} cannot be read: {error}. Create it again.") from error


def with_prefix(prefix: str, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """The arrays whose names begin with `prefix`, without it."""
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def _check_sizes(members: zipfile.ZipFile, size: int) -> None:
    """Refuse a compressed archive, and arrays larger than the bytes that store them."""
    if sum(member.file_size for member in members.infolist()) > size:
        raise ValueError("its arrays are larger than the file")
    for member in members.infolist():
        with members.open(member) as file:
            version = npy.read_magic(file)
            read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
            shape, _, dtype = read_header(file)
            if math.prod(shape) * dtype.itemsize > member.file_size:
                raise ValueError(f"{member.filename} declares the shape {shape}, but is too small for it")
