"""How costs grow on this machine with rows, ids, dim and shards. Sizes grow up to the largest, or until the time is up.

python bench/scale.py                                 1 M to 100 M rows and ids, one hour; into docs/benchmarks.md
python bench/scale.py --rows 10000000 --seconds 600   up to that, in that time
python bench/scale.py --try                           a smoke test, printed only

One line is printed for each finished step. Results are stored in FOLDER/results.json, from which the same command resumes; it
is removed when all sizes are measured. All other files are removed with their step.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import log
from pathlib import Path
from typing import Any

from cluster import world
from loglog import Panel, Points, figure
from measure import ROOT, Row, publish

MILLION = 1_000_000
SIZES = (MILLION, 3 * MILLION, 10 * MILLION, 30 * MILLION, 100 * MILLION)
DIMS = (4, 9, 16, 32, 64)
SHARDS = (1, 2, 4, 8)
DIM = 9
CLUSTER_ROWS = 200_000
CLUSTER_SECONDS = 240  # for one cluster to start, learn and end
EVAL_ROWS = 100_000
WARM_UP = 20_000
IMAGES = ROOT / "docs" / "images"
SPARE_DISK = 4 << 30  # that is left to others
SPARE_MEMORY = 1 << 30
SLOTS, DENSE, CARDINALITY = (
    8,
    4,
    10 * MILLION,
)  # of the rows: the largest slot has so many ids, and newborn ones
CONFIG = """name: scale
data:
  format: csv
  train: data/train.csv
  eval: data/eval.csv
  fields: {{click: label, timestamp: time, {fields}}}
cache: {{dir: cache}}
model: {{embedding_dim: {dim}, hidden: [128, 64]}}
tracking: {{enabled: false}}
"""

Facts = dict[str, Any]


class TimeIsUp(Exception):
    """A step was not begun, or not ended, within the time there is."""


@dataclass
class Bench:
    """Steps that are measured once, as long as time, disk and memory last."""

    folder: Path
    ends: float  # by time.monotonic
    done: dict[str, Facts] = field(default_factory=dict)
    stopped: list[str] = field(default_factory=list)  # what was not measured, and why

    @property
    def left(self) -> float:
        return self.ends - time.monotonic()

    def step(
        self, name: str, measure: Callable[[Path], Facts], like: tuple[str, float] | None = None
    ) -> bool:
        """Measure, unless it was before; whether there are figures. `like` is a step that was measured, and how many
        times as large as it this one is: what it will need follows from that."""
        if name in self.done:
            print(f"  {name}: measured before", flush=True)
            return True
        if (why := self._too_much(like)) is not None:
            self._stop(name, why)
            return False
        work = self.folder / "work"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        free = shutil.disk_usage(work).free
        began = time.monotonic()
        try:
            facts = measure(work)
        except TimeIsUp:
            self._stop(name, f"was ended: its time was up, after {time.monotonic() - began:.0f} s")
            return False
        except RuntimeError as error:  # the other costs are worth measuring all the same
            print(error, flush=True)
            self._stop(name, f"failed: {str(error).strip().splitlines()[-1][:200]}")
            return False
        finally:
            shutil.rmtree(work, ignore_errors=True)
        facts |= {"seconds": time.monotonic() - began, "free_before": free}
        self.done[name] = facts
        (self.folder / "results.json").write_text(json.dumps(self.done, indent=1))
        told = ", ".join(f"{key} {_short(key, value)}" for key, value in facts.items() if _is_told(value))
        print(f"  {name}: {told}", flush=True)
        return True

    def _too_much(self, like: tuple[str, float] | None) -> str | None:
        if self.left <= 0:
            return "the time was up"
        if like is None:
            return None
        facts, growth = self.done[like[0]], like[1]
        seconds = facts["seconds"] * growth
        if seconds > self.left:
            return f"would take about {seconds:.0f} s, {self.left:.0f} s were left"
        disk, free = facts.get("disk_bytes", 0) * growth, shutil.disk_usage(self.folder).free - SPARE_DISK
        if disk > free:
            return f"needs about {_bytes(disk)} of disk, {_bytes(free)} may be used"
        memory, there = facts.get("peak_bytes", 0) * growth, _memory() - SPARE_MEMORY
        if memory > there:
            return f"needs up to {_bytes(memory)} of memory, {_bytes(there)} may be used"
        return None

    def _stop(self, name: str, why: str) -> None:
        self.stopped.append(f"{name} {why}")
        print(f"  {name}: left out, {why}", flush=True)


def _memory() -> int:
    """Bytes that the machine has to give, and that a limit on this process's group leaves."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))


