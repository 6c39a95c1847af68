"""One process holds the file; others see who."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from clickline.storage.file_lock import acquire, read_owner, write_owner

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
    assert read_owner(file) is None
    held = acquire(file)
    assert held is not None
    assert read_owner(file) == {}, "it has not signed yet"
    write_owner(held, {"pid": 1, "host": "a-long-name"})
    write_owner(held, {"pid": 2})
    assert read_owner(file) == {"pid": 2}
    os.close(held)
    assert read_owner(file) is None


def test_a_second_one_gets_it_when_the_first_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        assert acquire(file) is None
        assert read_owner(file) == {"pid": 7}
        other.kill()
        other.wait()
        held = acquire(file)
    assert held is not None
    os.close(held)
