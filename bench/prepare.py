"""Prepare and sample: rows/s compared with bare parsing (Polars) and with FuxiCTR's preprocessing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from itertools import islice
from pathlib import Path

from clickline.config import load_config
from clickline.data.prepare.run import prepare
from clickline.data.sample.generate import SampleOptions, generate
from clickline.progress import Progress
from measure import Row, alternate, publish, run_peer, timed

ROWS = 2_000_000
EVAL_ROWS = 20_000  # sample always writes some
FUXICTR_ROWS = 137_139
FIELDS = "label," + ",".join([f"I{i}" for i in range(1, 14)] + [f"C{i}" for i in range(1, 27)])


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print(f"writing {ROWS:,} synthetic Criteo rows …", flush=True)
        generate(SampleOptions(format="criteo", rows=1000, out=folder / "warm"), Progress())
        options = SampleOptions(
            format="criteo", rows=ROWS + EVAL_ROWS, out=folder, eval_share=EVAL_ROWS / (ROWS + EVAL_ROWS)
        )
        sampled = timed(lambda: generate(options, Progress()))
        source = folder / "train.tsv"
        size = source.stat().st_size
        small = folder / "small.tsv"
        with source.open("rb") as lines, small.open("wb") as out:
            out.writelines(islice(lines, FUXICTR_ROWS))
        header = folder / "small.csv"
        header.write_text(FIELDS + "\n" + small.read_text().replace("\t", ","))
        prepare_file(folder, small)  # loads the compiled kernels

        whole = alternate(
            {
                "clickline prepare": lambda: prepare_file(folder, source),
                "polars.read_csv": lambda: run_peer("polars", "read_csv_polars.py", str(source)),
            },
            times=5,
        )
        part = alternate(
            {
                "clickline prepare": lambda: prepare_file(folder, small),
                "FuxiCTR": lambda: run_peer("fuxictr", "preprocess_fuxictr.py", str(header)),
            },
            times=3,
        )
        peak = peak_memory(folder, source)
        ours, bare = whole["clickline prepare"], whole["polars.read_csv"]
        ours_small, fuxictr = part["clickline prepare"], part["FuxiCTR"]
        publish(
            "prepare",
            "Prepare, Criteo TSV",
            f"`make bench` (best of 5 and of 3, in turns; {ROWS:,} synthetic rows, {size / 2**20:,.0f} MiB).",
            [
                Row("`polars.read_csv` alone, same file", f"{ROWS / bare:,.0f} rows/s"),
                Row("`clickline prepare`: read, encode, count, write", f"{ROWS / ours:,.0f} rows/s", f"{bare / ours:.2f} of bare parsing", "≥ 0.4"),
                Row(f"FuxiCTR's preprocessing, {FUXICTR_ROWS:,} rows", f"{FUXICTR_ROWS / fuxictr:,.0f} rows/s"),
                Row(f"`clickline prepare`, the same {FUXICTR_ROWS:,} rows", f"{FUXICTR_ROWS / ours_small:,.0f} rows/s", f"{fuxictr / ours_small:.0f}x FuxiCTR", "≥ 10x"),
                Row("peak memory of `clickline prepare`", f"{peak / 2**20:,.0f} MiB", "", "flat, < 1.5 GiB"),
                Row("`clickline sample`, writing that file", f"{(ROWS + EVAL_ROWS) / sampled:,.0f} rows/s", "", "≥ 100,000"),
            ],
        )  # fmt: skip


def prepare_file(folder: Path, source: Path) -> float:
    """Seconds to prepare a file from scratch."""
    shutil.rmtree(folder / "home", ignore_errors=True)
    config = folder / "clickline.yaml"
    config.write_text(f"data: {{format: criteo, train: {source}}}\nhome: {folder / 'home'}\n")
    return prepare(load_config(config)).seconds


def peak_memory(folder: Path, source: Path) -> int:
    """Largest resident size of a process that prepares the file, in bytes."""
    shutil.rmtree(folder / "home", ignore_errors=True)
    config = folder / "clickline.yaml"
    config.write_text(f"data: {{format: criteo, train: {source}}}\nhome: {folder / 'home'}\n")
    command = [str(Path(sys.executable).with_name("clickline")), "prepare", "-q", "-c", str(config)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"clickline prepare ended with {process.returncode}")
    return usage.ru_maxrss * 1024


if __name__ == "__main__":
    main()
