"""Compiled kernels are used as long as what they were compiled from is unchanged, and no longer."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import clickline
from clickline import numba_cache

PACKAGE = Path(clickline.__file__).parent
FILES = {
    "__init__.py": "",
    "limits.py": "LIMIT = 10\nUNUSED = 1\n",
    "inner/__init__.py": "from toy.inner.adding import add\n",
    "inner/adding.py": '''
"""A kernel that others inline."""
from toy.numba_cache import njit
from toy import limits

@njit(cache=True, inline="always")
def add(a: int, b: int) -> int:
    """Sum, up to a limit."""
    return min(a + b, limits.LIMIT)  # saturates

def describe():
    return "adds"
''',
    "outer.py": """
from toy.inner import add
from toy.numba_cache import njit

@njit(cache=True)
def total(values):
    result = 0
    for value in values:
        result = add(result, value)
    return result
""",
    "alone.py": """
from toy.numba_cache import njit

@njit(cache=True)
def double(value):
    return 2 * value
""",
}
PROGRAM = """
import numpy, json
from toy.outer import total
from toy.alone import double
results = total(numpy.arange(4)), double(4)
print(json.dumps([*results, *(sum(f.stats.cache_hits.values()) for f in (total, double))]))
"""


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    package = tmp_path / "toy"
    for name, text in FILES.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    shutil.copy(PACKAGE / "numba_cache.py", package)
    return package


def change(package: Path, name: str, old: str, new: str) -> None:
    text = (package / name).read_text()
    assert text.count(old) == 1
    (package / name).write_text(text.replace(old, new))


def run(package: Path, **environment: str) -> tuple[int, int, bool, bool]:
    """Both kernels' results, and whether each came from the cache."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    command = [sys.executable, "-c", PROGRAM]
    ended = subprocess.run(
        command,
        cwd=package.parent,
        env={**inherited, **environment},
        check=True,
        capture_output=True,
        text=True,
    )
    total, double, *hits = json.loads(ended.stdout)
    return total, double, bool(hits[0]), bool(hits[1])


def hashes(package: Path) -> dict[str, str]:
    return numba_cache._Sources(package).hashes()


@pytest.mark.slow
def test_kernel_is_compiled_again_only_after_a_change_in_what_it_uses(toy: Path) -> None:
    assert run(toy) == (6, 8, False, False)
    assert run(toy) == (6, 8, True, True)
    for path in toy.rglob("*.py"):
        os.utime(path, (0, 0))
    change(toy, "outer.py", "\n@njit", "\n# A comment, and another line.\n\n@njit")
    change(toy, "limits.py", "UNUSED = 1", "UNUSED = 2")
    assert run(toy) == (6, 8, True, True)
    change(toy, "inner/adding.py", "a + b", "a + 2 * b")
    assert run(toy) == (10, 8, False, True)
    change(toy, "limits.py", "LIMIT = 10", "LIMIT = 11")
    assert run(toy) == (11, 8, False, True)
    change(toy, "inner/adding.py", "a + 2 * b", "a + b")
    change(toy, "limits.py", "LIMIT = 11", "LIMIT = 10")
    assert run(toy) == (6, 8, True, True)


@pytest.mark.slow
def test_compiled_kernels_may_be_copied_to_another_cache_and_used_by_a_package_elsewhere(
    toy: Path, tmp_path: Path
) -> None:
    built, copied = tmp_path / "built", tmp_path / "copied"
    assert run(toy, NUMBA_CACHE_DIR=str(built)) == (6, 8, False, False)
    shutil.copytree(built, copied, copy_function=shutil.copyfile)
    elsewhere = tmp_path / "elsewhere" / "toy"
    shutil.copytree(toy, elsewhere)
    assert run(elsewhere, NUMBA_CACHE_DIR=str(copied)) == (6, 8, True, True)
    assert not (toy / "__pycache__" / "kernels").exists()


@pytest.mark.slow
def test_folders_of_earlier_sources_are_removed_but_the_last_few(toy: Path) -> None:
    for number in range(2, 8):
        (toy / "alone.py").write_text(FILES["alone.py"].replace("2 *", f"{number} *"))
        assert run(toy)[1] == 4 * number
    stored = toy / "__pycache__" / "kernels"
    assert len(list((stored / "alone").iterdir())) == numba_cache._KEPT
    assert len(list((stored / "outer").iterdir())) == 1


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("outer.py", "result = 0", "result = 1"),
        ("outer.py", "total(values)", "total(values, start=0)"),
        ("inner/adding.py", "min(", "max("),
        ("inner/adding.py", "limits.LIMIT", "limits.UNUSED"),
        ("inner/adding.py", 'inline="always"', 'inline="never"'),
        ("inner/__init__.py", "import add", "import describe as add"),
        ("limits.py", "LIMIT = 10", "LIMIT = 10.0"),
        ("limits.py", "LIMIT = 10", "def limit():\n    return 3\nLIMIT = limit()"),
    ],
)
def test_hash_covers_kernels_their_callees_and_their_constants(
    toy: Path, name: str, old: str, new: str
) -> None:
    before = hashes(toy)
    change(toy, name, old, new)
    after = hashes(toy)
    assert after["outer.py"] != before["outer.py"]
    assert after["alone.py"] == before["alone.py"]


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("inner/adding.py", "Sum, up to a limit.", "Other words."),
        ("inner/adding.py", "  # saturates", ""),
        ("inner/adding.py", 'return "adds"', 'return "sums"'),
        ("inner/adding.py", "a: int, b: int", "a, b"),
        ("limits.py", "UNUSED = 1", ""),
        ("alone.py", "2 * value", "3 * value"),
    ],
)
def test_hash_leaves_out_what_is_not_compiled(toy: Path, name: str, old: str, new: str) -> None:
    before = hashes(toy)
    change(toy, name, old, new)
    assert hashes(toy)["outer.py"] == before["outer.py"]


def test_constant_that_a_function_computes_follows_the_function(toy: Path) -> None:
    (toy / "limits.py").write_text("def limit():\n    return 10\nLIMIT = limit()\n")
    before = hashes(toy)
    change(toy, "limits.py", "return 10", "return 11")
    assert hashes(toy)["outer.py"] != before["outer.py"]


def test_all_kernels_of_the_package_are_stored_by_their_sources() -> None:
    """And nothing in them escapes the hash: a relative import, a module by its full name, two kernels of one name."""
    sources = numba_cache._Sources(PACKAGE)
    assert len(sources.hashes()) > 30
    for name in sources.checksums:
        tree = ast.parse((PACKAGE / name).read_bytes())
        kernels = []
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0 and all(alias.name != "*" for alias in node.names), name
                assert node.module != "numba" or all(alias.name != "njit" for alias in node.names), name
            if isinstance(node, ast.Import):
                assert all(not alias.name.startswith("clickline") for alias in node.names), name
            if isinstance(node, ast.FunctionDef) and "njit" in "".join(map(ast.dump, node.decorator_list)):
                kernels.append(node.name)
        assert len(kernels) == len(set(kernels)), name
