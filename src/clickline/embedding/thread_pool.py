"""Threads for kernels that release the GIL."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


class Workers:
    """Cuts a range into one piece a thread. What a piece computes must not depend on where the cuts are."""

    def __init__(self, threads: int) -> None:
        if threads < 1:
            raise ValueError(f"{threads} threads: at least 1 is needed")
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads - 1, "tables") if threads > 1 else None

    def each(self, total: int, work: Callable[[int, int], object]) -> None:
        """Call `work(first, last)` for pieces that cover 0 … total - 1, and wait for all of them."""
        if self._pool is None or total < self.threads:
            work(0, total)
            return
        cuts = [total * part // self.threads for part in range(self.threads + 1)]
        others = [self._pool.submit(work, cuts[t], cuts[t + 1]) for t in range(1, self.threads)]
        try:
            work(cuts[0], cuts[1])
        finally:
            for other in others:
                other.result()
