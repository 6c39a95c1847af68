"""Measures the memory and speed of a config's model on this machine, in a separate process.

    python -P -m clickline.pipeline.planning.cost_probe FD

The probe does what `train` does, in the same order and with the same code: build, check the export, prefetch windows
of rows, look up, train, score, write a snapshot. So apart from the tables it uses the same memory as `train`. Before
timing, its tables are filled to the planned size with ids that do not occur.

Times are the median of several short intervals, so that a machine that is busy for a moment disturbs only some of
them. A machine that is always busy also slows down training.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from clickline.artifacts.checkpoint import Position
from clickline.artifacts.dataset import Dataset
from clickline.artifacts.manifest import digest
from clickline.config import Config
from clickline.embedding import Tables, save_snapshot
from clickline.errors import ClicklineError
from clickline.evaluation.rolling_metrics import RollingMetrics
from clickline.machine import cores
from clickline.models.from_config import holdout_share, plan_of
from clickline.models.model import Model
from clickline.models.torch_runtime import should_find_ahead
from clickline.processes import ChildProcess, ParentConnection
from clickline.records import LabelledRows
from clickline.storage.storage import Storage
from clickline.training.batches import Batches, batch_settings
from clickline.training.train_step import TrainStep, build_train_step

_TIMEOUT = 600.0  # seconds
_EXIT_SECONDS = 5.0  # to exit after it has closed its socket
_INTERVAL = 0.4  # minimum seconds of one measurement
_INTERVALS = 9
_MAX_SECONDS = 15.0  # of training; a step of a large network may take seconds
_WARMUP_SECONDS, _WARMUP_STEPS = 1.0, 8
_SCORED_ROWS = 1 << 13
_WINDOWS_READ = 3
_FILL_BATCH = 1 << 16


@dataclass(frozen=True)
class ProbeResult:
    """The measurements of a probe. Bytes are of memory; times are per row or per byte."""

    process_bytes: int  # after the model is built and its export checked
    working_bytes: int  # peak beyond that: windows of rows, a batch, its activations, a snapshot's buffers
    window_rows: int  # of the largest window
    windows: int  # in the dataset
    start_seconds: float  # until the end of the first step
    train_seconds: float  # per row
    read_seconds: float  # per row, with nothing in parallel
    overlap_seconds: float  # per row: slowdown of training by reading in parallel
    score_seconds: float  # per row
    write_seconds: float  # per byte of a snapshot
    filled_ids: int  # in the tables during timing
    distinct_ids: int  # in a batch


def run_probe(config: Config, dataset: Dataset, rows: int, fill: list[int]) -> ProbeResult:
    """Probe the config's model on rows of the dataset, in a child process: trained on `rows` rows per epoch, with each
    table filled with that many ids."""
    request = {
        "config": config.model_dump(mode="json", by_alias=True),
        "dataset": dataset.folder,
        "rows": rows,
        "fill": fill,
        "started": time.time(),
    }
    child = ChildProcess("clickline.pipeline.planning.cost_probe", request=request)
    try:
        answer = child.receive(_TIMEOUT)
    except TimeoutError as error:
        raise ClicklineError(
            f"the probe did not finish within {_TIMEOUT:.0f} s. Use --no-probe to plan without measuring."
        ) from error
    except (EOFError, ConnectionError):
        child.wait_or_kill(_EXIT_SECONDS)
        answer = {"failed": f"it ended {child.exit_reason()}"}
    finally:
        child.stop(0.0)
    if "failed" in answer:
        raise ClicklineError(
            f"the probe failed: {answer['failed']}. `clickline train` would fail too. "
            "Use --no-probe to plan without measuring."
        )
    if "error" in answer:
        raise ClicklineError(answer["error"])
    return ProbeResult(**answer)


# ── in the child ───────────────────────────────────────────────────────────────────────────────


def _probe(request: Mapping[str, Any]) -> ProbeResult:
    config = Config.model_validate(request["config"])
    dataset = Dataset.open(Storage(), request["dataset"])
    train, threads = config.train, cores()
    plan = plan_of(config, dataset.features, request["rows"])
    train_step = build_train_step(config, dataset.features, plan, threads)
    process_bytes = _memory("VmRSS")
    tables = train_step.model.tables
    empty = tables.memory_bytes
    batches = Batches(dataset, **batch_settings(train, request["rows"], holdout_share(train)))
    built = time.time() - request["started"]
    for part, ids in enumerate(request["fill"]):
        _fill(tables, part, ids, plan.seed)
    sizes = {(shard, group): rows for shard, group, rows in dataset.row_groups("train")}
    windows = [sum(sizes[place] for place in window) for window in batches.windows(0)]
    endless = _EndlessBatches(batches)
    began = time.perf_counter()
    first_rows = next(endless)
    train_step.run(train_step.prepare(first_rows))
    start = built + time.perf_counter() - began
    train_seconds = _time_training(train_step, first_rows, endless, should_find_ahead(threads))
    score = _time_scoring(train_step.model, first_rows)
    write = _time_snapshot(tables)
    peak = _memory("VmHWM")  # before reading, which holds more windows at once than training
    read, overlap_seconds = _time_reading(train_step, first_rows, batches, train_seconds)
    return ProbeResult(
        process_bytes=process_bytes - empty,
        working_bytes=peak - (process_bytes - empty) - tables.memory_bytes,
        window_rows=max(windows),
        windows=len(windows),
        start_seconds=start,
        train_seconds=train_seconds,
        read_seconds=read / windows[0],
        overlap_seconds=overlap_seconds / windows[0],
        score_seconds=score,
        write_seconds=write,
        filled_ids=tables.size,
        distinct_ids=sum(np.unique(slot.ids_N).size for slot in first_rows.encoded.slots),
    )


class _EndlessBatches:
    """An endless iterator over batches, epoch after epoch."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self._epoch = 0
        self._batch_iterator: Iterator[tuple[LabelledRows, Position]] = iter(())

    def __next__(self) -> LabelledRows:
        for _ in range(2):
            for rows, _ in self._batch_iterator:
                if rows.rows:
                    return rows
            self._batch_iterator = self._batches.epoch(Position(self._epoch))
            self._epoch += 1
        raise ClicklineError("there are no rows to train on. Check train.negative_sampling.")


