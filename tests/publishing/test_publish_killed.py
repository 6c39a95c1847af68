"""A publisher that is killed leaves nothing that a server would use, and the next one succeeds."""

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

# Runs in its own process, which is killed at the given moment.
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
    "scores are not verified": (run, "_verify_scores"),
    "files exist, the manifest does not": (Draft, "commit"),
    "the manifest exists, the pointer has not moved": (Registry, "move"),
}
setattr(*moments[sys.argv[2]], die)
run.publish(load_config(sys.argv[1], ["publish.sample_rows=100"]), base=True)
"""


@pytest.mark.parametrize(
    ("moment", "complete"),
    [
        ("tables are half written", False),
        ("scores are not verified", False),
        ("files exist, the manifest does not", False),
        ("the manifest exists, the pointer has not moved", True),
    ],
)
def test_killed_publisher_leaves_nothing_visible(project, config, moment, complete):
    publish(config)
    registry = registry_of(config)
    killed = subprocess.run([sys.executable, "-c", KILLED, project / "clickline.yaml", moment], check=False)
    assert killed.returncode == -9
    current = registry.current()
    assert current is not None and current.version == 1
    assert [version.number for version in registry.versions()] == ([1, 2] if complete else [1])
    again = publish(load_config(project / "clickline.yaml", ["publish.sample_rows=100"]), base=True)
    after = again.version
    assert again.reused == complete
    assert registry.current().version == after.number > 1
    open_scorer(registry, after, Path(config.cache.dir), 1).check_sample()
    registry.gc(1)
    assert list((project / ".clickline" / "registry" / "drafts").iterdir()) == []
