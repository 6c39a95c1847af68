"""Python files that users write, a reader or a model: executed, looked through, and blamed by the line.

    tree   = parse(path, remedy)            a ConfigError if it cannot be read or is not Python
    module = execute(path, tree, prefix)    raises what the file raises; line_of() tells where

The rest tells what is in the module, and what went wrong in words for the user.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType

from clickline.errors import ConfigError, Mistake


def parse(path: Path, remedy: str) -> ast.Module:
    """The file's syntax tree; `remedy` says what to do when there is no such file."""
    try:
        return ast.parse(path.read_bytes(), str(path))
    except OSError as error:
        raise _wrong(path, 0, f"cannot be read: {error.strerror}.", remedy) from error
    except (SyntaxError, ValueError) as error:  # ValueError: a null byte
        words = error.msg if isinstance(error, SyntaxError) else str(error)
        line = error.lineno if isinstance(error, SyntaxError) else None
        raise _wrong(path, line or 0, f"is not Python: {words}.", "Correct the file.") from error


def execute(path: Path, tree: ast.Module, prefix: str) -> ModuleType:
    """The file as a module of its own, named after `prefix` and the path; sys.path is not touched."""
    # Registered, because dataclasses look their module up; compiled here, so that no bytecode is written.
    code = compile(tree, str(path), "exec", dont_inherit=True)
    module = ModuleType(prefix + hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16])
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    try:
        exec(code, vars(module))
    except BaseException:
        del sys.modules[module.__name__]
        raise
    return module


def own_functions(module: ModuleType) -> dict[str, FunctionType]:
    """The functions written in the file itself, but for those that begin with `_`."""
    return {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    }


def is_async(function: Callable[..., object]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)


def takes(function: Callable[..., object], count: int) -> bool:
    """Whether it can be called with so many arguments by place, and answers when called."""
    if is_async(function):
        return False
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    except ValueError:  # a built-in without a signature: calling it will tell
        return True
    return True


def line_of(path: Path, error: BaseException) -> int:
    """The line of the file that the error, or else its cause, passed through last; 0: none."""
    cause: BaseException | None = error
    while cause is not None:
        for frame, line in reversed(list(traceback.walk_tb(cause.__traceback__))):
            if frame.f_code.co_filename == str(path):
                return line
        cause = cause.__cause__
    return 0


def kind_of(value: object) -> str:
    """The name of a value's type, as messages say it."""
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def _wrong(path: Path, line: int, problem: str, remedy: str) -> ConfigError:
    return ConfigError([Mistake(str(path), line, "", problem, remedy)])
