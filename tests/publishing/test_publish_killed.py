"""A publisher that is killed at a named moment leaves nothing that a server would use, and the next one goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from clickline.artifacts.from_config import registry_of
from clickline.config import load_config
from clickline.publishing.run import publish
from clickline.scoring.open_scorer import open_scorer

pytestmark = pytest.mark.slow

# In a process of its own: the moment is reached, and the process is gone.
KILLED = """
import os, signal, sys
from clickline.artifacts.registry import Registry
from clickline.artifacts.version import Draft
from clickline.config import load_config
from clickline.publishing import run

def die(*args, **options):
    os.kill(os.getpid(), signal.SIGKILL)

moments = {
    "tables are half written": (run, "write_shards"),
    "files are not proven": (run, "_verify_scores"),
    "files are there, the manifest is not": (Draft, "commit"),
    "the manifest is there, the pointer has not moved": (Registry, "move"),
}
setattr(*moments[sys.argv[2]], die)
run.publish(load_config(sys.argv[1], ["publish.sample_rows=100"]), base=True)
"""


@pytest.mark.parametrize(
    ("moment", "whole"),
    [
        ("tables are half written", False),
        ("files are not proven", False),
        ("files are there, the manifest is not", False),
        ("the manifest is there, the pointer has not moved", True),
    ],
)
def test_what_a_killed_publisher_leaves(project, config, moment, whole):
    publish(config)
    registry = registry_of(config)
    killed = subprocess.run([sys.executable, "-c", KILLED, project / "clickline.yaml", moment], check=False)
    assert killed.returncode == -9
    current = registry.current()
    assert current is not None and current.version == 1
    assert [version.number for version in registry.versions()] == ([1, 2] if whole else [1])
    again = publish(load_config(project / "clickline.yaml", ["publish.sample_rows=100"]), base=True)
    after = again.version
    assert again.reused == whole
    assert registry.current().version == after.number > 1
    open_scorer(registry, after, Path(config.cache.dir), 1).check_sample()
    registry.gc(1)
    assert list((project / ".clickline" / "registry" / "drafts").iterdir()) == []
