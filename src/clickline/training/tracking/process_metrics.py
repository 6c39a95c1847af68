"""CPU and memory use of this process, without an extra package."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

_STATM = Path("/proc/self/statm")


class _ResourceUsage:
    """Measures since its last call. MLflow shows metrics that begin with system/ on a separate page."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.monotonic(), time.process_time()

    def __call__(self) -> dict[str, float]:
        """Cores in use since the last call (1.0: one core all the time) and resident memory in MiB."""
        wall, cpu = time.monotonic(), time.process_time()
        busy = (cpu - self._cpu) / max(wall - self._wall, 1e-9)
        self._wall, self._cpu = wall, cpu
        return {"system/cpu_cores": busy, "system/memory_mib": _resident_bytes() / 2**20}


def _resident_bytes() -> int:
    if _STATM.exists():
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    import resource  # other systems report only the peak; macOS in bytes, others in KiB

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


resource_usage = _ResourceUsage()
