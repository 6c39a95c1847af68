from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pyarrow as pa
import pytest
from reading import read_all

from clickline.data.readers.custom_reader import CustomReader
from clickline.errors import ConfigError, DataError, ReaderError


def reader_file(tmp_path: Path, source: str) -> Path:
    path = tmp_path / "my_reader.py"
    path.write_text(textwrap.dedent(source).lstrip("\n"))
    return path


def make(tmp_path: Path, source: str, *wanted: str, **options: int) -> CustomReader:
    return CustomReader(reader_file(tmp_path, source), wanted, **options)


GOOD = """
    from __future__ import annotations

    import dataclasses
    import json
    from itertools import islice

    import pyarrow as pa


    @dataclasses.dataclass
    class Row:
        name: str
        kinds: "dataclasses.ClassVar[int]" = 3


    def _chunks(lines):
        while chunk := list(islice(lines, 3)):
            yield chunk


    def read(path):
        with open(path) as lines:
            for chunk in _chunks(lines):
                yield pa.RecordBatch.from_pylist([json.loads(line) for line in chunk])
"""


@pytest.mark.parametrize("block_bytes", [1, 8 << 20])
def test_rows_that_a_users_function_yields(tmp_path: Path, block_bytes: int) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(f'{{"click": {i % 2}, "ad": "ad{i}"}}\n' for i in range(8)))
    before = list(sys.path)
    rows, bad = read_all(make(tmp_path, GOOD, "click", "ad", block_bytes=block_bytes), data)
    assert not bad
    assert rows == {i + 1: {"click": [i % 2], "ad": [b"ad%d" % i]} for i in range(8)}
    assert sys.path == before
    assert not (tmp_path / "__pycache__").exists()


def test_large_batches_are_split_into_blocks(tmp_path: Path) -> None:
    source = """
        import pyarrow as pa

        def read(path):
            yield pa.record_batch({"n": pa.array(range(100_000))})
            yield pa.record_batch({"n": pa.array([], pa.int64())})
            yield pa.record_batch({"n": pa.array([7])})
    """
    blocks = list(make(tmp_path, source, "n", block_bytes=100_000).blocks("f", tmp_path))
    assert [(block.first_line, block.payload.num_rows) for block in blocks] == [
        *((1 + at, 12_500) for at in range(0, 100_000, 12_500)),
        (100_001, 1),
    ]
    assert sum(block.size for block in blocks) == 800_008


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def read(path):\n    yield (\n", ":2 is not Python: '(' was never closed."),
        (
            "import nowhere_at_all\n",
            ":1 cannot be loaded: ModuleNotFoundError: No module named 'nowhere_at_all'.",
        ),
        (
            "x = 1\n\ndef _f():\n    return 1 / 0\n\n_f()\n",
            ":4 cannot be loaded: ZeroDivisionError: division by zero.",
        ),
        ("import sys\nsys.exit(3)\n", ":2 cannot be loaded: SystemExit: 3."),
        ("x = 1\n", " has no function read(). Please write one function `def read(path):` that yields"),
        ("from json import load as read\n", " has no function read()."),
        ("def read(): ...\n", ":1 has `def read()`, which cannot be called as read(path)."),
        ("\ndef read(path, columns): ...\n", ":2 has `def read(path, columns)`, which cannot be called as"),
        ("def read(*, path): ...\n", ":1 has `def read(*, path)`, which cannot be called as read(path)."),
        ("async def read(path):\n    yield 1\n", ":1 has `async def read(path)`, which cannot be called as"),
        (
            "def read(path): ...\ndef rows(): ...\n",
            ":2 has a function rows() besides read(). Begin the names of helpers",
        ),
        ("a\0b", " is not Python: "),
    ],
)
def test_mistakes_are_found_before_any_data_is_read(tmp_path: Path, source: str, words: str) -> None:
    path = tmp_path / "my_reader.py"
    path.write_text(source)
    modules = set(sys.modules)
    with pytest.raises(ConfigError) as caught:
        CustomReader(path, ("a",))
    assert str(path) + words in str(caught.value)
    if "cannot be loaded" in words:
        assert not [name for name in set(sys.modules) - modules if name.startswith("clickline_reader")]


def test_all_mistakes_are_reported_at_once(tmp_path: Path) -> None:
    path = reader_file(tmp_path, "def rows(): ...\ndef more(): ...\n")
    with pytest.raises(ConfigError) as caught:
        CustomReader(path, ("a",))
    assert [mistake.line for mistake in caught.value.mistakes] == [1, 2, 0]


