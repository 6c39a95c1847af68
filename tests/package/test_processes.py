"""Child processes, and processes known by pid and start time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from clickline.processes import Backoff, ChildProcess, Process, descendants, wait_then_kill
from servers.waiting import eventually

ECHO = """
import subprocess, sys
from clickline.processes import ParentConnection

parent = ParentConnection(int(sys.argv[1]))
for message in parent.messages():
    if message.get("start"):
        grandchild = subprocess.Popen(["sleep", "60"])
        parent.send(pid=grandchild.pid)
    elif message.get("exit"):
        sys.exit(7)
    elif message.get("hang"):
        grandchild.wait()
    else:
        parent.send(**parent.request, **message)
"""

PARENT = """
import sys, time
from clickline.processes import ChildProcess

child = ChildProcess("exits_with_parent", request={})
print(child.pid, child.receive(60)["pid"], flush=True)
time.sleep(60)
"""

EXITS_WITH_PARENT = """
import os, sys, threading
from clickline.processes import ParentConnection

parent = ParentConnection(int(sys.argv[1]))
parent.exit_with_parent()
parent.send(pid=os.getpid())
threading.Event().wait()
"""


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "echo.py").write_text(ECHO)
    (tmp_path / "exits_with_parent.py").write_text(EXITS_WITH_PARENT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def test_reused_pid_is_not_ours() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            found = Process.from_pid(process.pid, "flow")
            assert found is not None and found.alive
            recycled = Process(process.pid, found.born.replace(":", ":1"), "flow")
            rebooted = Process(process.pid, "another-boot:" + found.born.partition(":")[2], "flow")
            assert not recycled.alive and not rebooted.alive
            recycled.send_signal(signal.SIGKILL)
            assert wait_then_kill([recycled, rebooted], 0.0) == []
            assert process.poll() is None
            assert found in descendants(os.getpid())
            assert wait_then_kill([found], 0.05) == [found]  # dead, though not yet reaped
            assert not found.alive
        finally:
            process.kill()


def test_messages_are_exchanged_until_the_child_exits() -> None:
    child = ChildProcess("echo", request={"name": "ünd"})
    child.send({"long": "x" * 300_000})  # more than the socket's buffer
    assert child.receive(60) == {"name": "ünd", "long": "x" * 300_000}
    with pytest.raises(TimeoutError):
        child.receive(0.05)
    child.send({"exit": True})
    with pytest.raises(EOFError):
        child.receive(60)
    assert child.stop(60) == 7
    assert child.exit_reason() == "with exit code 7"


def test_child_exits_when_its_socket_is_closed() -> None:
    assert ChildProcess("echo", request={}).stop(60) == 0


def test_hanging_child_is_killed_with_its_descendants() -> None:
    child = ChildProcess("echo", request={})
    child.send({"start": True})
    grandchild = Process.from_pid(child.receive(60)["pid"])
    assert grandchild is not None and grandchild.alive
    child.send({"hang": True})
    assert child.stop(0.2) == -signal.SIGKILL
    assert child.exit_reason() == "by signal 9 (SIGKILL), perhaps because memory ran out"
    assert not grandchild.alive


def test_child_exits_with_a_killed_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid, again = map(int, parent.stdout.readline().split())
        child = Process.from_pid(pid)
        parent.kill()
    assert pid == again and child is not None
    eventually(lambda: not child.alive)


def test_delays_double_up_to_the_longest() -> None:
    delays = Backoff(0.5, 3.0)
    assert [delays.next() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    delays.reset()
    assert delays.next() == 0.5
