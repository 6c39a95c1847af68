"""Row optimizers: five of them, each a dataclass with its settings and a small kernel.

A kernel gets pointers to the weights, the row's optimizer state and the summed gradient. It computes in
float32 with exactly the operations written here, so the same gradients give the same bits.
Kernels loop over `dim` components; a wide weight is a row of one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from clickline.kernel_intrinsics import Int
from clickline.numba_cache import njit

_SGD, _ADAGRAD, _ROWWISE, _ADAM, _FTRL = range(5)


class RowOptimizer:
    """Settings of one optimizer; the fields, in order, are the kernel's `settings` array."""

    kind: ClassVar[int]
    name: ClassVar[str]
    state_per_weight: ClassVar[int] = 0
    state_per_row: ClassVar[int] = 0

    def state_size(self, dim: int) -> int:
        """Number of state floats for a row of `dim` weights."""
        return self.state_per_weight * dim + self.state_per_row

    def settings(self) -> NDArray[np.float32]:
        return np.array(astuple(self), dtype=np.float32)  # type: ignore[call-overload]


@dataclass(frozen=True)
class Sgd(RowOptimizer):
    """w -= lr·g"""

    kind: ClassVar[int] = _SGD
    name: ClassVar[str] = "sgd"
    learning_rate: float = 0.01


@dataclass(frozen=True)
class AdaGrad(RowOptimizer):
    """n += g²; w -= lr·g / (√n + ε), for each component."""

    kind: ClassVar[int] = _ADAGRAD
    name: ClassVar[str] = "adagrad"
    state_per_weight: ClassVar[int] = 1
    learning_rate: float = 0.05
    initial_accumulator: float = 0.1
    epsilon: float = 1e-10


@dataclass(frozen=True)
class RowWiseAdaGrad(RowOptimizer):
    """AdaGrad with one accumulator for the row: n += mean(g²)."""

    kind: ClassVar[int] = _ROWWISE
    name: ClassVar[str] = "rowwise_adagrad"
    state_per_row: ClassVar[int] = 1
    learning_rate: float = 0.05
    initial_accumulator: float = 0.1
    epsilon: float = 1e-10


@dataclass(frozen=True)
class Adam(RowOptimizer):
    """Lazy Adam: a row's moments and step count change only when the row has a gradient."""

    kind: ClassVar[int] = _ADAM
    name: ClassVar[str] = "adam"
    state_per_weight: ClassVar[int] = 2
    state_per_row: ClassVar[int] = 1
    learning_rate: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8


@dataclass(frozen=True)
class Ftrl(RowOptimizer):
    """FTRL-proximal (McMahan et al., 2013) with its per-coordinate rate α / (β + √n).

    A learning-rate factor scales the gradient's share of z: scaling α itself would move weights that have
    long converged.
    """

    kind: ClassVar[int] = _FTRL
    name: ClassVar[str] = "ftrl"
    state_per_weight: ClassVar[int] = 2
    alpha: float = 0.05
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0


class OptimizerView(NamedTuple):
    """The optimizers of vectors and wide weights, for kernels."""

    kind: int
    settings: int  # address of the optimizer's settings
    wide_kind: int
    wide_settings: int
    l2: np.float32  # pulls the vectors of updated rows towards zero


OPTIMIZERS: Mapping[str, type[RowOptimizer]] = {
    kind.name: kind for kind in (Sgd, AdaGrad, RowWiseAdaGrad, Adam, Ftrl)
}


# ── kernels ────────────────────────────────────────────────────────────────────────────────────


@njit(cache=True, nogil=True, inline="always")
def _sgd(weights: Any, gradient: Any, dim: Int, settings: Any, factor: np.float32) -> None:
    rate = settings[0] * factor
    for j in range(dim):
        weights[j] -= rate * gradient[j]


@njit(cache=True, nogil=True, inline="always")
def _adagrad(weights: Any, state: Any, gradient: Any, dim: Int, settings: Any, factor: np.float32) -> None:
    rate = settings[0] * factor
    epsilon = settings[2]
    for j in range(dim):
        g = gradient[j]
        n = state[j] + g * g
        state[j] = n
        weights[j] -= rate * g / (np.sqrt(n) + epsilon)


