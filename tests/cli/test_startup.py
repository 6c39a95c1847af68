"""The command starts quickly, and importing it has no side effects."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from clickline_process import run

HEAVY = ("numpy", "numba", "pyarrow", "fsspec", "torch", "ray", "polars", "pandas", "pydantic")


def test_help_takes_half_a_second(tmp_path: Path) -> None:
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        done = run("--help", cwd=tmp_path)
        seconds.append(time.perf_counter() - began)
        assert done.returncode == 0
        assert "prepare" in done.stdout
    assert min(seconds) < 0.5, seconds


@pytest.mark.parametrize("module", ["clickline", "clickline.cli.main", "clickline.cli.app"])
def test_import_loads_no_heavy_modules(module: str) -> None:
    code = f"import sys, {module}; print(*sorted(set(sys.modules) & set({HEAVY!r})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_import_starts_no_thread_and_installs_no_signal_handler() -> None:
    code = (
        "import signal, threading; before = signal.getsignal(signal.SIGTERM)\n"
        "import clickline.cli.main, clickline.cli.app\n"
        "assert signal.getsignal(signal.SIGTERM) is before and threading.active_count() == 1"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_version(tmp_path: Path) -> None:
    import clickline

    done = run("--version", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"clickline {clickline.__version__}\n")


def test_no_command_prints_help_and_exits_2(tmp_path: Path) -> None:
    done = run(cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout.startswith("Usage: clickline ")
