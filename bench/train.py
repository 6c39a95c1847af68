"""Training Wide & Deep: rows/s compared with peers and with the limit, growth to 50 M ids, start, checkpoints.

python bench/train.py                      all parts, into docs/benchmarks.md
python bench/train.py speed growth         some parts: speed, growth, start, checkpoints
python bench/train.py --try                a smoke test, printed only
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
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from measure import ROOT, Row, alternate, peer_python, publish

ROWS = 4096
CORES = 2
MILLION = 1_000_000
NETWORK = "26 slots, dim 9, 13 dense, 512-256-128-32, batch 4096"


@dataclass(frozen=True)
class Size:
    """The size of a benchmark: real, or a smoke test."""

    turns: int
    seconds: float  # of one turn of one contestant
    small: int  # ids in the table
    middle: int
    large: int
    checkpointed: int
    write: bool


REAL = Size(7, 1.5, MILLION, 10 * MILLION, 50 * MILLION, 5 * MILLION, True)
TRY = Size(1, 0.0, 50_000, 100_000, 200_000, 100_000, False)


class Contestant:
    """A process that trains on batches on request, and is idle otherwise."""

    def __init__(self, title: str, environment: str | None, script: str, *arguments: object) -> None:
        self.title = title
        python = sys.executable if environment is None else str(peer_python(environment))
        command = [python, str(ROOT / "bench" / "peers" / script), *map(str, arguments)]
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (as long as the process)
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )
        print(f"  starting {title} …", flush=True)
        line = self._answer()
        while not line.startswith("ready"):  # skip output of the library
            line = self._answer()
        self.facts: dict[str, Any] = json.loads(line.removeprefix("ready"))
        self._steps = 1

    def warm_up(self, seconds: float) -> None:
        """Run the first steps and choose the number of steps per turn."""
        self._run(3 if seconds else 1)
        if seconds:
            self._steps = max(2, round(3 * seconds / self._run(3)))

    def turn(self) -> float:
        """Run one turn; returns the seconds per million rows."""
        return self._run(self._steps) / (self._steps * ROWS) * MILLION

    def _run(self, steps: int) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        return float(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            raise RuntimeError(f"{self.title} ended:\n{self._errors.read()[-3000:]}")
        return line

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()


@contextmanager
def contest(
    size: Size, entries: dict[str, tuple[Any, ...]]
) -> Iterator[tuple[dict[str, Contestant], dict[str, float]]]:
    """Start all contestants, run them in turns, and yield them with the best rows/s of each."""
    with ExitStack() as stack:
        contestants = {}
        for name, entry in entries.items():
            try:
                contestants[name] = Contestant(name, *entry)
            except subprocess.CalledProcessError as error:  # its environment could not be created
                print(f"  left out: {error}", flush=True)
                continue
            stack.callback(contestants[name].close)
            contestants[name].warm_up(size.seconds)
        print("  seconds for a million rows:", flush=True)
        best = alternate({name: c.turn for name, c in contestants.items()}, size.turns)
        yield contestants, {name: MILLION / seconds for name, seconds in best.items()}


def shown(ids: int) -> str:
    return f"{ids // MILLION} M" if ids >= MILLION else f"{ids:,}"


# ── parts ──────────────────────────────────────────────────────────────────────────────────────


def speed(size: Size) -> None:
    small, middle = shown(size.small), shown(size.middle)
    dense, plain = "dense network alone, eager PyTorch", "plain PyTorch, SparseAdam"
    fbgemm = "FBGEMM CPU tables, row-wise AdaGrad"
    fuxictr, fit, step = "FuxiCTR", "DeepCTR-Torch, `fit`", "DeepCTR-Torch, its step alone, no L2"
    fit_middle, step_middle = f"{fit}, {middle} ids", f"{step}, {middle} ids"
    ours, bf16, ours_middle = "Clickline", "Clickline, `precision: bf16`", f"Clickline, {middle} ids"
    entries: dict[str, tuple[Any, ...]] = {
        dense: (None, "train_dense.py", size.small),
        ours: (None, "train_clickline.py", size.small, "fp32"),
        bf16: (None, "train_clickline.py", size.small, "bf16"),
        fbgemm: ("fbgemm", "train_fbgemm.py", size.small),
        plain: (None, "train_plain.py", size.small),
        fuxictr: ("fuxictr", "train_fuxictr.py", size.small),
        fit: ("deepctr", "train_deepctr.py", size.small, "fit"),
        step: ("deepctr", "train_deepctr.py", size.small, "step"),
        ours_middle: (None, "train_clickline.py", size.middle, "fp32"),
        fit_middle: ("deepctr", "train_deepctr.py", size.middle, "fit"),
        step_middle: ("deepctr", "train_deepctr.py", size.middle, "step"),
    }
    with contest(size, entries) as (_, rate):
        pass

    def line(name: str, against: str, goal: str = "") -> Row:
        if name not in rate:
            return Row(name, "not measured", "", goal)
        ratio = f"ours is {rate[against] / rate[name]:.2f}x" if against else ""
        return Row(name, f"{rate[name]:,.0f} rows/s", ratio, goal)

    publish(
        "train",
        "Training Wide & Deep",
        f"`python bench/train.py speed` ({NETWORK}, {small} ids drawn uniformly unless said otherwise, {CORES} cores; "
        f"best of {size.turns} turns of {size.seconds:g} s each, all in one run, one at a time).",
        [
            line(ours, ""),
            line(bf16, ""),
            line(dense, ours, "≥ 0.9x"),
            line(fbgemm, ours, "≥ 1.2x"),
            line(plain, ours, "≥ 1.6x"),
            line(fuxictr, ours, "≥ 3x"),
            line(fit, ours, "≥ 4x"),
            line(step, ours),
            line(ours_middle, ""),
            line(fit_middle, ours_middle, "≥ 15x"),
            line(step_middle, ours_middle),
        ],
        "All start from batches in memory. Ours also counts impressions and clicks of every id and looks up rows by 64-bit "
        "ids; the others get row numbers of fixed-size tables. The dense network alone computes no gradient for its "
        "input. FuxiCTR is measured without its data loader; it also embeds each number, so its first layer is wider "
        "(351 inputs, not 247). DeepCTR-Torch's `fit` is what its users call, with its defaults: a data loader, and L2 "
        "over all weights.",
        write=size.write,
    )


def growth(size: Size) -> None:
    sizes = (size.small, size.middle, size.large)
    names = [f"{shown(ids)} ids" for ids in sizes]
    entries = {
        name: (None, "train_clickline.py", ids, "fp32") for name, ids in zip(names, sizes, strict=True)
    }
    with contest(size, entries) as (contestants, rate):
        facts = {name: contestants[name].facts for name in names}
    rows = []
    for name in names:
        first, last = name == names[0], name == names[-1]
        rows.append(
            Row(
                name,
                f"{rate[name]:,.0f} rows/s",
                "" if first else f"{rate[name] / rate[names[0]]:.2f} of {names[0]}",
                "≥ 0.85" if last else "",
            )
        )
    for name in names:
        results = facts[name]
        used = f"{results['table_bytes'] / results['ids']:.0f} bytes per id"
        rows.append(Row(f"{name}, table", used, "", "≤ 171, 1.5x the payload"))
    largest = facts[names[-1]]
    rows += [
        Row(f"{names[-1]}, table", f"{largest['table_bytes'] / 2**30:.1f} GiB", "", "< 8 GiB"),
        Row(f"{names[-1]}, peak of the process", f"{largest['peak_bytes'] / 2**30:.1f} GiB"),
        Row(
            f"{names[-1]}, longest step while growing",
            f"{largest['longest_growth']:.2f} s",
            "for 65,536 rows of new ids",
            "< 1 s",
        ),
    ]
    publish(
        "train-growth",
        "Training while the table grows",
        f"`python bench/train.py growth` ({NETWORK}, AdaGrad, FTRL for the wide part; whole steps, best of {size.turns} turns).",
        rows,
        write=size.write,
    )


def start(size: Size) -> None:
    """The whole command on a single batch, including its first step."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder / "rows.tsv", ROWS, 1000)
        config = write_config(folder)
        clickline(config, "prepare")
        seconds = []
        for _ in range(3 if size.seconds else 2):
            shutil.rmtree(folder / "home" / "runs", ignore_errors=True)
            began = time.perf_counter()
            clickline(config, "train")
            seconds.append(time.perf_counter() - began)
    publish(
        "train-start",
        "Cold start of `clickline train`",
        "`python bench/train.py start` (a dataset of one batch; the whole command: start, checks, export, the first "
        "step, its checkpoint).",
        [
            Row("first time here", f"{seconds[0]:.1f} s"),
            Row("again, compiled kernels cached", f"{min(seconds[1:]):.1f} s", "", "< 15 s"),
        ],
        write=size.write,
    )


