"""Suspended processes (SIGSTOP): others continue, and one that wakes up does no harm."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from service import standing_in
from standin import publish
from up_home import DOUBLES, Home

from clickline.artifacts.registry import Registry
from clickline.storage.storage import Storage
from servers.waiting import eventually, free_ports, free_serve_ports
from version_manifests import IMPORT, version_manifest

PUBLISHES = (
    IMPORT
    + """
import sys
from clickline.artifacts.registry import Registry
from clickline.storage.storage import Storage
registry = Registry(Storage(), sys.argv[1])
before = registry.current()
with registry.draft() as draft:
    (draft.folder / "dense.onnx").write_bytes(b"network")
    print("begun", flush=True)
    sys.stdin.readline()
    version = draft.commit(version_manifest())
registry.move(version.number, "made", after=before)
"""
)


def test_suspended_publisher_blocks_nobody_and_moves_nothing_when_it_wakes(tmp_path: Path) -> None:
    registry = Registry(Storage(), str(tmp_path / "registry"))
    stopped = subprocess.Popen(
        [sys.executable, "-c", PUBLISHES, registry.uri],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert stopped.stdout is not None and stopped.stdout.readline() == "begun\n"
        stopped.send_signal(signal.SIGSTOP)
        with registry.draft() as draft:
            (draft.folder / "dense.onnx").write_bytes(b"another network")
            version = draft.commit(version_manifest())
        move = registry.move(version.number, "made", after=registry.current())
        registry.gc(1)  # its draft is alive: it stays
        stopped.send_signal(signal.SIGCONT)
        _, said = stopped.communicate("go\n", timeout=60)
    finally:
        stopped.kill()
        stopped.communicate()
    assert stopped.returncode == 1 and "RegistryMoved" in said
    assert registry.current() == move and move.version == 2
    registry.verify(registry.version(1), Path(registry.version(1).folder))  # whole, and not current


@pytest.mark.slow
def test_workers_answer_while_their_supervisor_is_suspended(tmp_path: Path) -> None:
    publish(tmp_path / "versions", 1)
    with standing_in(tmp_path, processes=2) as service:
        service.wait_up()
        workers = service.workers()
        os.kill(service.process.pid, signal.SIGSTOP)
        try:
            publish(tmp_path / "versions", 2)
            for _ in range(20):
                assert (
                    service.version() == 1
                )  # the supervisor, which would switch to the next one, is suspended
        finally:
            os.kill(service.process.pid, signal.SIGCONT)
        eventually(lambda: service.version() == 2)
        assert service.workers() == workers


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    folder = tmp_path / "ads"
    folder.mkdir()
    made = Home(folder, {"PYTHONPATH": str(DOUBLES), "CLICKLINE_DOUBLES": str(folder)})
    [studio] = free_ports(1)
    made.configure(
        name="ads",
        data={"train": "train.tsv"},
        cache={"dir": "cache"},
        studio={"port": studio},
        serve={**free_serve_ports(), "processes": 1, "drain_timeout": 2},
    )
    yield made
    assert made.end() == [], "processes were left behind"


@pytest.mark.slow
def test_suspended_studio_blocks_nothing(home: Home) -> None:
    process = home.start("up")
    home.until_up(process)
    eventually(lambda: home.state.get("studio"))
    os.kill(home.pid("studio"), signal.SIGSTOP)
    code, out, _ = home.run("status")
    assert code == 0 and out.startswith("ads: running since ")
    code, _, err = home.run("down")
    assert code == 0, err
    assert home.none_left()
