"""Runs the benchmarks, one after the other. Use an otherwise idle machine.

python bench/run.py                 all of them
python bench/run.py train quality   some of them
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

NAMES = (
    "prepare",
    "embedding",
    "frozen",
    "lookup",
    "serve",
    "http2",
    "brpc",
    "train",
    "quality",
    "follow",
    "cluster",
)


def main() -> None:
    chosen = sys.argv[1:] or NAMES
    unknown = [name for name in chosen if name not in NAMES]
    if unknown:
        sys.exit(f"unknown benchmark {', '.join(unknown)}: choose from {', '.join(NAMES)}")
    del sys.argv[1:]  # the benchmarks parse their own arguments
    for name in chosen:
        runpy.run_path(str(Path(__file__).with_name(f"{name}.py")), run_name="__main__")


if __name__ == "__main__":
    main()
