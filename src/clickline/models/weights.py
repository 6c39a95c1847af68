"""The weights of a network as plain arrays, under the names that checkpoints know them by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from torch import nn

from clickline.errors import ArtifactError

_PREFIX = "network/"


def network_arrays(network: nn.Module) -> dict[str, NDArray[Any]]:
    """Weights and buffers, copied."""
    return {f"{_PREFIX}{name}": value.numpy().copy() for name, value in network.state_dict().items()}


def load_network(network: nn.Module, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Take over what `network_arrays` gave; other arrays may be among them."""
    weights = {
        name.removeprefix(_PREFIX): torch.from_numpy(value.copy())
        for name, value in arrays.items()
        if name.startswith(_PREFIX)
    }
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:  # the user's file has changed, most likely
        raise ArtifactError(f"the stored weights do not fit the network: {error}") from error