def checkpoints(size: Size) -> None:
    """Training with continuous checkpoints compared with a single final one."""
    values = size.checkpointed // 26
    first, rows = values * 4, values * 12  # the first rows contain 98 % of the values
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder / "rows.tsv", rows, values)
        config = write_config(folder)
        clickline(config, "prepare")
        runs: dict[str, list[dict[str, Any]]] = {"1d": [], "0s": []}
        for _ in range(2 if size.seconds else 1):
            for every, results in runs.items():
                shutil.rmtree(folder / "home" / "runs", ignore_errors=True)
                script = str(ROOT / "bench" / "peers" / "train_checkpoints.py")
                done = run([sys.executable, script, str(config), every, str(first)])
                results.append(json.loads(done.splitlines()[-1]))
                print(f"  checkpoint_every: {every}: {results[-1]}", flush=True)
    never, always = (min(results, key=lambda one: one["seconds"]) for results in runs.values())
    lost = always["seconds"] - never["seconds"]
    each = lost / max(1, always["checkpoints"])
    counted = always["rows"]
    publish(
        "train-checkpoints",
        "Checkpoints while training",
        f"`python bench/train.py checkpoints` ({shown(size.checkpointed)} ids, {counted:,} rows, the last two thirds "
        "of an epoch; best of 2 runs each, in turns).",
        [
            Row(
                "none", f"{counted / never['seconds']:,.0f} rows/s", f"longest step {never['longest']:.2f} s"
            ),
            Row(
                "one after the other, no pause",
                f"{counted / always['seconds']:,.0f} rows/s",
                f"longest step {always['longest']:.2f} s",
            ),
            Row(
                "time lost to each", f"{each:.2f} s", f"{always['checkpoints']} in {always['seconds']:.0f} s"
            ),
            Row("time lost with no pause", f"{lost / always['seconds']:.1%}", "", "< 5 %"),
            Row("time lost with one every 5 minutes, the default", f"{each / 300:.2%}", "", "< 5 %"),
        ],
        write=size.write,
    )


