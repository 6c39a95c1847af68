"""Ctrl-C and SIGTERM stop any command quickly, with one line and exit code 130."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from clickline_process import run, start

LINE = "interrupted; run the same command again to resume\n"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_sample_exits_within_two_seconds_and_leaves_no_draft(
    tmp_path: Path, number: signal.Signals
) -> None:
    run("sample", "--rows", "100", "-q", cwd=tmp_path)  # kernels are compiled and cached now
    process = start("sample", "--rows", "1000000000", "--out", "big", cwd=tmp_path)
    while not list((tmp_path / "big").glob(".train*")):  # it is writing rows
        assert process.poll() is None
        os.sched_yield()
    began = time.perf_counter()
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=60)
    seconds = time.perf_counter() - began
    assert (process.returncode, stdout, stderr.splitlines(keepends=True)[-1]) == (130, "", LINE)
    assert "Traceback" not in stderr
    assert seconds < 2
    assert list((tmp_path / "big").iterdir()) == []


def scripted(body: str) -> subprocess.Popen[str]:
    """A process that runs `main` with the work of a command replaced by `body`."""
    code = (
        "import signal, sys, threading, time\n"
        "from clickline.cli import main\n"
        "def ready(): print('ready', flush=True)\n"
        "def work(arguments):\n" + body + "\n"
        "main._run = work\n"
        "main.main()\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def interrupted(process: subprocess.Popen[str], times: int = 1) -> tuple[float, str, str]:
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    began = time.perf_counter()
    process.send_signal(signal.SIGINT)
    for _ in range(times - 1):
        assert process.stdout.readline() == "cleaning\n"
        process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    return time.perf_counter() - began, stdout, stderr


def test_interrupted_command_gets_time_to_clean_up() -> None:
    body = (
        "    try: ready(); time.sleep(100)\n"
        "    except KeyboardInterrupt:\n"
        "        print('cleaned', flush=True)\n"
        "        raise"
    )
    seconds, stdout, stderr = interrupted(scripted(body))
    assert (stdout, stderr) == ("cleaned\n", LINE)
    assert seconds < 1


def test_endless_clean_up_is_killed() -> None:
    body = (
        "    try: ready(); time.sleep(100)\n"
        "    finally:\n"
        "        print('cleaning', flush=True)\n"
        "        time.sleep(100)"
    )
    seconds, _, stderr = interrupted(scripted(body))
    assert stderr == LINE
    assert 1 < seconds < 2


def test_second_interrupt_exits_at_once() -> None:
    body = (
        "    try: ready(); time.sleep(100)\n"
        "    finally:\n"
        "        print('cleaning', flush=True)\n"
        "        time.sleep(100)"
    )
    seconds, _, stderr = interrupted(scripted(body), times=2)
    assert stderr == LINE
    assert seconds < 1


def test_blocked_main_thread_is_killed() -> None:
    """As in a kernel: the GIL is released, but no Python step runs and no handler is called."""
    seconds, _, stderr = interrupted(
        scripted("    import hashlib\n    ready()\n    hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)")
    )
    assert stderr == LINE
    assert seconds < 2


def test_interrupt_does_not_wait_for_busy_threads() -> None:
    body = "    threading.Thread(target=time.sleep, args=(100,)).start()\n    ready()\n    time.sleep(100)"
    seconds, _, stderr = interrupted(scripted(body))
    assert stderr == LINE
    assert seconds < 1
