"""Coverage-guided fuzzing of everything that reads what others wrote. `docs/fuzzing.md` says how to run it."""

from __future__ import annotations

import sys
from pathlib import Path

__all__: list[str] = []

# The writers of record formats, the doors' models and the tables are the tests' own.
_TESTS = Path(__file__).parents[1] / "tests"
for _folder in (_TESTS, _TESTS / "serving" / "protocols", _TESTS / "embedding" / "serving"):
    if str(_folder) not in sys.path:
        sys.path.append(str(_folder))
