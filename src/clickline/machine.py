"""What this process may use of its machine: cores, memory in a container less than the machine has; and its address."""

from __future__ import annotations

import os
from pathlib import Path


def cores() -> int:
    """The number of cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_limit() -> int:
    """Bytes of memory this process may use: the machine's, or the container's limit if lower."""
    limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(name).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            limit = min(limit, int(text))
    return limit


def resident_bytes() -> int:
    """Resident memory of this process."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def connect_host(host: str) -> str:
    """The address to connect to for a server of this machine that listens on `host`, which may mean all addresses."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
