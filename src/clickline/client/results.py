"""What a client gets back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Prediction:
    """The scores of some rows, in their order."""

    version: int | None  # that gave them; None where the server does not tell
    probability: NDArray[np.float32]  # of a click
    logits: NDArray[np.float32] | None  # None where the protocol does not carry them


@dataclass(frozen=True)
class Ranking:
    """The scores of candidates: of all as they were sent, or of the best `top_k`, best first."""

    version: int | None
    scores: NDArray[np.float32]
    indices: NDArray[np.int64]  # which candidate each score belongs to, from 0


@dataclass(frozen=True)
class TensorInfo:
    """A field that the model takes, or an output that it gives."""

    datatype: str  # FP32, BYTES, INT64, …
    shape: tuple[int, ...]  # -1: any size; the first is the rows


@dataclass(frozen=True)
class ModelInfo:
    """What the server says of its model."""

    name: str
    versions: tuple[int, ...]
    inputs: Mapping[str, TensorInfo]
    outputs: Mapping[str, TensorInfo]
