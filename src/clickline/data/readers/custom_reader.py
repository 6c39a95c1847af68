"""A custom reader: a user's Python file with one function, `read(path)`, that yields Arrow record batches.

The file is loaded when the reader is created, so mistakes are found before any data is read. Names that
begin with `_` and imported names are ignored.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType

import pyarrow as pa

from clickline.data.readers.arrow_columns import MAX_BATCH_ROWS, to_rows
from clickline.data.readers.reader import BLOCK_BYTES
from clickline.errors import ConfigError, Mistake, ReaderError
from clickline.plugins import (
    accepts_arguments,
    error_line,
    execute,
    is_async,
    parse,
    public_functions,
    type_name,
)
from clickline.records import Block, RawRows

_FORM = "write one function `def read(path):` that yields pyarrow.RecordBatch"


class CustomReader:
    """Reads the record batches that the function `read` in the file at `path` yields."""

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
            ):  # stdout belongs to the command: with --json it holds exactly one document
                yielded = self._read(path)
        except (Exception, SystemExit) as error:
            raise self._raised(file, error) from error
        if not isinstance(yielded, Iterable):
            raise ReaderError(f"{file}: read() in {self._path} returned {type_name(yielded)}; {_FORM}")
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
                raise ReaderError(f"{file}: read() in {self._path} yielded {type_name(batch)}; {hint}")
            yield batch

    def _raised(self, file: str, error: BaseException) -> ReaderError:
        where = f"{self._path}:{error_line(self._path, error)}"
        return ReaderError(f"{file}: the reader {where} raised {type(error).__name__}: {error}")

    def parse(self, block: Block) -> RawRows:
        return to_rows(block.file, block.first_line, block.payload, self._wanted)


def _load(path: Path) -> Callable[[Path], object]:
    """The function `read` of the file, or a ConfigError with all mistakes."""
    tree = parse(path, "Check the path of the reader.")
    try:
        with redirect_stdout(sys.stderr):
            module = execute(path, tree, "clickline_reader_")
    except (Exception, SystemExit) as error:
        problem = f"cannot be loaded: {type(error).__name__}: {error}."
        raise ConfigError(
            [Mistake(str(path), error_line(path, error), "", problem, "Correct the file.")]
        ) from error
    return _find_read(path, module)


def _find_read(path: Path, module: ModuleType) -> Callable[[Path], object]:
    functions = public_functions(module)
    mistakes = [
        Mistake(
            str(path),
            function.__code__.co_firstlineno,
            "",
            f"has a function {name}() besides read().",
            f"Begin the names of helpers with _, as in _{name}().",
        )
        for name, function in functions.items()
        if name != "read"
    ]
    read = functions.get("read")
    if read is None:
        mistakes.append(Mistake(str(path), 0, "", "has no function read().", f"Please {_FORM}."))
    elif not accepts_arguments(read, 1):
        signature = ("async " if is_async(read) else "") + f"def read{inspect.signature(read)}"
        problem = f"has `{signature}`, which cannot be called as read(path)."
        mistakes.append(Mistake(str(path), read.__code__.co_firstlineno, "", problem, f"Please {_FORM}."))
    if mistakes or read is None:
        raise ConfigError(mistakes)
    return read
