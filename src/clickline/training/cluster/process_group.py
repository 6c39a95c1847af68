"""The workers of sync mode as one group that sums vectors: gloo, without torch.distributed's global state.

Members find each other at a meeting point, which is needed only until they are connected. When members come or go,
the rest form a new group of a higher generation, in the same processes. A member that misses another closes its group
at once: its connections break, so that nobody is left waiting for one that has given up.
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

dist: Any = torch.distributed  # its types lack half of what is there


class PeerLost(ClusterError):
    """A member of the group died, or did not answer in time. The group is closed; the rest may form another."""


class Meeting:
    """Where members find each other: a small store at a free port of this machine's `address`."""

    def __init__(self, address: str) -> None:
        family = socket.getaddrinfo(address, None)[0][0]
        # A store that opens its port by itself listens at all addresses of the machine.
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
        """No new group can form here; those that have go on."""
        self._store = None


class Group:
    """Members 0 … size - 1 that do the same things in the same order. `address` is one of this machine that the
    others reach. A generation is used once at a meeting point: who comes late for it finds nobody."""

    def __init__(
        self, meeting: str, generation: int, rank: int, size: int, *, address: str, timeout: float
    ) -> None:
        self.generation = generation
        self.rank = rank
        self.size = size
        self._gloo: Any = None
        if size > 1:
            self._or_lost(lambda: self._form(meeting, address, timedelta(seconds=timeout)))

    @staticmethod
    def host(address: str) -> Meeting:
        """Open a meeting point."""
        return Meeting(address)

    def sum(self, vector: NDArray[np.float32]) -> None:
        """Add up the members' vectors, in place; each gets the same bits. When a peer is lost, what it holds is
        good for nothing here, while another member may have its sum."""
        if self.size > 1:
            self._or_lost(lambda: self._members().allreduce([torch.from_numpy(vector)]).wait())

    def share(self, data: bytes | None, source: int) -> bytes:
        """What member `source` gives to all."""
        if self.rank == source and data is None:
            raise ValueError("the source gives the data")
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
        """Leave. Whoever waits for this member loses it."""
        self._gloo = None

    def _form(self, meeting: str, address: str, timeout: timedelta) -> None:
        host, _, port = meeting.rpartition(":")
        store = dist.TCPStore(host, int(port), is_master=False, timeout=timeout)
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timeout
        options._threads = 1
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address, lazy_init=False)]
        place = dist.PrefixStore(f"generation {self.generation}", store)
        self._gloo = dist.ProcessGroupGloo(place, self.rank, self.size, options)

    def _broadcast(self, values: NDArray[Any], source: int) -> None:
        self._or_lost(lambda: self._members().broadcast(torch.from_numpy(values), source).wait())

    def _members(self) -> Any:
        if self._gloo is None:
            raise PeerLost(f"the group of generation {self.generation} is closed.")
        return self._gloo

    def _or_lost(self, act: Callable[[], object]) -> None:
        try:
            act()
            return
        except RuntimeError as error:
            reason = re.sub(r"\[/[^]]*\] *", "", str(error).split("\n")[0])  # without places in gloo's source
        # Only here, behind the error, is there no frame any more that keeps a piece of the group alive.
        self.close()
        raise PeerLost(
            f"member {self.rank} of {self.size} lost another one of generation {self.generation}: {reason}"
        )
