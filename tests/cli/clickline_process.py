"""The real console script, as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(sys.executable).parent / "clickline"


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "COLUMNS": "100", **more}


def run(*arguments: str | Path, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT, *arguments], cwd=cwd, env=environment(**more), capture_output=True, text=True, timeout=120
    )


def start(*arguments: str | Path, cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [SCRIPT, *arguments],
        cwd=cwd,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
