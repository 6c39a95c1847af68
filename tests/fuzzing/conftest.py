"""The fuzz targets are in `fuzz/` at the project root; here they run briefly, on inputs from Hypothesis."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
for folder in (
    ROOT,
    *(ROOT / "tests" / name for name in ("serving/protocols", "embedding/serving", "serving", "studio")),
):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
