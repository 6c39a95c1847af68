"""The crew that does the work on this machine: a thread for each core."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from clickline.data.input_blocks import Inputs, Part, in_order
from clickline.data.prepare.field_statistics import Seen, look
from clickline.data.prepare.shard_builder import Cut, Finished, Group, Maker
from clickline.features import FeatureSpec
from clickline.machine import cores
from clickline.progress import Progress
from clickline.records import Block


class Threads:
    """Numba and Arrow release the GIL, so all cores work."""

    def blocks(self, inputs: Inputs, progress: Progress, after: Part | None = None) -> Iterator[Cut]:
        return inputs.blocks(progress, after)

    def look(self, inputs: Inputs, features: FeatureSpec, progress: Progress) -> Iterator[Seen]:
        def one(number: int, block: Block) -> Seen:
            return look(inputs.reader, features, number, block)

        blocks = (block for _, block, _ in inputs.blocks(progress) if block.payload is not None)
        for _, seen in in_order(one, blocks, cores()):
            yield seen

    def make(self, maker: Maker, groups: Iterable[Group]) -> Iterator[Finished]:
        pool = ThreadPoolExecutor(cores(), thread_name_prefix=f"prepare-{maker.split}")
        running: set[Future[Finished]] = set()

        def collect(limit: int) -> Iterator[Finished]:
            """Wait until at most `limit` groups are in work."""
            while len(running) > limit:
                done, left = wait(running, return_when=FIRST_COMPLETED)
                running.intersection_update(left)
                for future in done:
                    yield future.result()

        try:
            for group in groups:
                running.add(pool.submit(maker.make, group))
                yield from collect(cores())  # one more than there are threads, so that none of them waits
            yield from collect(0)
        finally:
            maker.stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
