"""Progress output: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import threading
from contextlib import suppress

import pytest

from clickline import progress as progress_module
from clickline.cli.console import facts, note, say, show_progress, table
from clickline.progress import human_size, printable


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (64 * 2**20, "64.0 MiB"), (2**50, "1024.0 TiB")],
)
def test_human_sizes(size: int, text: str) -> None:
    assert human_size(size) == text


def test_table_does_not_truncate_cells(capsys: pytest.CaptureFixture[str]) -> None:
    table(("NAME", "N"), [("x" * 300, 1), ("y", 22)])
    assert capsys.readouterr().out == f"{'NAME':<300}   N\n{'x' * 300}   1\n{'y':<300}   22\n"


def test_control_characters_are_escaped() -> None:
    assert printable("plain text ü 汉字") == "plain text ü 汉字"
    assert (
        printable("two\nlines\tand \x1b[31mred\r\x9b \udcff")
        == "two\nlines\tand \\x1b[31mred\\r\\x9b \\udcff"
    )
    assert printable("one\nline", one_line=True) == "one\\nline"


def test_no_output_contains_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    value = "a\x1b[2Jb\x07"
    table(("VALUE", "N"), [(value + "\n", 1)])
    facts({"value": value})
    note(value)
    say(f"first\n{value}")
    with show_progress(as_json=False, quiet=True) as progress:
        progress.log(f"bad row: {value}")
    output = capsys.readouterr()
    assert output.out == (
        "VALUE             N\na\\x1b[2Jb\\x07\\n   1\nvalue  a\\x1b[2Jb\\x07\nfirst\na\\x1b[2Jb\\x07\n"
    )
    assert output.err == "a\\x1b[2Jb\\x07\nbad row: a\\x1b[2Jb\\x07\n"


def test_plain_lines_without_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now)
    with show_progress(as_json=False, quiet=False) as progress:
        progress.begin("prepare train", total_bytes=4096)
        for _ in range(4):
            now += 6.0
            progress.advance(rows=300, size=1024)
        progress.log("one hour is empty")
        progress.begin("fetching x")
        progress.advance(size=2048)
        progress.end()
        progress.end()
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "prepare train: started, 4.0 KiB to read",
        "prepare train: 600 rows, 50 rows/s, 2.0 KiB, 171 B/s, 50%, about 12 s left",
        "prepare train: 1,200 rows, 50 rows/s, 4.0 KiB, 171 B/s",
        "one hour is empty",
        "fetching x: started",
        "fetching x: 2.0 KiB, 1.9 TiB/s; took 0.0 s",
        "prepare train: 1,200 rows, 50 rows/s, 4.0 KiB, 171 B/s; took 24.0 s",
    ]


@pytest.mark.parametrize(("as_json", "quiet"), [(True, False), (False, True)])
def test_quiet_prints_only_messages(capsys: pytest.CaptureFixture[str], as_json: bool, quiet: bool) -> None:
    with show_progress(as_json=as_json, quiet=quiet) as progress:
        progress.begin("prepare", total_bytes=10)
        progress.advance(rows=1, size=10)
        progress.log("the input has changed")
        progress.end()
    assert capsys.readouterr() == ("", "the input has changed\n")


def test_progress_from_several_threads(capsys: pytest.CaptureFixture[str]) -> None:
    with show_progress(as_json=False, quiet=False) as progress:
        progress.begin("count")

        def many() -> None:
            for _ in range(2000):
                progress.advance(rows=1)

        threads = [threading.Thread(target=many) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        progress.end()
    assert "8,000 rows" in capsys.readouterr().err


PROGRAM = """
from clickline.cli.console import show_progress
with show_progress(as_json=False, quiet=False) as progress:
    progress.begin('prepare train', total_bytes=4096)
    progress.advance(rows=1200, size=4096)
    progress.log('[bold] one hour is empty')
    progress.end()
    progress.begin('sample')
    progress.advance(rows=7, size=10)
    progress.end()
"""


def on_a_terminal(**environment: str) -> str:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "90", **environment},
    )
    os.close(theirs)
    seen = b""
    with suppress(OSError):  # the other end is closed
        while piece := os.read(ours, 4096):
            seen += piece
    os.close(ours)
    assert process.wait() == 0
    return seen.decode()


def test_progress_bars_on_a_terminal() -> None:
    seen = on_a_terminal()
    assert "prepare train" in seen
    assert "━" in seen
    assert "1,200 rows" in seen
    assert all("rows/s" in line for line in seen.splitlines() if "1,200 rows" in line)
    assert "4.0 KiB" in seen
    assert "[bold] one hour is empty" in seen
    assert seen.rindex("\x1b[?25h") > seen.rindex("\x1b[?25l")  # the cursor is back


def test_no_color_is_honoured() -> None:
    colour = "\x1b[38;"
    assert colour in on_a_terminal()
    assert colour not in on_a_terminal(NO_COLOR="1")
