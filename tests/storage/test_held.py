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
from clickline.storage.file_lock import acquire, write_owner
held = acquire(Path(sys.argv[1]))
write_owner(held, {"pid": 7})
print("held", flush=True)
sys.stdin.read()
"""


def test_a_missing_or_released_lock_has_no_owner(tmp_path: Path) -> None:
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


def test_a_lock_is_free_when_its_owner_is_killed(tmp_path: Path) -> None:
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
