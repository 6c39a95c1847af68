"""What the model of a config costs on this machine, measured in a process of its own.

    python -m clickline.pipeline.planning.cost_probe   a JSON line in, a JSON line out

It does what `train` does, in the same order and with the same parts: build, check the export, read windows of rows
ahead, find, learn, score, write a snapshot. So its memory, less its tables, is that of `train` less its tables. Before
anything is timed its tables are filled up to the size that is planned, with ids that do not occur.

Times are the median of several short stretches: a machine that is busy for a moment disturbs some of them, one that is
always busy all, and then training too.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np

from clickline.artifacts.dataset import Dataset
from clickline.artifacts.manifest import digest
from clickline.config import Config, load_config, resolved
from clickline.embedding import Tables, save
from clickline.errors import ClicklineError
from clickline.evaluation.rolling_metrics import Window
from clickline.machine import cores
from clickline.models.from_config import batch_size_of, held_out_of, plan_of
from clickline.models.model import Model
from clickline.models.onnx_export import check_export
from clickline.models.torch_runtime import finds_ahead
from clickline.records import LabelledRows
from clickline.storage.storage import Storage
from clickline.training.batches import Batches, Position
from clickline.training.train_step import Learner

_LONGEST = 600.0  # seconds until it is given up
_STRETCH = 0.4  # seconds that are timed together, at least
_STRETCHES = 9
_MOST_SECONDS = 15.0  # of learning; a step of a large network may take seconds
_WARM_SECONDS, _WARM_STEPS = 1.0, 8
_SCORED_ROWS = 1 << 13
_WINDOWS_READ = 3
_FILLED_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class Measured:
    """Figures of a probe. Bytes are of memory; rates are for one row or byte."""

    process_bytes: int  # once the model is built and its export checked
    working_bytes: (
        int  # beyond that at the most: windows of rows, a batch and its activations, a snapshot's room
    )
    window_rows: int  # of the largest window that was read
    windows: int  # that were there to read
    start_seconds: float  # from nothing to the end of the first step
    learn_seconds: float  # a row
    read_seconds: float  # a row, with nothing beside it
    overlap_seconds: float  # a row: what reading it takes from learning that goes on beside it
    score_seconds: float  # a row
    write_seconds: float  # a byte of a snapshot
    filled_ids: int  # in its tables while it was timed
    distinct_ids: int  # in a batch


@dataclass(frozen=True)
class _Asked:
    config: str  # a file
    dataset: str  # a folder
    rows: int  # that an epoch learns
    fill: list[int]  # ids of each table
    stretch: float
    started: float  # when, by the clock


def measure(
    config: Config, dataset: Dataset, rows: int, fill: list[int], *, stretch: float = _STRETCH
) -> Measured:
    """Probe the config's model on rows of the dataset, in a child process."""
    with TemporaryDirectory(prefix="clickline-plan-") as folder:
        path = Path(folder, "resolved.yaml")
        path.write_text(resolved(config))
        asked = _Asked(str(path), dataset.folder, rows, fill, stretch, time.time())
        try:
            done = subprocess.run(
                [sys.executable, "-m", "clickline.pipeline.planning.cost_probe"],
                input=json.dumps(asdict(asked)),
                capture_output=True,
                text=True,
                timeout=_LONGEST,
            )
        except subprocess.TimeoutExpired as error:
            raise ClicklineError(
                f"the probe did not end within {_LONGEST:.0f} s. Plan with --no-probe, which measures no speed."
            ) from error
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
        if done.returncode < 0:
            said = f"it was ended by signal {-done.returncode}; most likely there is too little memory"
        raise ClicklineError(
            f"the probe failed: {said}. `clickline train` would fail alike; --no-probe plans without measuring."
        )
    answer = json.loads(done.stdout.splitlines()[-1])
    if "error" in answer:
        raise ClicklineError(answer["error"])
    return Measured(**answer)


# ── in the child ───────────────────────────────────────────────────────────────────────────────


def _probe(asked: _Asked) -> Measured:
    config = load_config(asked.config)
    dataset = Dataset.open(Storage(), asked.dataset)
    train, threads = config.train, cores()
    plan = plan_of(config, dataset.features, asked.rows)
    file = None if config.model.file is None else Path(config.model.file)
    learner = Learner(Model.build(dataset.features, plan, threads, file))
    check_export(learner.model.network, learner.model.spec)
    process = _memory("VmRSS")
    tables = learner.model.tables
    empty = tables.memory_bytes
    batches = Batches(
        dataset,
        Path(dataset.folder),
        batch_size_of(train, asked.rows),
        train.seed,
        in_time=train.order == "time",
        held_out=held_out_of(train),
        negative_sampling=train.negative_sampling,
    )
    built = time.time() - asked.started
    for part, ids in enumerate(asked.fill):
        _fill(tables, part, ids, plan.seed)
    sizes = {(shard, group): rows for shard, group, rows in dataset.row_groups("train")}
    windows = [sum(sizes[place] for place in window) for window in batches.windows(0)]
    coming = _Endless(batches)
    began = time.perf_counter()
    first = next(coming)
    learner.learn(learner.prepare(first))
    start = built + time.perf_counter() - began
    learn = _learn(learner, first, coming, asked.stretch, finds_ahead(threads))
    score = _score(learner.model, first)
    write = _write(tables)
    peak = _memory("VmHWM")  # what follows holds more windows at once than training does
    read, overlap = _read(learner, first, batches, learn)
    return Measured(
        process_bytes=process - empty,
        working_bytes=peak - (process - empty) - tables.memory_bytes,
        window_rows=max(windows),
        windows=len(windows),
        start_seconds=start,
        learn_seconds=learn,
        read_seconds=read / windows[0],
        overlap_seconds=overlap / windows[0],
        score_seconds=score,
        write_seconds=write,
        filled_ids=tables.size,
        distinct_ids=sum(np.unique(slot.ids_N).size for slot in first.encoded.slots),
    )


