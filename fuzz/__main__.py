"""`python -m fuzz` runs every target, each in its own process; `python -m fuzz NAME …` runs some; `list` lists them.

A finding stops its target: its output is printed, the input is saved, and the exit code is 1.
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

_EXECUTIONS = re.compile(rb"stat::number_of_executed_units: (\d+)")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz")
    parser.add_argument("names", nargs="*", metavar="NAME", help="targets to run, all by default; or: list")
    parser.add_argument("--seconds", type=int, default=30, help="duration of each target")
    parser.add_argument("--memory", type=int, default=2048, help="memory limit of a target in MiB")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.names == ["list"]:
        print("\n".join(SURFACES))
        return 0
    if unknown := [name for name in arguments.names if name not in SURFACES]:
        parser.error(f"there is no target {unknown[0]}; available: {', '.join(SURFACES)}")
    if arguments.inside:
        _fuzz(arguments.names[0], arguments.seconds, arguments.memory)
        return 0
    work = Path(tempfile.gettempdir(), f"clickline-fuzz-{os.getuid()}")
    findings = [
        name
        for name in arguments.names or SURFACES
        if not _run_target(name, arguments.seconds, arguments.memory, work)
    ]
    if findings:
        print(f"findings in: {', '.join(findings)}; their inputs are in {work}")
    return 1 if findings else 0


def _run_target(name: str, seconds: int, memory: int, work: Path) -> bool:
    """Run a target; returns whether it had no finding."""
    folder = work / name
    folder.mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ,
        "NUMBA_BOUNDSCHECK": "1",  # an index outside an array raises instead of going unnoticed
        "NUMBA_CACHE_DIR": str(work / "numba"),  # separate from the kernels without these checks
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    command = [sys.executable, "-m", "fuzz", name, "--inside", "--seconds", str(seconds)]
    command += ["--memory", str(memory)]
    log = folder / "log"
    with log.open("wb") as out:
        done = subprocess.run(
            ["nice", "-n", "10", *command], cwd=folder, env=environment, stdout=out, stderr=out
        )
    output = log.read_bytes()
    executed = _EXECUTIONS.search(output)
    count = f"{int(executed[1]):,} executions" if executed else "ended early"
    print(
        f"{name:12} {count}{'' if done.returncode == 0 else f', exit code {done.returncode}: {log}'}",
        flush=True,
    )
    if done.returncode:
        print(output[-4000:].decode(errors="replace"))
    return done.returncode == 0


def _fuzz(name: str, seconds: int, memory: int) -> None:
    import atheris

    target = load(name)
    corpus = Path("corpus")
    corpus.mkdir(exist_ok=True)
    for number, seed in enumerate(target.seeds()):
        target.run(seed)  # compiles the kernels that a seed needs, before the timed run
        (corpus / f"seed-{number:03d}").write_bytes(seed)
    _instrument()
    logging.getLogger("clickline").setLevel(logging.ERROR)  # warnings about an input are not findings
    atheris.Setup(
        [
            sys.argv[0],
            str(corpus),
            f"-max_total_time={seconds}",
            f"-rss_limit_mb={memory}",
            "-timeout=300",  # an input may need a kernel that is not compiled yet
            "-max_len=8192",
            "-print_final_stats=1",
            "-artifact_prefix=finding-",
        ],
        target.run,
    )
    atheris.Fuzz()


def _instrument() -> None:
    """Instrument Clickline's Python functions for branch coverage. Compiled kernels are not instrumented."""
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
