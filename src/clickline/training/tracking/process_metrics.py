"""CPU and memory use of this process."""

from __future__ import annotations

import time

from clickline.machine import resident_bytes


class _ResourceUsage:
    """Measures since its last call. MLflow shows metrics that begin with system/ on a separate page."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.monotonic(), time.process_time()

    def __call__(self) -> dict[str, float]:
        """Cores in use since the last call (1.0: one core all the time) and resident memory in MiB."""
        wall, cpu = time.monotonic(), time.process_time()
        busy = (cpu - self._cpu) / max(wall - self._wall, 1e-9)
        self._wall, self._cpu = wall, cpu
        return {"system/cpu_cores": busy, "system/memory_mib": resident_bytes() / 2**20}


resource_usage = _ResourceUsage()