def _fill(tables: Tables, part: int, ids: int, seed: int) -> None:
    """Fill a table with rows of ids that do not occur."""
    table = tables.parts[part]
    random = np.random.default_rng([seed, part])
    for start in range(0, ids, _FILL_BATCH):
        records = np.zeros(min(_FILL_BATCH, ids - start), dtype=table.layout.record)
        records["id"] = random.integers(0, 2**64, records.size, dtype=np.uint64)
        records["slot"] = random.integers(0, len(tables.slots_by_table[part]), records.size)
        table.restore(records, candidates=False)


def _time_training(
    train_step: TrainStep, first_rows: LabelledRows, endless: _EndlessBatches, ahead: bool
) -> float:
    """Seconds per row of training, without waiting for input."""
    window, times = RollingMetrics(), list[float]()
    with ThreadPoolExecutor(1) as executor:
        prepared = train_step.prepare(first_rows)
        began = now = time.perf_counter()
        rows, seconds, steps, warm = 0, 0.0, 0, False
        while len(times) < _INTERVALS and (not times or now - began < _MAX_SECONDS):
            following = next(endless)
            started = time.perf_counter()
            lookup = executor.submit(train_step.prepare, following) if ahead else None
            step = train_step.run(prepared)
            window.add(prepared.rows.label_B, prepared.rows.weight_B, step.probability_B)
            rows += prepared.rows.rows
            prepared = train_step.prepare(following) if lookup is None else lookup.result()
            now = time.perf_counter()
            seconds += now - started
            steps += 1
            if not warm:
                warm = (
                    steps >= _WARMUP_STEPS and now - began > _WARMUP_SECONDS
                ) or now - began > _MAX_SECONDS / 3
                rows, seconds = (0, 0.0) if warm else (rows, seconds)
            elif seconds >= _INTERVAL:
                times.append(seconds / rows)
                rows, seconds = 0, 0.0
        train_step.run(prepared)  # finish the prepared batch: none may be open during a snapshot
    return median(times)


def _time_reading(
    train_step: TrainStep, rows: LabelledRows, batches: Batches, train_seconds: float
) -> tuple[float, float]:
    """Seconds to read a window, and by how much reading it slows down training in parallel."""
    alone, contended = [], []
    with ThreadPoolExecutor(1) as reader:
        for _ in range(_WINDOWS_READ):
            began = time.perf_counter()
            reader.submit(batches.read_window, 0, 0).result()
            alone.append(time.perf_counter() - began)
            began, steps = time.perf_counter(), 0
            reading = reader.submit(batches.read_window, 0, 0)
            while not reading.done():
                train_step.run(train_step.prepare(rows))
                steps += 1
            contended.append(time.perf_counter() - began - steps * rows.rows * train_seconds)
    return median(alone), max(0.0, median(contended))


def _time_scoring(model: Model, rows: LabelledRows) -> float:
    times = []
    for _ in range(_INTERVALS):
        began, completed = time.perf_counter(), 0
        while completed < _SCORED_ROWS:
            model.score(rows)
            completed += rows.rows
        times.append((time.perf_counter() - began) / completed)
    return median(times)


def _time_snapshot(tables: Tables) -> float:
    with TemporaryDirectory(prefix="clickline-plan-") as folder:
        path = Path(folder, "tables.bin")
        began = time.perf_counter()
        saved = save_snapshot(tables, path)
        digest(path)
        return (time.perf_counter() - began) / saved.size


def _memory(name: str) -> int:
    """A field of /proc/self/status in bytes; on other systems, the peak memory."""
    status = Path("/proc/self/status")
    if status.exists():
        (line,) = (line for line in status.read_text().splitlines() if line.startswith(f"{name}:"))
        return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def main() -> None:
    parent = ParentConnection(int(sys.argv[1]))
    parent.exit_with_parent()
    try:
        parent.send(**asdict(_probe(parent.request)))
    except ClicklineError as error:
        parent.send(error=str(error))
    except Exception as error:  # noqa: BLE001 - the parent reports it
        parent.send(failed=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
