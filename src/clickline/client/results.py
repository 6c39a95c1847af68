"""The results of a client's requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Prediction:
    """The scores of some rows, in their order."""

    version: int | None  # that computed them; None if the server does not report it
    probability: NDArray[np.float32]  # of a click
    logits: NDArray[np.float32] | None  # None if the protocol does not have them


@dataclass(frozen=True)
class Ranking:
    """The scores of all candidates in the order sent, or of the best `top_k`, best first."""

    version: int | None
    scores: NDArray[np.float32]
    indices: NDArray[np.int64]  # which candidate each score belongs to, from 0


@dataclass(frozen=True)
class TensorInfo:
    """An input or output of the model."""

    datatype: str  # FP32, BYTES, INT64, …
    shape: tuple[int, ...]  # -1: any size; the first dimension is the rows


@dataclass(frozen=True)
class ModelInfo:
    """The model metadata that the server reports."""

    name: str
    versions: tuple[int, ...]
    inputs: Mapping[str, TensorInfo]
    outputs: Mapping[str, TensorInfo]