# ── words for figures ──────────────────────────────────────────────────────────────────────────


def _bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:,.0f} {unit}" if size >= 1000 else f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:,.3g} GiB"


def _decimal_bytes(size: float) -> str:
    """For axes, whose lines are powers of ten."""
    for unit in ("B", "kB", "MB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"


def _seconds(seconds: float) -> str:
    return (
        f"{seconds * 1e3:.3g} ms"
        if seconds < 0.1
        else f"{seconds:,.3g} s"
        if seconds < 1000
        else f"{seconds:,.0f} s"
    )


def _count(count: float) -> str:
    return (
        f"{count / MILLION:g} M"
        if count >= MILLION
        else f"{count / 1000:g} k"
        if count >= 1000
        else f"{count:g}"
    )


def _ns(value: float) -> str:
    return f"{value:.3g} ns" if value < 999.5 else f"{value / 1000:.3g} µs"


def _is_told(value: object) -> bool:
    return isinstance(value, int | float)


def _short(key: str, value: float) -> str:
    if key.endswith("_bytes") or key == "free_before":
        return _bytes(value)
    if key.endswith("seconds"):
        return _seconds(value)
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}"


# ── processes ──────────────────────────────────────────────────────────────────────────────────


def run(
    bench: Bench, command: Sequence[str], folder: Path, said: str = "", limit: float = float("inf")
) -> tuple[str, float, int]:
    """What it printed, its seconds, and the most memory that it or a child of it had. `said` is what it reads. Ended
    when the time is up."""
    with (
        tempfile.TemporaryFile("w+") as told,
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as errors,
    ):
        told.write(said)
        told.seek(0)
        began = time.monotonic()
        process = subprocess.Popen(command, cwd=folder, stdin=told, stdout=out, stderr=errors)
        try:
            while True:
                pid, status, usage = os.wait4(process.pid, os.WNOHANG)
                took = time.monotonic() - began
                if pid:
                    process.returncode = os.waitstatus_to_exitcode(status)
                    break
                if bench.left <= 0 or took > limit:
                    raise TimeIsUp
                time.sleep(0.02)
        finally:
            if process.returncode is None:
                process.terminate()  # a cluster ends its own processes
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        out.seek(0)
        errors.seek(0)
        if process.returncode:
            raise RuntimeError(
                f"{' '.join(command)} ended with {process.returncode}:\n{errors.read()[-3000:]}"
            )
        return out.read(), took, usage.ru_maxrss * 1024


def clickline(bench: Bench, folder: Path, *arguments: str) -> tuple[Facts, float, int]:
    command = [str(Path(sys.executable).with_name("clickline")), *arguments, "--json", "-q"]
    said, took, peak = run(bench, command, folder)
    return dict(json.loads(said)), took, peak


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


# ── steps ──────────────────────────────────────────────────────────────────────────────────────


