"""The process group of the sync workers, for all-reduce and broadcast: gloo, without torch.distributed's global state.

The ranks find each other at a rendezvous, which is needed only until they are connected. The driver hosts it, so that
no worker's death takes it away. When workers join or leave, a new group of a higher generation is formed in the same
processes. A rank that loses another closes its group at once: its connections break, so that no rank is left waiting
for one that has given up.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed
from numpy.typing import NDArray

from clickline.errors import ClusterError

dist: Any = torch.distributed  # its type stubs are incomplete


class PeerLost(ClusterError):
    """A peer died or did not answer in time. The group is closed; the remaining workers may form another."""


class Rendezvous:
    """Where the ranks of a group find each other: a TCP store on a free port of `address`."""

    def __init__(self, address: str) -> None:
        family = socket.getaddrinfo(address, None)[0][0]
        # A store that opens its own port listens on all addresses of the machine.
        with socket.create_server((address, 0), family=family, backlog=1024) as listening:
            self.port: int = listening.getsockname()[1]
            self._store = dist.TCPStore(
                address,
                self.port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=listening.detach(),
            )
        self.name = f"{address}:{self.port}"

    def close(self) -> None:
        """Close the store: ranks that wait here get PeerLost at once; existing groups are not affected."""
        self._store = None


class ProcessGroup:
    """Ranks 0 … size - 1 that make the same calls in the same order. `address` is an address of this machine that the
    peers can reach. A generation is used only once at a rendezvous: a latecomer finds no peers."""

    def __init__(
        self, rendezvous: str, generation: int, rank: int, size: int, *, address: str, timeout: float
    ) -> None:
        self.generation = generation
        self.rank = rank
        self.size = size
        self._gloo: Any = None
        if size > 1:
            self._call(lambda: self._form(rendezvous, address, timedelta(seconds=timeout)))

    def all_reduce(self, vector: NDArray[np.float32]) -> None:
        """Sum the vectors of all ranks in place; each gets the same bits. If a peer is lost, the vector is invalid
        here, although another rank may have the sum."""
        if self.size > 1:
            self._call(lambda: self._connected().allreduce([torch.from_numpy(vector)]).wait())

    def broadcast(self, data: bytes | None, source: int) -> bytes:
        """The data of rank `source`, sent to all ranks."""
        if self.rank == source and data is None:
            raise ValueError("the source rank must give the data")
        if self.size == 1:
            return data or b""
        size = np.array([len(data or b"")], dtype=np.int64)
        self._broadcast(size, source)
        content = np.frombuffer(
            bytearray(data or b"") if self.rank == source else bytearray(size[0]), np.uint8
        )
        if content.size:
            self._broadcast(content, source)
        return content.tobytes()

    def close(self) -> None:
        """Leave the group. A peer that waits for this rank gets PeerLost."""
        self._gloo = None

    def _form(self, rendezvous: str, address: str, timeout: timedelta) -> None:
        host, _, port = rendezvous.rpartition(":")
        # A store that is gone is tried twice, each time for the whole timeout (measured with PyTorch 2.13).
        store = dist.TCPStore(host, int(port), is_master=False, timeout=timeout / 2)
        store.set_timeout(timeout)
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timeout
        options._threads = 1
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address, lazy_init=False)]
        place = dist.PrefixStore(f"generation {self.generation}", store)
        self._gloo = dist.ProcessGroupGloo(place, self.rank, self.size, options)

    def _broadcast(self, values: NDArray[Any], source: int) -> None:
        self._call(lambda: self._connected().broadcast(torch.from_numpy(values), source).wait())

    def _connected(self) -> Any:
        if self._gloo is None:
            raise PeerLost(f"the group of generation {self.generation} is closed.")
        return self._gloo

    def _call(self, act: Callable[[], object]) -> None:
        try:
            act()
            return
        except RuntimeError as error:
            reason = re.sub(r"\[/[^]]*\] *", "", str(error).split("\n")[0])  # without gloo's source locations
        # Only outside the handler does no traceback frame keep the group alive.
        self.close()
        raise PeerLost(
            f"rank {self.rank} of {self.size} lost a peer of generation {self.generation}: {reason}"
        )
