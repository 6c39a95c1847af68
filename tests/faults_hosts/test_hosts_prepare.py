"""`prepare` on several hosts makes the same bytes as on one, when one of them leaves in the middle too."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hosts import Cluster, processes, wait_until

import clickline
from clickline.config import load_config

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]  # two cores may be busy with much else


def content(home: Path) -> dict[str, bytes]:
    """Every file, but for what of the config stands beside it: mode and address."""
    return {
        str(file.relative_to(home)): file.read_bytes()
        for file in sorted(home.rglob("*"))
        if file.is_file() and file.name != "resolved.yaml"
    }


def test_node_that_leaves_changes_no_byte(cluster: Cluster, ads: Path, tmp_path: Path) -> None:
    shutil.rmtree(ads / ".clickline")  # of the same files elsewhere, and so with another name
    clickline.prepare(load_config(ads / "clickline.yaml"))
    expected = content(ads / ".clickline")
    assert sum(name.endswith(".parquet") for name in expected) >= 10
    shutil.rmtree(ads / ".clickline")
    cluster.head(1)
    cluster.await_hosts()
    leaving = cluster.node("a", 1)
    cluster.await_hosts()

    def at_work() -> bool:
        """Whether the host that leaves makes a shard now, and some are made already."""
        titles = [Path(f"/proc/{pid}/cmdline") for pid in processes(leaving.mark)]
        works = any(title.exists() and title.read_bytes().startswith(b"ray::_work") for title in titles)
        return works and any((ads / ".clickline").rglob("work/train-*.json"))

    log = tmp_path / "prepare.log"
    sets = ["train.mode=cluster", f"cluster.address={cluster.address}"]
    with log.open("wb") as out:
        preparing = subprocess.Popen(
            [str(Path(sys.executable).with_name("clickline")), "prepare"]
            + [word for one in sets for word in ("--set", one)],
            cwd=ads,
            env=cluster.environment("driver"),
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    wait_until(lambda: at_work() or preparing.poll() is not None, log.read_text)
    assert preparing.poll() is None, log.read_text()
    leaving.kill()
    assert preparing.wait(300) == 0, log.read_text()
    assert content(ads / ".clickline") == expected
