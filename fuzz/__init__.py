"""Coverage-guided fuzzing of all code that reads untrusted bytes. `docs/fuzzing.md` explains how to run it."""

from __future__ import annotations

import sys
from pathlib import Path

__all__: list[str] = []

# The writers of record formats, the test models and the tables come from the tests.
_TESTS = Path(__file__).parents[1] / "tests"
for _folder in (_TESTS, _TESTS / "serving" / "protocols", _TESTS / "embedding" / "serving"):
    if str(_folder) not in sys.path:
        sys.path.append(str(_folder))
