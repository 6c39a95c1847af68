"""One process holds the lock; others can read which."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from clickline.storage.file_lock import acquire, locked, read_owner, write_owner

HOLD = """
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
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
    assert read_owner(file) == {}, "the owner is not written yet"
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


def test_lock_is_exclusive_unless_shared(tmp_path: Path) -> None:
    file = tmp_path / "new" / "lock"
    with locked(file, shared=True) as first, locked(file, shared=True, wait=False) as second:
        assert first and second
        with locked(file, wait=False) as third:
            assert not third
    with locked(file, wait=False) as free:
        assert free


def test_folder_can_be_locked(tmp_path: Path) -> None:
    with locked(tmp_path), locked(tmp_path, wait=False) as free:
        assert not free
    assert list(tmp_path.iterdir()) == []


def test_file_that_was_replaced_while_waiting_is_locked_again(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "lock"
    entered = threading.Event()

    def wait_for_it() -> None:
        with locked(file):
            entered.set()
            with locked(file, wait=False) as free:
                assert not free, "it holds the lock of another file"

    with ThreadPoolExecutor(1) as threads:
        with locked(file):
            waiting = threads.submit(wait_for_it)
            assert not entered.wait(0.2)
            shutil.rmtree(file.parent)
        waiting.result(20)
    assert file.exists()
