"""What all tests share: Hypothesis without deadlines (kernels compile on first use), the real rows, and a small
model that is trained once, in a project that tests may change."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import clickline
from clickline.config import Config, load_config
from clickline.data.sample.generate import SampleOptions, generate
from clickline.progress import Progress

settings.register_profile(
    "clickline",
    deadline=None,
    derandomize=os.environ.get("CI") == "true",
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("clickline")

# PyTorch, which reads this when it is loaded, has threads that spin while they wait: on cores that all workers share.
os.environ["GOMP_SPINCOUNT"] = "0"

# A test run in the background of a script has SIGINT ignored, and the processes that tests interrupt inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Bytes go by their argument's name: what they hold may differ between two processes (gzip writes the time)."""
    return argname if isinstance(val, bytes) else None


@pytest.fixture(scope="session", autouse=True)
def exporter_library() -> Iterator[None]:
    """PyTorch's ONNX exporter reads the source of all its operators anew for every network, for half a second."""
    with pytest.MonkeyPatch.context() as patch:
        if "torch" in sys.modules:
            from torch.onnx._internal.exporter._registration import ONNXRegistry

            patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(cache(ONNXRegistry.from_torchlib)))
        yield


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder with real rows, which are never copied into the project."""
    folder = Path(__file__).parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("the real rows are not here: no ../shared/data beside the project")
    return folder


# Statistics of the training rows (I3, I4) are part of the model; shards are small, so that a dataset and a log
# come in different pieces.
CONFIG = """
data:
  train: data/train.tsv
  eval: data/eval.tsv
  shard_size: 64KiB
  fields: {I3: zscore, I4: {transform: bucket, buckets: 4}, I5: {transform: bucket}}
cache: {dir: cache}
model: {embedding_dim: 4, hidden: [8]}
train: {batch_size: 256}
gate: {auc: 0.55, extra_epochs: 0}
tracking: {enabled: false}
"""


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8,000 synthetic rows, prepared and learned once for all tests."""
    folder = tmp_path_factory.mktemp("trained")
    generate(
        SampleOptions(format="criteo", rows=8000, out=folder / "data", seed=3, cardinality=2000), Progress()
    )
    (folder / "clickline.yaml").write_text(CONFIG)
    config = load_config(folder / "clickline.yaml")
    clickline.prepare(config)
    clickline.train(config)
    return folder


@pytest.fixture
def project(trained: Path, tmp_path: Path) -> Path:
    """A copy of one's own."""
    shutil.copytree(trained, tmp_path / "ads")
    return tmp_path / "ads"


@pytest.fixture
def config(project: Path) -> Config:
    return load_config(project / "clickline.yaml")


@pytest.fixture
def checkpoint(project: Path) -> Path:
    """The folder of the project's only checkpoint that counts."""
    return max((project / ".clickline" / "runs").glob("*/step-*"))
