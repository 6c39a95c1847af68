"""Builds a dataset on this machine, with one thread per core."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from clickline.data.input_blocks import FileProgress, Inputs, map_in_order
from clickline.data.prepare.field_statistics import BlockStatistics, measure_block
from clickline.data.prepare.shard_builder import BlockGroup, FileBlock, FinishedShard, ShardBuilder
from clickline.features import FeatureSpec
from clickline.machine import cores
from clickline.progress import Progress
from clickline.records import Block


class ThreadExecutor:
    """Runs the work in threads. Numba and Arrow release the GIL, so all cores are used."""

    def blocks(
        self, inputs: Inputs, progress: Progress, after: FileProgress | None = None
    ) -> Iterator[FileBlock]:
        return inputs.blocks(progress, after)

    def measure(self, inputs: Inputs, features: FeatureSpec, progress: Progress) -> Iterator[BlockStatistics]:
        def measure_one(number: int, block: Block) -> BlockStatistics:
            return measure_block(inputs.reader, features, number, block)

        blocks = (block for _, block, _ in inputs.blocks(progress) if block.payload is not None)
        for _, measured in map_in_order(measure_one, blocks, cores()):
            yield measured

    def build(self, builder: ShardBuilder, groups: Iterable[BlockGroup]) -> Iterator[FinishedShard]:
        pool = ThreadPoolExecutor(cores(), thread_name_prefix=f"prepare-{builder.split}")
        running: set[Future[FinishedShard]] = set()

        def collect(limit: int) -> Iterator[FinishedShard]:
            """Wait until at most `limit` groups are in progress."""
            while len(running) > limit:
                done, pending = wait(running, return_when=FIRST_COMPLETED)
                running.intersection_update(pending)
                for future in done:
                    yield future.result()

        try:
            for group in groups:
                running.add(pool.submit(builder.build, group))
                yield from collect(cores())  # one more than there are threads, so that no thread waits
            yield from collect(0)
        finally:
            builder.stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
