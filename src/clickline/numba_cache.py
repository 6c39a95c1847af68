"""Stores compiled Numba kernels in folders named after a hash of the sources that they were compiled from.

Numba itself notices a change only in the file that defines a kernel. But a kernel also contains the code of every
kernel it calls and the value of every constant it reads, whichever file those are in. So a module's hash covers its
kernels and, followed through imports, all that they refer to; it leaves out comments, docstrings, line numbers, file
times and other code. A kernel is compiled again if and only if that has changed, wherever the package is installed.

    NUMBA_CACHE_DIR, else clickline/__pycache__/kernels, else ~/.cache/clickline/kernels
        sources.json          each module's hash, and the checksums of the files that it was computed from
        PATH/MODULE/HASH/     Numba's own files; of the module's earlier hashes the last few are kept
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numba
from numba.core.caching import _CacheLocator

F = TypeVar("F", bound=Callable[..., Any])

_PACKAGE = Path(__file__).parent
_SETTINGS: Any = numba.config
_RECORD = "sources.json"
_KEPT = 4
"""How many hashes of a module keep their folder: those of a few branches."""


def njit(**options: Any) -> Callable[[F], F]:
    """Numba's `njit`, whose `cache=True` stores kernels here. Where no folder can be written, they are not stored."""

    def compiled(function: F) -> F:
        chosen = {**options, "cache": options.get("cache", False) and _root() is not None}
        # Numba's own setting for this (NUMBA_CACHE_LOCATOR_CLASSES) is read when a function is decorated. It is
        # restored, because it would apply to the kernels of our users and of other libraries, too.
        before = _SETTINGS.CACHE_LOCATOR_CLASSES
        _SETTINGS.CACHE_LOCATOR_CLASSES = f"{__name__}.{KernelLocator.__name__}"
        try:
            kernel: F = numba.njit(**chosen)(function)
            return kernel
        finally:
            _SETTINGS.CACHE_LOCATOR_CLASSES = before

    return compiled


class KernelLocator(_CacheLocator):
    """Tells Numba where a kernel is stored, and by what to know that it is up to date."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def from_function(cls, function: Callable[..., Any], file: str) -> KernelLocator:
        return cls(_folder(Path(file).relative_to(_PACKAGE).as_posix()))

    def get_cache_path(self) -> str:
        return str(self._folder)

    def get_source_stamp(self) -> str:
        return self._folder.name

    def get_disambiguator(self) -> str:
        return ""  # Numba's own is the line number, which changes with any line above


@cache
def _root() -> Path | None:
    """The first folder of the module's docstring that can be written to."""
    own = [_PACKAGE / "__pycache__" / "kernels", Path("~/.cache/clickline/kernels")]
    for place in [Path(_SETTINGS.CACHE_DIR), *own] if _SETTINGS.CACHE_DIR else own:
        with suppress(OSError, RuntimeError):  # a user without a name has no home
            place = place.expanduser()
            place.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=place).close()
            return place
    return None


@cache
def _folder(module: str) -> Path:
    """Where the kernels of a module (`embedding/index.py`) are stored."""
    root = _root()
    assert root is not None
    hashes = _hashes(root)
    if module not in hashes:  # it had no kernels when they were recorded
        _hashes.cache_clear()
        (root / _RECORD).unlink(missing_ok=True)
        hashes = _hashes(root)
    folder = root / module.removesuffix(".py") / hashes[module]
    with suppress(OSError):  # another process may do the same at the same time
        folder.mkdir(parents=True, exist_ok=True)
        os.utime(folder)
        others = sorted(folder.parent.iterdir(), key=lambda path: path.stat().st_mtime)
        for unused in [path for path in others if path != folder and path.is_dir()][: -(_KEPT - 1)]:
            shutil.rmtree(unused, ignore_errors=True)
    return folder


