"""Memory does not grow with the number of rows in any streaming format."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from clickline.data.sample.generate import SampleOptions, generate
from clickline.progress import Progress

CLICKLINE = str(Path(sys.executable).with_name("clickline"))


# Linux counts what a process held before exec, so a child of this large process would seem as large: hence a small
# process in between.
MEASURE = (
    "import os, subprocess, sys\n"
    "process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)\n"
    "_, status, usage = os.wait4(process.pid, 0)\n"
    "print(os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024)\n"
)


def peak_bytes(folder: Path, *command: str, code: int = 0) -> int:
    """The peak resident size of a process, which must exit with this code."""
    measured = subprocess.run(
        [sys.executable, "-c", MEASURE, CLICKLINE, *command],
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    ended, peak = measured.stdout.split()
    assert int(ended) == code
    return int(peak)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ending"), [("criteo", "tsv"), pytest.param("slots", "txt", marks=pytest.mark.soak)]
)
def test_peak_memory_is_flat_and_below_the_promise(project, name, ending):
    peaks = []
    for rows in (400_000, 2_400_000):
        generate(
            SampleOptions(format=name, rows=rows, out=project.folder / "data", eval_share=0.01), Progress()
        )
        slot_conf = {"slot_conf": "data/slot.conf"} if name == "slots" else {}
        project.configure(
            {"format": name, "train": f"data/train.{ending}", "shard_size": "16MiB", **slot_conf}
        )
        peaks.append(peak_bytes(project.folder, "prepare", "-q"))
    small, large = peaks
    assert large < 1.5 * 2**30
    assert large < small + 64 * 2**20


@pytest.mark.slow
def test_a_gzip_bomb_is_bounded(project):
    bomb = subprocess.run(
        ["sh", "-c", "head -c 2000000000 /dev/zero | gzip -1"], capture_output=True, check=True
    ).stdout
    project.write("a.tsv.gz", bomb)
    project.configure({"train": "a.tsv.gz", "max_bad_ratio": 1})
    assert peak_bytes(project.folder, "prepare", "-q", code=4) < 1.5 * 2**30
