"""The weights of a network as plain arrays, under the names used in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from torch import nn

from clickline.errors import ArtifactError

_PREFIX = "network/"


def network_arrays(network: nn.Module) -> dict[str, NDArray[Any]]:
    """A copy of the weights and buffers."""
    return {f"{_PREFIX}{name}": value.numpy().copy() for name, value in network.state_dict().items()}


def load_network(network: nn.Module, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Load the arrays of `network_arrays`; other arrays are ignored."""
    weights = {
        name.removeprefix(_PREFIX): torch.from_numpy(value.copy())
        for name, value in arrays.items()
        if name.startswith(_PREFIX)
    }
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:  # most likely the user's file has changed
        raise ArtifactError(f"the stored weights do not match the network: {error}") from error