class _Endless:
    """Batches of epoch after epoch."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self._epoch = 0
        self._coming: Iterator[tuple[LabelledRows, Position]] = iter(())

    def __next__(self) -> LabelledRows:
        for _ in range(2):
            for rows, _ in self._coming:
                if rows.rows:
                    return rows
            self._coming = self._batches.epoch(Position(self._epoch))
            self._epoch += 1
        raise ClicklineError("no row is left to learn. Check train.negative_sampling.")


def _fill(tables: Tables, part: int, ids: int, seed: int) -> None:
    """Put rows into a table for ids that nobody asks for."""
    table = tables.parts[part]
    random = np.random.default_rng([seed, part])
    for first in range(0, ids, _FILLED_AT_ONCE):
        records = np.zeros(min(_FILLED_AT_ONCE, ids - first), dtype=table.layout.record)
        records["id"] = random.integers(0, 2**64, records.size, dtype=np.uint64)
        records["slot"] = random.integers(0, len(tables.members[part]), records.size)
        table.place(records, candidates=False)


def _learn(learner: Learner, first: LabelledRows, coming: _Endless, stretch: float, ahead: bool) -> float:
    """Seconds a row, as `train` does it, without the waiting for rows."""
    window, times = Window(), list[float]()
    with ThreadPoolExecutor(1) as finder:
        prepared = learner.prepare(first)
        began = now = time.perf_counter()
        rows, seconds, steps, warm = 0, 0.0, 0, False
        while len(times) < _STRETCHES and (not times or now - began < _MOST_SECONDS):
            following = next(coming)
            started = time.perf_counter()
            found = finder.submit(learner.prepare, following) if ahead else None
            step = learner.learn(prepared)
            window.add(prepared.rows.label_B, prepared.rows.weight_B, step.probability_B)
            rows += prepared.rows.rows
            prepared = learner.prepare(following) if found is None else found.result()
            now = time.perf_counter()
            seconds += now - started
            steps += 1
            if not warm:
                warm = (
                    steps >= _WARM_STEPS and now - began > _WARM_SECONDS
                ) or now - began > _MOST_SECONDS / 3
                rows, seconds = (0, 0.0) if warm else (rows, seconds)
            elif seconds >= stretch:
                times.append(seconds / rows)
                rows, seconds = 0, 0.0
        learner.learn(prepared)  # what was found is learned: nothing may be open when a snapshot is taken
    return median(times)


def _read(learner: Learner, rows: LabelledRows, batches: Batches, learn: float) -> tuple[float, float]:
    """Seconds that a window takes to read, and that its reading takes from learning beside it."""
    alone, beside = [], []
    with ThreadPoolExecutor(1) as reader:
        for _ in range(_WINDOWS_READ):
            began = time.perf_counter()
            reader.submit(batches.read_window, 0, 0).result()
            alone.append(time.perf_counter() - began)
            began, steps = time.perf_counter(), 0
            reading = reader.submit(batches.read_window, 0, 0)
            while not reading.done():
                learner.learn(learner.prepare(rows))
                steps += 1
            beside.append(time.perf_counter() - began - steps * rows.rows * learn)
    return median(alone), max(0.0, median(beside))


def _score(model: Model, rows: LabelledRows) -> float:
    times = []
    for _ in range(_STRETCHES):
        began, done = time.perf_counter(), 0
        while done < _SCORED_ROWS:
            model.score(rows)
            done += rows.rows
        times.append((time.perf_counter() - began) / done)
    return median(times)


def _write(tables: Tables) -> float:
    with TemporaryDirectory(prefix="clickline-plan-") as folder:
        path = Path(folder, "tables.bin")
        began = time.perf_counter()
        saved = save(tables, path)
        digest(path)
        return (time.perf_counter() - began) / saved.size


def _memory(name: str) -> int:
    """A line of /proc/self/status in bytes; elsewhere the peak, which is what the system tells."""
    status = Path("/proc/self/status")
    if status.exists():
        (line,) = (line for line in status.read_text().splitlines() if line.startswith(f"{name}:"))
        return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def main() -> None:
    asked = _Asked(**json.loads(sys.stdin.readline()))
    with redirect_stdout(sys.stderr):  # what a user's network prints
        try:
            answer = asdict(_probe(asked))
        except ClicklineError as error:
            answer = {"error": str(error)}
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