@njit(cache=True, nogil=True, inline="always")
def _rowwise(weights: Any, state: Any, gradient: Any, dim: Int, settings: Any, factor: np.float32) -> None:
    total = np.float32(0)
    for j in range(dim):
        total += gradient[j] * gradient[j]
    n = state[0] + total / np.float32(dim)
    state[0] = n
    rate = settings[0] * factor / (np.sqrt(n) + settings[2])
    for j in range(dim):
        weights[j] -= rate * gradient[j]


@njit(cache=True, nogil=True)
def power(base: Any, exponent: Int) -> Any:
    """base^exponent by squaring: the C library's `pow` differs between machines."""
    result = 1.0
    while exponent > 0:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


@njit(cache=True, nogil=True, inline="always")
def _adam(weights: Any, state: Any, gradient: Any, dim: Int, settings: Any, factor: np.float32) -> None:
    beta1, beta2, epsilon = settings[1], settings[2], settings[3]
    one = np.float32(1)
    state[2 * dim] += one  # exact up to 2^24; beyond it both corrections are 1 anyway
    step = np.int64(state[2 * dim])
    correct1 = np.float32(1.0 - power(np.float64(beta1), step))
    correct2 = np.float32(1.0 - power(np.float64(beta2), step))
    rate = settings[0] * factor / correct1
    for j in range(dim):
        g = gradient[j]
        m = beta1 * state[j] + (one - beta1) * g
        v = beta2 * state[dim + j] + (one - beta2) * g * g
        state[j] = m
        state[dim + j] = v
        weights[j] -= rate * m / (np.sqrt(v / correct2) + epsilon)


@njit(cache=True, nogil=True, inline="always")
def _ftrl(weights: Any, state: Any, gradient: Any, dim: Int, settings: Any, factor: np.float32) -> None:
    alpha, beta, l1, l2 = settings[0], settings[1], settings[2], settings[3]
    for j in range(dim):
        g = gradient[j]
        n = state[dim + j]
        n_new = n + g * g
        root = np.sqrt(n_new)
        z = state[j] + factor * g - (root - np.sqrt(n)) / alpha * weights[j]
        state[j] = z
        state[dim + j] = n_new
        clipped = max(min(z, l1), -l1)  # without a branch: half of them would be mispredicted
        weights[j] = (clipped - z) / ((beta + root) / alpha + l2)


@njit(cache=True, nogil=True, inline="always")
def update(
    kind: Int,
    weights: Any,
    state: Any,
    gradient: Any,
    dim: Int,
    settings: Any,
    factor: np.float32,
) -> None:
    """One step of optimizer `kind` on one row."""
    if kind == _SGD:
        _sgd(weights, gradient, dim, settings, factor)
    elif kind == _ADAGRAD:
        _adagrad(weights, state, gradient, dim, settings, factor)
    elif kind == _ROWWISE:
        _rowwise(weights, state, gradient, dim, settings, factor)
    elif kind == _ADAM:
        _adam(weights, state, gradient, dim, settings, factor)
    else:
        _ftrl(weights, state, gradient, dim, settings, factor)


@njit(cache=True, nogil=True)
def init_state(kind: Int, weights: Any, state: Any, dim: Int, settings: Any) -> None:
    """Initialize the state of a new row, whose weights are set and whose state is zero."""
    if kind == _ADAGRAD:
        for j in range(dim):
            state[j] = settings[1]
    elif kind == _ROWWISE:
        state[0] = settings[1]
    elif kind == _FTRL:  # the z from which FTRL would compute these weights
        alpha, beta, l1, l2 = settings[0], settings[1], settings[2], settings[3]
        for j in range(dim):
            w = weights[j]
            z = w * (beta / alpha + l2)
            if w > np.float32(0):
                state[j] = -(z + l1)
            elif w < np.float32(0):
                state[j] = l1 - z