# ── files and commands ─────────────────────────────────────────────────────────────────────────


def write_rows(file: Path, rows: int, values: int) -> None:
    """Write Criteo lines with one-digit numbers and eight-digit categories, `values` distinct ones per slot."""
    rng = np.random.default_rng(0)
    with file.open("wb") as out:
        for first in range(0, rows, 1 << 16):
            count = min(1 << 16, rows - first)
            head_NW = np.full((count, 2 * 14), ord("\t"), np.uint8)  # label and numbers
            head_NW[:, 0] = ord("0") + rng.integers(0, 2, count)
            head_NW[:, 2::2] = ord("0") + rng.integers(0, 10, (count, 13))
            slots_NSW = np.full((count, 26, 9), ord("\t"), np.uint8)
            values_NS = rng.integers(0, values, (count, 26))
            slots_NSW[..., :8] = ord("0") + values_NS[..., None] // 10 ** np.arange(7, -1, -1) % 10
            slots_NSW[:, -1, -1] = ord("\n")
            out.write(np.concatenate((head_NW, slots_NSW.reshape(count, -1)), axis=1).tobytes())


def write_config(folder: Path) -> Path:
    config = folder / "clickline.yaml"
    config.write_text(f"data: {{format: criteo, train: {folder / 'rows.tsv'}}}\nhome: {folder / 'home'}\n")
    return config


def clickline(config: Path, *arguments: str) -> None:
    run([str(Path(sys.executable).with_name("clickline")), *arguments, "-q", "-c", str(config)])


def run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return done.stdout


PARTS = {"speed": speed, "growth": growth, "start": start, "checkpoints": checkpoints}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--try", dest="only_try", action="store_true", help="tiny, and nothing is written")
    options = parser.parse_args()
    if unknown := [name for name in options.parts if name not in PARTS]:
        parser.error(f"unknown part {', '.join(unknown)}: choose from {', '.join(PARTS)}")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])  # inherited by the contestants
    for name in options.parts or PARTS:
        print(f"train: {name}", flush=True)
        PARTS[name](TRY if options.only_try else REAL)


if __name__ == "__main__":
    main()
