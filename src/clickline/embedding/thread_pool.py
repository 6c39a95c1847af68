"""A thread pool for kernels that release the GIL."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


class ThreadPool:
    """Splits a range into one piece per thread. Results must not depend on where the range is split."""

    def __init__(self, threads: int) -> None:
        if threads < 1:
            raise ValueError(f"{threads} threads: at least 1 is required")
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads - 1, "tables") if threads > 1 else None

    def parallel_for(self, total: int, work: Callable[..., object], *args: object) -> None:
        """Call `work(first, last, *args)` for pieces that cover 0 … total - 1, and wait for all of them."""
        if self._pool is None or total < self.threads:
            work(0, total, *args)
            return
        bounds = [total * part // self.threads for part in range(self.threads + 1)]
        futures = [self._pool.submit(work, bounds[t], bounds[t + 1], *args) for t in range(1, self.threads)]
        try:
            work(bounds[0], bounds[1], *args)
        finally:
            for future in futures:
                future.result()
