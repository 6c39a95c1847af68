"""Loads Python files that users write, a reader or a model, and reports their errors by line.

    tree   = parse(path, remedy)            a ConfigError if it cannot be read or is not Python
    module = execute(path, tree, prefix)    raises what the file raises; error_line() returns the line

The other functions inspect the module and describe errors for the user.
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
    """The file's syntax tree; `remedy` says what to do if there is no such file."""
    try:
        return ast.parse(path.read_bytes(), str(path))
    except OSError as error:
        raise _config_error(path, 0, f"cannot be read: {error.strerror}.", remedy) from error
    except (SyntaxError, ValueError) as error:  # ValueError: a null byte
        message = error.msg if isinstance(error, SyntaxError) else str(error)
        line = error.lineno if isinstance(error, SyntaxError) else None
        raise _config_error(path, line or 0, f"is not Python: {message}.", "Correct the file.") from error


def execute(path: Path, tree: ast.Module, prefix: str) -> ModuleType:
    """Execute the file as a module, named after `prefix` and the path; sys.path is not changed."""
    # Registered, because dataclasses look up their module; compiled here, so that no bytecode is written.
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


def public_functions(module: ModuleType) -> dict[str, FunctionType]:
    """The functions defined in the file itself, except those that begin with `_`."""
    return {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    }


def is_async(function: Callable[..., object]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)


def accepts_arguments(function: Callable[..., object], count: int) -> bool:
    """Whether it is a plain function that can be called with `count` positional arguments."""
    if is_async(function):
        return False
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    except ValueError:  # a built-in without a signature: only calling it will show
        return True
    return True


def error_line(path: Path, error: BaseException) -> int:
    """The last line of the file in the traceback of the error, or else of its cause; 0: none."""
    cause: BaseException | None = error
    while cause is not None:
        for frame, line in reversed(list(traceback.walk_tb(cause.__traceback__))):
            if frame.f_code.co_filename == str(path):
                return line
        cause = cause.__cause__
    return 0


def type_name(value: object) -> str:
    """The name of a value's type, for messages."""
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def _config_error(path: Path, line: int, problem: str, remedy: str) -> ConfigError:
    return ConfigError([Mistake(str(path), line, "", problem, remedy)])