def rows_step(bench: Bench, rows: int, folder: Path) -> Facts:
    """Logs, dataset, model: by the commands that a user would run."""
    transforms = {f"I{n}": "log1p" for n in range(1, DENSE + 1)} | {
        f"C{n}": "slot" for n in range(1, SLOTS + 1)
    }
    fields = ", ".join(f"{name}: {meaning}" for name, meaning in transforms.items())
    (folder / "clickline.yaml").write_text(CONFIG.format(fields=fields, dim=DIM))
    every = rows + min(EVAL_ROWS, rows // 5)
    sampled, sample_seconds, _ = clickline(
        bench, folder, "sample", "--format", "csv", "--rows", str(every), "--out", "data",
        "--eval-share", repr(1 - rows / every), "--slots", str(SLOTS), "--dense", str(DENSE),
        "--cardinality", str(CARDINALITY),
    )  # fmt: skip
    for truth in (folder / "data").glob("*.truth.parquet"):
        truth.unlink()
    log_bytes = size_of(folder / "data")
    _, prepare_seconds, prepare_peak = clickline(bench, folder, "prepare")
    dataset_bytes = size_of(folder / ".clickline" / "datasets")
    shutil.rmtree(folder / "data")  # room for checkpoints
    trained, train_seconds, train_peak = clickline(bench, folder, "train")
    checkpoint = max((folder / ".clickline" / "runs").glob("*/step-*"))
    return {
        "rows": sampled["train_rows"],
        "ids": ids_in(folder, checkpoint),
        "auc": trained["evaluation"]["auc"],
        "best_auc": sampled["best_auc"],
        "sample_seconds": sample_seconds,
        "log_bytes": log_bytes,
        "prepare_seconds": prepare_seconds,
        "prepare_peak_bytes": prepare_peak,
        "dataset_bytes": dataset_bytes,
        "train_seconds": train_seconds,
        "train_peak_bytes": train_peak,
        "checkpoint_bytes": size_of(checkpoint),
        "peak_bytes": max(prepare_peak, train_peak),
        "disk_bytes": dataset_bytes + max(log_bytes, 2 * size_of(checkpoint)),
    }


def ids_in(folder: Path, checkpoint: Path) -> int:
    report = json.loads((checkpoint.parent / "report.json").read_text())
    return sum(slot["ids"] for slot in report["slots"])


def ids_step(bench: Bench, ids: int, dim: int, folder: Path) -> Facts:
    """Table, checkpoint, version; then each of the two opened by a process that has nothing else."""
    script = str(ROOT / "bench" / "peers" / "scale_ids.py")
    facts: Facts = {}
    for part in ("learn", "resume", "serve"):
        said, _, peak = run(bench, [sys.executable, script, part, str(folder), str(ids), str(dim)], folder)
        facts |= json.loads(said.splitlines()[-1]) | {f"{part}_peak_bytes": peak}
    facts["peak_bytes"] = max(facts["learn_peak_bytes"], facts["resume_peak_bytes"])
    facts["disk_bytes"] = size_of(folder)
    return facts


def shards_step(bench: Bench, steps: int, shards: int, home: Path) -> Facts:
    """One worker of a cluster on this machine."""
    script = str(ROOT / "bench" / "peers" / "train_rows.py")
    command = [sys.executable, script, str(home), "cluster", "1", str(shards), "sync"]
    said, _, _ = run(bench, command, home, f"{steps}\n{steps}\n", CLUSTER_SECONDS)
    return {"batch_seconds": float(said.splitlines()[-1]) / steps}  # the first ones were to get warm


def warm_up(bench: Bench) -> None:
    """In a fresh checkout kernels are compiled when they are first called: that belongs to no figure."""
    with tempfile.TemporaryDirectory(dir=bench.folder) as scratch:
        for part, measure in (
            ("rows", lambda work: rows_step(bench, WARM_UP, work)),
            ("ids", lambda work: ids_step(bench, WARM_UP, DIM, work)),
        ):
            work = Path(scratch, part)
            work.mkdir()
            measure(work)


# ── all of it ──────────────────────────────────────────────────────────────────────────────────


def measure_all(bench: Bench, sizes: Sequence[int], dims: Sequence[int], shards: Sequence[int]) -> None:
    small = sizes[0]
    if not bench.done:
        warm_up(bench)
    for dim in dims:
        bench.step(f"dim {dim}", lambda work, dim=dim: ids_step(bench, small, dim, work))  # type: ignore[misc]
    if not all(f"shards {count}" in bench.done for count in shards):
        with world(CLUSTER_ROWS) as home:
            for count in shards:
                bench.step(
                    f"shards {count}",
                    lambda _, count=count: shards_step(bench, 60 if small >= MILLION else 5, count, home),  # type: ignore[misc]
                )
    going = dict.fromkeys(("ids", "rows"), True)
    for before, size in zip((None, *sizes), sizes, strict=False):
        for what in going:
            if going[what]:
                like = None if before is None else (f"{what} {before}", size / before)
                measure = {
                    "ids": lambda work, size=size: ids_step(bench, size, DIM, work),  # type: ignore[misc]
                    "rows": lambda work, size=size: rows_step(bench, size, work),  # type: ignore[misc]
                }[what]
                going[what] = bench.step(f"{what} {size}", measure, like)


def series(bench: Bench, what: str) -> list[tuple[int, Facts]]:
    found = [(int(name.split()[1]), facts) for name, facts in bench.done.items() if name.split()[0] == what]
    return sorted(found, key=lambda one: one[0])


def line(found: Sequence[tuple[int, Facts]], key: str) -> Points:
    return [(size, facts[key]) for size, facts in found if facts[key] > 0]


def lines(found: Sequence[tuple[int, Facts]], names: Mapping[str, str]) -> dict[str, Points]:
    return {name: line(found, key) for name, key in names.items()}


IDS_SECONDS = {
    "write a checkpoint": "checkpoint_seconds",
    "read it again": "resume_seconds",
    "publish": "publish_seconds",
    "open the version, from disk": "open_seconds",
}
IDS_BYTES = {
    "table in memory": "table_bytes",
    "most memory while learning": "learn_peak_bytes",
    "checkpoint": "checkpoint_bytes",
    "version": "version_bytes",
    "memory of a process that serves": "served_bytes",
}
IDS_NS = {
    "a new id: find, pool, update": "new_ns",
    "find": "find_ns",
    "pool": "pool_ns",
    "update": "update_ns",
    "find and pool in a version": "lookup_ns",
}


def draw(bench: Bench) -> dict[str, str]:
    """An image for each input."""
    rows, ids, dims, shards = (series(bench, what) for what in ("rows", "ids", "dim", "shards"))
    images = {
        "rows": figure(
            "Costs by rows", "rows", _count,
            [
                Panel("time", lines(rows, {"prepare": "prepare_seconds", "train": "train_seconds"}), _seconds),
                Panel("bytes", lines(rows, {"log": "log_bytes", "dataset": "dataset_bytes", "memory of prepare": "prepare_peak_bytes", "memory of train": "train_peak_bytes", "checkpoint": "checkpoint_bytes"}), _decimal_bytes),
            ],
        ) if rows else "",
        "ids": _of_ids("Costs by ids", "ids", _count, ids),
        "dim": _of_ids("Costs by dim", "dim", lambda dim: f"{dim:g}", dims),
        "shards": figure(
            "Cost of a batch by shards", "shards", lambda count: f"{count:g}",
            [Panel("time", lines(shards, {"a batch of 4096 rows": "batch_seconds"}), _seconds)],
        ) if shards else "",
    }  # fmt: skip
    return {name: image for name, image in images.items() if image}


def _of_ids(title: str, across: str, shown: Callable[[float], str], found: list[tuple[int, Facts]]) -> str:
    panels = [
        Panel("time", lines(found, IDS_SECONDS), _seconds),
        Panel("bytes", lines(found, IDS_BYTES), _decimal_bytes),
        Panel("time for one id", lines(found, IDS_NS), _ns),
    ]
    return figure(title, across, shown, panels) if found else ""


def table(bench: Bench) -> list[Row]:
    told = []
    for size, facts in series(bench, "rows"):
        told.append(
            Row(
                f"{_count(size)} rows",
                f"prepare {_seconds(facts['prepare_seconds'])} ({size / facts['prepare_seconds']:,.0f} rows/s, "
                f"{_bytes(facts['prepare_peak_bytes'])}), train {_seconds(facts['train_seconds'])} "
                f"({size / facts['train_seconds']:,.0f} rows/s, {_bytes(facts['train_peak_bytes'])}); logs "
                f"{_bytes(facts['log_bytes'])}, dataset {_bytes(facts['dataset_bytes'])}, checkpoint "
                f"{_bytes(facts['checkpoint_bytes'])}",
                f"{_count(round(facts['ids'], -4))} ids; AUC {facts['auc']:.4f}, best reachable {facts['best_auc']:.4f}",
            )
        )
    for what, found in (("ids", series(bench, "ids")), ("dim", series(bench, "dim"))):
        for size, facts in found:
            name = f"{_count(size)} ids" if what == "ids" else f"dim {size}, {_count(facts['ids'])} ids"
            told.append(
                Row(
                    name,
                    f"table {_bytes(facts['table_bytes'])} ({facts['table_bytes'] / facts['ids']:.0f} bytes an id, peak "
                    f"{_bytes(facts['learn_peak_bytes'])}); find {_ns(facts['find_ns'])}, update {_ns(facts['update_ns'])} an id; "
                    f"checkpoint {_seconds(facts['checkpoint_seconds'])}, {_bytes(facts['checkpoint_bytes'])}, read again in "
                    f"{_seconds(facts['resume_seconds'])}; publish {_seconds(facts['publish_seconds'])}, "
                    f"{_bytes(facts['version_bytes'])}",
                    f"served: opened from disk in {_seconds(facts['open_seconds'])}, {_ns(facts['lookup_ns'])} an id, "
                    f"{_bytes(facts['served_bytes'])} of memory with all of the file in it",
                )
            )
    for size, facts in series(bench, "shards"):
        told.append(
            Row(
                f"1 worker + {size} shards", f"{facts['batch_seconds'] * 1e3:.0f} ms for a batch of 4096 rows"
            )
        )
    return told


def growth(bench: Bench) -> str:
    """The exponents of the last step, where 1 is proportional."""
    parts = []
    for what, names in (
        ("rows", {"prepare": "prepare_seconds", "train": "train_seconds", "dataset": "dataset_bytes"}),
        ("ids", {**IDS_SECONDS, "table": "table_bytes", "version": "version_bytes", "find": "find_ns", "update": "update_ns"}),
    ):  # fmt: skip
        found = series(bench, what)
        if len(found) > 1:
            shown = ", ".join(f"{name} {_exponent(line(found, key))}" for name, key in names.items())
            parts.append(f"from {_count(found[-2][0])} to {_count(found[-1][0])} {what}: {shown}")
    return "; ".join(parts)


def _exponent(points: Points) -> str:
    (x0, y0), (x1, y1) = points[-2:]
    return f"{log(y1 / y0) / log(x1 / x0):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=SIZES[-1], help="most rows, and most ids")
    parser.add_argument("--seconds", type=float, default=3600, help="after which no step is begun or goes on")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), "clickline-scale"))
    parser.add_argument("--try", dest="only_try", action="store_true", help="tiny, and nothing is written")
    asked = parser.parse_args()
    tiny = asked.only_try
    sizes = (20_000, 60_000) if tiny else tuple(size for size in SIZES if size <= asked.rows) or (asked.rows,)
    folder = asked.folder.with_name(f"{asked.folder.name}-try") if tiny else asked.folder
    folder.mkdir(parents=True, exist_ok=True)
    results = folder / "results.json"
    done = json.loads(results.read_text()) if results.exists() and not tiny else {}
    bench = Bench(folder, time.monotonic() + asked.seconds, done)
    print(f"scale: up to {_count(sizes[-1])} rows and ids, {asked.seconds:.0f} s, in {folder}", flush=True)
    measure_all(bench, sizes, DIMS[:2] if tiny else DIMS, SHARDS[:1] if tiny else SHARDS)
    images = draw(bench)
    into = folder if tiny else IMAGES
    for name, image in images.items():
        (into / f"scale-{name}.svg").write_text(image)
    shown = "\n\n".join(f"![Costs by {name}](images/scale-{name}.svg)" for name in images)
    notes = [
        f"A row is a line of CSV with {SLOTS} slots, {DENSE} numbers and a time, from `clickline sample` (the largest slot has "
        f"{_count(CARDINALITY)} ids, and new ones are born every hour), learned once by Wide & Deep (dim {DIM}, 128-64). Times are "
        "those of the whole commands; the logs are removed when they are prepared. Ids are drawn uniformly from all that a table "
        f"has, {SLOTS} x 8192 a batch, on all cores; a checkpoint is written at the share of a core that training leaves it. "
        "A version is opened as a server does, sample scored, with none of its file in memory. In the images the dotted line is a cost "
        "that grows as its input does.",
        f"Growth as a power of the input, 1 is proportional: {growth(bench)}." if growth(bench) else "",
        f"Not measured: {'; '.join(bench.stopped)}." if bench.stopped else "",
        shown,
    ]
    publish(
        "scale",
        "Scale on this machine",
        f"`make bench-scale` (up to {_count(sizes[-1])} rows and ids, in at most {asked.seconds:.0f} s).",
        table(bench),
        "\n\n".join(note for note in notes if note),
        write=not tiny,
    )
    if not bench.stopped:  # else the same command goes on behind what was measured
        results.unlink()


if __name__ == "__main__":
    main()
