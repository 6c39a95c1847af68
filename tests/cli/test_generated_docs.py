"""docs/config.md, docs/cli.md and docs/errors.md match the program."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRINT = "import runpy, json; print(json.dumps(runpy.run_path('docs/generate.py')['pages']()))"


def pages(**environment: str) -> dict[str, str]:
    import json

    done = subprocess.run(
        [sys.executable, "-c", PRINT],
        cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def fresh() -> dict[str, str]:
    return pages()


@pytest.mark.parametrize("name", ["config.md", "cli.md", "errors.md"])
def test_generated_page_is_up_to_date(fresh: dict[str, str], name: str) -> None:
    on_disk = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert on_disk == fresh[name], "run .venv/bin/python docs/generate.py"


def test_generated_pages_do_not_depend_on_terminal_and_home(fresh: dict[str, str]) -> None:
    assert pages(COLUMNS="40", FORCE_COLOR="1", TERM="dumb", HOME="/nonexistent", LANG="C") == fresh


def test_generated_pages_list_every_key_and_command(fresh: dict[str, str]) -> None:
    for key in (
        "`data.max_bad_ratio`",
        "`storage.credentials_file`",
        "`gate.vs_current`",
        "`time_format`",
        "`wait`",
    ):
        assert key in fresh["config.md"]
    for command in ("init", "check", "sample", "prepare", "cache status", "cache prefetch", "cache clear"):
        assert f"## clickline {command}\n" in fresh["cli.md"]
