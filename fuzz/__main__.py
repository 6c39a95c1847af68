"""`python -m fuzz` runs every target, each in a process of its own; `python -m fuzz NAME …` these; `list` names them.

A finding ends its target: what was said is shown, the input is kept, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from fuzz.surfaces import SURFACES, load

_STATES = re.compile(rb"stat::number_of_executed_units: (\d+)")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz")
    parser.add_argument("names", nargs="*", metavar="NAME", help="of targets, all without any; or: list")
    parser.add_argument("--seconds", type=int, default=30, help="of each target")
    parser.add_argument("--memory", type=int, default=2048, help="MiB that a target may take")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.names == ["list"]:
        print("\n".join(SURFACES))
        return 0
    if unknown := [name for name in asked.names if name not in SURFACES]:
        parser.error(f"there is no target {unknown[0]}; there are {', '.join(SURFACES)}")
    if asked.inside:
        _fuzz(asked.names[0], asked.seconds, asked.memory)
        return 0
    work = Path(tempfile.gettempdir(), f"clickline-fuzz-{os.getuid()}")
    found = [name for name in asked.names or SURFACES if not _clean(name, asked.seconds, asked.memory, work)]
    if found:
        print(f"findings in: {', '.join(found)}; their inputs are in {work}")
    return 1 if found else 0


def _clean(name: str, seconds: int, memory: int, work: Path) -> bool:
    """Whether a target ran to its end without a finding."""
    folder = work / name
    folder.mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ,
        "NUMBA_BOUNDSCHECK": "1",  # an index outside an array raises; else it would be silent
        "NUMBA_CACHE_DIR": str(work / "numba"),  # apart from the kernels without those checks
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    command = [sys.executable, "-m", "fuzz", name, "--inside", "--seconds", str(seconds)]
    command += ["--memory", str(memory)]
    log = folder / "log"
    with log.open("wb") as out:
        done = subprocess.run(
            ["nice", "-n", "10", *command], cwd=folder, env=environment, stdout=out, stderr=out
        )
    said = log.read_bytes()
    executed = _STATES.search(said)
    count = f"{int(executed[1]):,} executions" if executed else "ended early"
    print(
        f"{name:12} {count}{'' if done.returncode == 0 else f', exit code {done.returncode}: {log}'}",
        flush=True,
    )
    if done.returncode:
        print(said[-4000:].decode(errors="replace"))
    return done.returncode == 0


def _fuzz(name: str, seconds: int, memory: int) -> None:
    import atheris

    target = load(name)
    corpus = Path("corpus")
    corpus.mkdir(exist_ok=True)
    for number, seed in enumerate(target.seeds()):
        target.run(seed)  # compiles every kernel that a seed needs, before the clock of a run begins
        (corpus / f"seed-{number:03d}").write_bytes(seed)
    _instrument()
    logging.getLogger("clickline").setLevel(logging.ERROR)  # what is noted of an input is no finding
    atheris.Setup(
        [
            sys.argv[0],
            str(corpus),
            f"-max_total_time={seconds}",
            f"-rss_limit_mb={memory}",
            "-timeout=300",  # an input may be the first that needs a kernel, which is compiled then
            "-max_len=8192",
            "-print_final_stats=1",
            "-artifact_prefix=finding-",
        ],
        target.run,
    )
    atheris.Fuzz()


def _instrument() -> None:
    """Tell the fuzzer which branches of our plain functions are taken. Compiled kernels stay as they are."""
    import inspect
    import types

    import atheris

    for module in [module for name, module in sys.modules.items() if name.startswith("clickline")]:
        owners = [module, *(kind for _, kind in inspect.getmembers(module, inspect.isclass))]
        for owner in owners:
            for member in vars(owner).values():
                function = getattr(member, "__func__", member)
                if isinstance(function, property):
                    function = function.fget
                if (
                    isinstance(function, types.FunctionType)
                    and function.__module__ == module.__name__
                    and not hasattr(function, "_fuzzed")
                ):
                    function._fuzzed = True  # type: ignore[attr-defined]
                    atheris.instrument_func(function)


if __name__ == "__main__":
    sys.exit(main())
