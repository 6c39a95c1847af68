"""Shared by all benchmarks: environments of peers, alternating runs, and the results page."""

from __future__ import annotations

import os
import platform
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
PEERS = ROOT / ".venv-peers"


@dataclass(frozen=True)
class Row:
    """One row of a table: what ran, how fast, and its ratio to the baseline."""

    name: str
    figure: str
    ratio: str = ""
    goal: str = ""


def peer_python(name: str) -> Path:
    """The Python interpreter of a peer's environment, which is created on first use from bench/peers/NAME.txt."""
    python = PEERS / name / "bin" / "python"
    ready = PEERS / name / "ready"
    if not ready.exists():
        print(f"creating the environment of {name} in {python.parents[1].relative_to(ROOT)} …", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(PEERS / name)], check=True)
        listed = ROOT / "bench" / "peers" / f"{name}.txt"
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", "-r", str(listed)], check=True)
        ready.touch()
    return python


def free_ports(count: int) -> list[int]:
    """Free ports."""
    with ExitStack() as held:
        found = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in found:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in found]


def run_peer(name: str, script: str, *arguments: str) -> float:
    """Seconds reported by a peer's script, without its start and imports."""
    command = [str(peer_python(name)), str(ROOT / "bench" / "peers" / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{script} failed:\n{done.stderr[-3000:]}")
    return float(done.stdout.split()[-1 if script.startswith("preprocess") else 0])


def alternate(runs: Mapping[str, Callable[[], float]], times: int) -> dict[str, float]:
    """The best of `times` runs of each, alternating, so that other load affects all equally."""
    best = {name: float("inf") for name in runs}
    for turn in range(times):
        for name, run in runs.items():
            best[name] = min(best[name], run())
            print(f"  {turn + 1}/{times} {name}: {best[name]:.3f} s", flush=True)
    return best


def machine() -> str:
    """A description of this machine."""
    model = "unknown processor"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores ({model}), {memory:.0f} GiB, Python {platform.python_version()}"


def publish(
    section: str, title: str, how: str, rows: list[Row], notes: str = "", *, write: bool = True
) -> None:
    """Print a table and replace it in docs/benchmarks.md; without `write`, only print it."""
    lines = [f"## {title}", "", f"Measured {date.today():%Y-%m-%d} on {machine()}. {how}", ""]
    lines += ["| what | figure | ratio | goal |", "|---|---|---|---|"]
    lines += [f"| {row.name} | {row.figure} | {row.ratio} | {row.goal} |" for row in rows]
    if notes:
        lines += ["", notes]
    text = "\n".join(lines)
    print("\n" + text + "\n", flush=True)
    if not write:
        return
    page = PAGE.read_text()
    begin, end = f"<!-- {section}: begin -->", f"<!-- {section}: end -->"
    if begin not in page:
        page += f"\n{begin}\n{end}\n"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    PAGE.write_text(pattern.sub(lambda _: f"{begin}\n{text}\n{end}", page))


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
