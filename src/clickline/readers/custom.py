"""A user's own reader: a Python file with one function, `read(path)`, that yields Arrow record batches.

The file is loaded when the reader is made, so its mistakes are found before any data are read. Names that
begin with `_` and imported names are the user's own business.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from types import FrameType, ModuleType

import pyarrow as pa

from clickline.errors import ConfigError, Mistake, ReaderFault
from clickline.readers.arrow import MAX_BATCH_ROWS, to_rows
from clickline.readers.base import BLOCK_BYTES
from clickline.records import Block, RawRows

__all__ = ["Custom"]

_ASYNC = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_FORM = "write one function `def read(path):` that yields pyarrow.RecordBatch"


class Custom:
    """Reads what the function `read` in the file at `path` yields."""

    def __init__(self, path: Path, wanted: tuple[str, ...], *, block_bytes: int = BLOCK_BYTES) -> None:
        self._path = path
        self._wanted = wanted
        self._block_bytes = block_bytes
        self._read = _load(path)

    def blocks(self, file: str, path: Path) -> Iterator[Block]:
        first = 1
        for batch in self._batches(file, path):
            rows = min(MAX_BATCH_ROWS, max(1, self._block_bytes * batch.num_rows // max(1, batch.nbytes)))
            for at in range(0, batch.num_rows, rows):
                piece = batch.slice(at, rows)
                yield Block(file, first + at, piece, piece.nbytes)
            first += batch.num_rows

    def _batches(self, file: str, path: Path) -> Iterator[pa.RecordBatch]:
        try:
            with redirect_stdout(
                sys.stderr
            ):  # stdout is the command's: with --json, one document and nothing else
                yielded = self._read(path)
        except (Exception, SystemExit) as error:
            raise self._raised(file, error) from error
        if not isinstance(yielded, Iterable):
            raise ReaderFault(f"{file}: read() in {self._path} returned {_kind(yielded)}; {_FORM}")
        batches = iter(yielded)
        while True:
            try:
                with redirect_stdout(sys.stderr):
                    batch = next(batches)
            except StopIteration:
                return
            except (Exception, SystemExit) as error:
                raise self._raised(file, error) from error
            if not isinstance(batch, pa.RecordBatch):
                hint = "write `yield from table.to_batches()`" if isinstance(batch, pa.Table) else _FORM
                raise ReaderFault(f"{file}: read() in {self._path} yielded {_kind(batch)}; {hint}")
            yield batch

    def _raised(self, file: str, error: BaseException) -> ReaderFault:
        where = f"{self._path}:{_line(self._path, error)}"
        return ReaderFault(f"{file}: the reader {where} raised {type(error).__name__}: {error}")

    def parse(self, block: Block) -> RawRows:
        return to_rows(block.file, block.first_line, block.payload, self._wanted)


def _load(path: Path) -> Callable[[Path], object]:
    """The function `read` of the file, or a ConfigError with all that is wrong with it."""
    try:
        code = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except OSError as error:
        raise _wrong(
            path, 0, f"cannot be read: {error.strerror}.", "Check the path of the reader."
        ) from error
    except (SyntaxError, ValueError) as error:  # ValueError: a null byte
        words = error.msg if isinstance(error, SyntaxError) else str(error)
        line = error.lineno if isinstance(error, SyntaxError) else None
        raise _wrong(path, line or 0, f"is not Python: {words}.", "Correct the file.") from error
    # Registered, because dataclasses look their module up; compiled here, so that no bytecode is written.
    module = ModuleType("clickline_reader_" + hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16])
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    try:
        exec(code, vars(module))
    except (Exception, SystemExit) as error:
        del sys.modules[module.__name__]
        problem = f"cannot be loaded: {type(error).__name__}: {error}."
        raise _wrong(path, _line(path, error), problem, "Correct the file.") from error
    return _find_read(path, module)


def _find_read(path: Path, module: ModuleType) -> Callable[[Path], object]:
    functions = {
        name: function
        for name, function in vars(module).items()
        if inspect.isfunction(function)
        and function.__module__ == module.__name__
        and not name.startswith("_")
    }
    mistakes = [
        Mistake(
            str(path),
            function.__code__.co_firstlineno,
            "",
            f"has a function {name}() beside read().",
            f"Begin the names of helpers with _, as in _{name}().",
        )
        for name, function in functions.items()
        if name != "read"
    ]
    read = functions.get("read")
    if read is None:
        mistakes.append(Mistake(str(path), 0, "", "has no function read().", f"Please {_FORM}."))
    elif read.__code__.co_flags & _ASYNC or not _takes_a_path(read):
        found = ("async " if read.__code__.co_flags & _ASYNC else "") + f"def read{inspect.signature(read)}"
        problem = f"has `{found}`, which cannot be called as read(path)."
        mistakes.append(Mistake(str(path), read.__code__.co_firstlineno, "", problem, f"Please {_FORM}."))
    if mistakes or read is None:
        raise ConfigError(mistakes)
    return read


def _takes_a_path(read: Callable[..., object]) -> bool:
    try:
        inspect.signature(read).bind(Path())
    except TypeError:
        return False
    return True


def _wrong(path: Path, line: int, problem: str, remedy: str) -> ConfigError:
    return ConfigError([Mistake(str(path), line, "", problem, remedy)])


def _line(path: Path, error: BaseException) -> int:
    """The line of the user's file that the error, or else its cause, passed through last; 0: none."""
    cause: BaseException | None = error
    while cause is not None:
        lines = [line for frame, line in traceback.walk_tb(cause.__traceback__) if _is_in(frame, path)]
        if lines:
            return lines[-1]
        cause = cause.__cause__
    return 0


def _is_in(frame: FrameType, path: Path) -> bool:
    return frame.f_code.co_filename == str(path)


def _kind(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