def test_a_file_that_is_absent(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"gone.py cannot be read: No such file or directory. Check the path"
    ):
        CustomReader(tmp_path / "gone.py", ("a",))


def test_read_may_have_parameters_with_defaults(tmp_path: Path) -> None:
    rows, bad = read_all(
        make(
            tmp_path,
            """
            import pyarrow as pa
            def read(path, *, size=2):
                return iter([pa.record_batch({"a": pa.array([1] * size)})])
            """,
            "a",
        ),
        tmp_path / "x",
    )
    assert rows == {1: {"a": [1]}, 2: {"a": [1]}}
    assert not bad


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("yield batch; raise ValueError('day 3 is odd')", ":4 raised ValueError: day 3 is odd"),
        ("yield batch; open('/nowhere/at/all')", ":4 raised FileNotFoundError: [Errno 2] No such file"),
        ("yield batch; raise SystemExit(3)", ":4 raised SystemExit: 3"),
        ("yield batch; next(iter([]))", ":4 raised RuntimeError: generator raised StopIteration"),
        ("raise KeyError('a')", ":4 raised KeyError: 'a'"),
        ("import json; json.loads('{')", ":4 raised JSONDecodeError: Expecting property name"),
    ],
)
def test_an_exception_while_reading_names_file_line_and_message(
    tmp_path: Path, body: str, words: str
) -> None:
    source = f"import pyarrow as pa\nbatch = pa.record_batch({{'a': [1]}})\ndef read(path):\n    {body}\n"
    path = reader_file(tmp_path, source)
    reader = CustomReader(path, ("a",))
    blocks = reader.blocks("day3.log", tmp_path / "day3.log")
    seen = [reader.parse(next(blocks)).rows for _ in range(body.count("yield"))]
    with pytest.raises(ReaderError) as caught:
        next(blocks)
    assert str(caught.value).startswith(f"day3.log: the reader {path}{words}")
    assert all(rows == 1 for rows in seen)
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            "yield {'a': 1}",
            "yielded dict; write one function `def read(path):` that yields pyarrow.RecordBatch",
        ),
        ("yield None", "yielded NoneType; write one function"),
        ("yield pa.table({'a': [1]})", "yielded pyarrow.lib.Table; write `yield from table.to_batches()`"),
        ("return 3", "returned int; write one function"),
        ("pass", "returned NoneType; write one function"),
    ],
)
def test_yielding_something_else_is_an_error(tmp_path: Path, body: str, words: str) -> None:
    path = reader_file(tmp_path, f"import pyarrow as pa\ndef read(path):\n    {body}\n")
    with pytest.raises(ReaderError) as caught:
        list(CustomReader(path, ("a",)).blocks("f.log", tmp_path))
    assert str(caught.value).startswith(f"f.log: read() in {path} {words}")


def test_a_missing_column_is_reported(tmp_path: Path) -> None:
    source = "import pyarrow as pa\ndef read(path):\n    yield pa.record_batch({'ad_id': pa.array([1])})\n"
    with pytest.raises(
        DataError, match=r"rows.x has no column 'adid'; its columns are ad_id; did you mean 'ad_id'?"
    ):
        read_all(make(tmp_path, source, "adid"), tmp_path / "rows.x")


def test_two_readers_of_the_same_name_are_separate(tmp_path: Path) -> None:
    readers = []
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        source = f"import pyarrow as pa\nNAME = {folder!r}\ndef read(path):\n    yield pa.record_batch({{'a': [NAME]}})\n"
        readers.append(make(tmp_path / folder, source, "a"))
    found = [read_all(reader, tmp_path / "x")[0][1]["a"] for reader in readers]
    assert found == [[b"one"], [b"two"]]
    assert isinstance(pa.array([1]), pa.Array)


def test_what_a_reader_prints_goes_to_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """stdout belongs to the command: with --json it holds one document and nothing else."""
    path = tmp_path / "my_reader.py"
    path.write_text(
        "import pyarrow as pa\nprint('loaded')\n\ndef read(path):\n    print('hello')\n"
        "    yield pa.RecordBatch.from_pylist([{'a': 1}])\n    print('bye')\n"
    )
    assert len(list(CustomReader(path, ("a",)).blocks("x", tmp_path / "x"))) == 1
    assert capsys.readouterr() == ("", "loaded\nhello\nbye\n")
