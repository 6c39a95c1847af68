"""One process holds the file; others see who."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from clickline.storage.file_lock import holder_of, sign, take

HOLD = """
import sys
from pathlib import Path
from clickline.storage.file_lock import sign, take
held = take(Path(sys.argv[1]))
sign(held, {"pid": 7})
print("held", flush=True)
sys.stdin.read()
"""


def test_nobody_holds_what_is_not_there_or_was_left(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    assert holder_of(file) is None
    held = take(file)
    assert held is not None
    assert holder_of(file) == {}, "it has not signed yet"
    sign(held, {"pid": 1, "host": "a-long-name"})
    sign(held, {"pid": 2})
    assert holder_of(file) == {"pid": 2}
    os.close(held)
    assert holder_of(file) is None


def test_a_second_one_gets_it_when_the_first_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        assert take(file) is None
        assert holder_of(file) == {"pid": 7}
        other.kill()
        other.wait()
        held = take(file)
    assert held is not None
    os.close(held)