@cache
def _hashes(root: Path) -> dict[str, str]:
    """The hash of each module with kernels: as recorded, if the files have not changed since; parsing them takes longer
    than a small command."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        record = json.loads((root / _RECORD).read_bytes())
        if record["python"] == sys.version and all(
            _checksum(_PACKAGE / name) == checksum for name, checksum in record["files"].items()
        ):
            return dict(record["modules"])
    sources = _Sources(_PACKAGE)
    hashes = sources.hashes()
    record = {"python": sys.version, "modules": hashes, "files": sources.checksums}
    with suppress(OSError), tempfile.NamedTemporaryFile("w", dir=root, delete=False) as draft:
        json.dump(record, draft, indent=1)
        draft.close()
        Path(draft.name).chmod(0o644)  # an image is built by one user and run by others
        Path(draft.name).replace(root / _RECORD)
    return hashes


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


class _Sources:
    """The statements of a package's modules, and what each refers to."""

    def __init__(self, package: Path) -> None:
        self._package = package
        self._modules: dict[str, _Module] = {}
        self.checksums: dict[str, str] = {}  # of the files that were parsed

    def hashes(self) -> dict[str, str]:
        """The hash of each module with kernels."""
        hashes = {}
        for path in sorted(self._package.rglob("*.py")):
            name = path.relative_to(self._package).as_posix()
            if path != Path(__file__) and b"numba" in path.read_bytes() and self._module(name).kernels:
                hashes[name] = self._hash(name)
        return hashes

    def _module(self, name: str) -> _Module:
        if name not in self._modules:
            source = (self._package / name).read_bytes()
            self.checksums[name] = hashlib.sha256(source).hexdigest()
            self._modules[name] = _Module(source, self._package.name)
        return self._modules[name]

    def _hash(self, name: str) -> str:
        """Of a module's kernels and of every statement that they refer to, directly or not."""
        open_, facts = [(name, statement) for statement in self._module(name).kernels], set()
        reached = set(open_)
        while open_:
            at, statement = open_.pop()
            module = self._module(at)
            facts.add((at, module.text(statement)))
            for used in module.names(statement):
                targets = [(at, other) for other in module.bound.get(used, [])]
                if used in module.imports:
                    facts.add((at, f"{used} = {module.imports[used]}"))
                    targets += self._imported(*module.imports[used], module.attributes(statement, used))
                open_ += [target for target in targets if target not in reached]
                reached.update(targets)
        return hashlib.sha256(repr(sorted(facts)).encode()).hexdigest()[:16]

    def _imported(self, source: str, name: str, attributes: set[str]) -> Iterator[tuple[str, int]]:
        """The statements that `from source import name` refers to; `attributes` are read from it if it is a module."""
        parts = source.split(".")
        if parts[0] != self._package.name or parts[1:] == [Path(__file__).stem]:
            return
        for path, names in [((*parts[1:], name), attributes), ((*parts[1:],), {name})]:
            for file in ("/".join(path) + ".py", "/".join((*path, "__init__.py"))):
                if (self._package / file).is_file():
                    module = self._module(file)
                    for wanted in names:
                        if wanted in module.imports:
                            yield from self._imported(*module.imports[wanted], attributes)
                        else:  # all of the module if it makes the name in a way that cannot be followed
                            yield from ((file, one) for one in module.bound.get(wanted, module.all))
                    return


class _Module:
    """A module's statements at the top level, by number."""

    def __init__(self, source: bytes, package: str) -> None:
        tree = _Executed().visit(ast.parse(source))
        self._statements: list[ast.stmt] = [
            node for node in tree.body if not isinstance(node, ast.Import | ast.ImportFrom)
        ]
        self.imports: dict[str, tuple[str, str]] = {}
        """The names that are imported: from which module, and under which name there."""
        numba_names = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                source_name = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
                for alias in node.names:
                    name = (alias.asname or alias.name).partition(".")[0]
                    self.imports[name] = (source_name, alias.name)
                    if f"{source_name}.{alias.name}".startswith(
                        ("numba.", ".numba", f"{package}.numba_cache.")
                    ):
                        numba_names.add(name)
        self.bound: dict[str, list[int]] = {}
        """The statements that give each name its value."""
        for number, statement in enumerate(self._statements):
            for name in _bound_by(statement):
                self.bound.setdefault(name, []).append(number)
        self.all = range(len(self._statements))
        self._names = [
            {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
            for statement in self._statements
        ]
        self._texts = [""] * len(self._statements)
        self.kernels = [number for number in self.all if numba_names & self._names[number]]

    def names(self, statement: int) -> set[str]:
        return self._names[statement]

    def attributes(self, statement: int, name: str) -> set[str]:
        return {
            node.attr
            for node in ast.walk(self._statements[statement])
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == name
        }

    def text(self, statement: int) -> str:
        self._texts[statement] = self._texts[statement] or ast.dump(self._statements[statement])
        return self._texts[statement]


def _bound_by(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
        return
    for node in ast.walk(statement):  # an assignment, or a block that has some
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name


class _Executed(ast.NodeTransformer):
    """Takes out what no kernel is compiled from: docstrings, and the annotations of functions."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        return ast.Pass() if isinstance(node.value, ast.Constant) else self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)
