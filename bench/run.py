"""Every benchmark, one after the other. Run it on a machine that does nothing else."""

from __future__ import annotations

import runpy
from pathlib import Path

for script in ("prepare.py", "embedding.py"):
    runpy.run_path(str(Path(__file__).with_name(script)), run_name="__main__")
