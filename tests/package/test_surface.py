"""The public API: few names, no side effects, and every created error is raised."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import clickline
from clickline import errors

SOURCE = Path(clickline.__file__).parent


def test_public_names_are_listed_and_importable():
    assert clickline.__all__ == sorted(clickline.__all__)
    assert len(set(clickline.__all__) - {"__version__"}) <= 12
    assert dir(clickline) == clickline.__all__
    for name in clickline.__all__:
        assert getattr(clickline, name) is not None
    assert callable(clickline.prepare)


def test_unknown_name_is_an_attribute_error():
    assert not hasattr(clickline, "utils")


def test_importing_the_package_is_light_and_has_no_side_effects():
    program = (
        "import os, sys, threading\n"
        "before = (dict(os.environ), os.getcwd(), list(sys.path), threading.active_count())\n"
        "import clickline\n"
        "heavy = {'numpy', 'numba', 'pyarrow', 'torch', 'ray', 'pydantic', 'fsspec', 'typer'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert before == (dict(os.environ), os.getcwd(), list(sys.path), threading.active_count())\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_only_packages_list_what_they_export():
    """A module exports what it defines, and mypy refuses names that it only imports: a list would say it twice."""
    for path in SOURCE.rglob("*.py"):
        assert path.name == "__init__.py" or "__all__" not in path.read_text(), path


def test_every_created_error_is_raised():
    """ruff sees only built-in exceptions (PLW0133); a bare `ConfigError(...)` line would be a swallowed fault."""
    ours = {name for name, found in vars(errors).items() if isinstance(found, type)}
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                called = node.value.func
                name = called.id if isinstance(called, ast.Name) else getattr(called, "attr", "")
                assert name not in ours, f"{path}:{node.lineno}"


def test_no_artifact_can_run_code():
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        assert "pickle" not in text.replace("allow_pickle=False", ""), path


def test_no_machine_path_or_registry_host_is_in_the_repository():
    root = SOURCE.parents[1]
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, check=True).stdout
    words = [b"/work/" + b"main", b"/opt/" + b"pypi", b"pypi" + b".org", b"files.python" + b"hosted"]
    for name in listed.decode().split("\0"):
        path = root / name
        if name and path.is_file():
            content = path.read_bytes()
            assert not any(word in content for word in words), name
